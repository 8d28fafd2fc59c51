"""A void step is repeated by all, or applied by all, and the run is the undisturbed one to the bit."""

import signal
import time
from typing import Any

import msgspec
import pytest
from agents import DEADLINE_S, Agent, wait_for
from fleet import Job, Run, TrainingFleet, assert_same

from gridagent.wire import RankStatus, SessionReport


def in_full(*cases: Any) -> list[Any]:
    """Cases of `make matrix` only."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.matrix)
        for case in cases
    ]


#: Where one of three ranks loses its groups.
MOMENTS = [*("start", "backward", "vote", "voted"), *in_full("forward", "late", "memory", "tail")]


def disturbed(job: Job, *words: str, **environment: str) -> Job:
    """The same training with its steps as attempts."""
    args = (*job.args, "attempt", *words)
    return Job(job.kind, args, world=job.world, steps=job.steps, env=tuple(environment.items()))


@pytest.mark.parametrize("moment", MOMENTS)
def test_groups_that_break_cost_no_step_and_no_bit(trained: TrainingFleet, moment: str) -> None:
    """BatchNorm, dropout, clipping, a schedule. First rank 1's groups break, later rank 0's."""
    job = Job("ddp", steps=24)
    run = trained.start(
        disturbed(job, "regroup", f"fault=drop:{moment}:9:1", f"fault=drop:{moment}:17:0"), hold=None
    )
    assert_same(run, run.finish(), trained.control(job))
    for rank in range(3):
        log = (run.folder / f"rank-{rank}.log").read_text()
        assert log.count(f"rank {rank} stands") == 2, log


@pytest.mark.parametrize("moment", ["backward", "voted", *in_full("forward", "vote")])
def test_accumulation_clipping_and_a_grad_scaler(trained: TrainingFleet, moment: str) -> None:
    """The window has three batches and may lie across the ends of the data's epochs; one step overflows."""
    job = Job("mixed", steps=24)
    faults = [f"fault=drop:{moment}:{step}:{rank}" for step, rank in ((3, 1), (10, 2), (14, 0))]
    run = trained.start(disturbed(job, "regroup", *faults), hold=None)
    assert_same(run, run.finish(), trained.control(job))


KINDS = [
    Job("ddp", ("torchdata",), steps=24),
    Job("scaler", ("float16",), steps=24),
    Job("late_group", ("3",), steps=24),  # the script itself reduces within the step
    *in_full(
        Job("ema", steps=24),
        Job("buckets", steps=24),
        Job("two_ddp", steps=24),
        Job("unused", steps=24),
        Job("static", steps=24),
        Job("functional", steps=24),  # collectives from C++, which are the script's own
    ),
]


@pytest.mark.parametrize("job", KINDS, ids=lambda job: "-".join((job.kind, *job.args)))
def test_of_every_kind(trained: TrainingFleet, job: Job) -> None:
    faults = ("fault=drop:start:9:1", "fault=drop:late:15:2", "fault=drop:voted:18:0")
    run = trained.start(disturbed(job, "regroup", *faults), hold=None)
    assert_same(run, run.finish(), trained.control(job))


def status_of(agent: Agent, job: str) -> RankStatus:
    (found,) = [rank for rank in agent.client().status().ranks if rank.job == job]
    return found


def kill(trained: TrainingFleet, job: Job, moment: str, **environment: str) -> Run:
    """Rank 1 kills itself in step 9."""
    run = trained.start(disturbed(job, f"fault=kill:{moment}:9:1", **environment), hold=None)
    assert run.ranks.pop(1).process.wait(DEADLINE_S) == -signal.SIGKILL
    return run


def wait_standing(run: Run) -> None:
    for holder in run.ranks.values():
        agent = holder.agent
        wait_for("it stands", lambda agent=agent: status_of(agent, run.name).state == "standing")


@pytest.mark.parametrize(
    ("moment", "world"),
    [
        ("start", 3),
        ("vote", 3),
        ("late", 4),
        ("tail", 4),
        *in_full(("backward", 3), ("voted", 3), ("forward", 4), ("memory", 4)),
    ],
)
def test_survivors_of_a_killed_rank_stand_and_end_when_nobody_comes(
    trained: TrainingFleet, moment: str, world: int
) -> None:
    """Of four ranks one is no neighbour of the dead one. All stand long before the time-out of a minute."""
    killed_s = time.monotonic()
    run = kill(trained, Job("ddp", world=world, steps=24), moment, GRIDAGENT_HOLD_S="6")
    wait_standing(run)
    assert time.monotonic() - killed_s < 50
    told = [status_of(holder.agent, run.name) for holder in run.ranks.values()]
    assert {status.step for status in told} == ({10} if moment in ("tail", "voted") else {9})
    for rank, holder in run.ranks.items():
        assert holder.process.wait(DEADLINE_S) == 75
        log = (run.folder / f"rank-{rank}.log").read_text()
        assert "nobody made the groups anew within 6 s" in log
        assert "Traceback" not in log


def test_a_rank_that_stands_tells_of_itself(trained: TrainingFleet) -> None:
    """describe and digest are answered at once; the gradients of the void step are no hindrance."""
    run = kill(trained, Job("ddp", steps=24), "late")
    wait_standing(run)
    for holder in run.ranks.values():
        args = {"session": status_of(holder.agent, run.name).session}
        status = holder.agent.client().op("job.describe", args, run="look", fence=0, job=run.name)
        assert status.state == "done", status
        report = msgspec.convert(status.value, SessionReport)
        assert (report.step, report.blockers) == (9, [])
        holder.process.kill()
        holder.process.wait(DEADLINE_S)


def test_a_collective_after_the_vote_cannot_be_repeated(trained: TrainingFleet) -> None:
    """Rank 1 dies before it; the others have applied the step, and say so as they end."""
    run = kill(trained, Job("reduced", steps=24), "tail")
    for rank, holder in run.ranks.items():
        assert holder.process.wait(DEADLINE_S) == 75
        log = (run.folder / f"rank-{rank}.log").read_text()
        assert "a collective failed after step 9 was applied" in log
        assert "which cannot be repeated; ending so that the scheduler can requeue the job" in log


def test_an_order_of_gradients_that_did_not_reach_all_cannot_be_repeated(trained: TrainingFleet) -> None:
    """DDP exchanges it once, before its second forward. The ranks that miss it end at once."""
    job = disturbed(Job("buckets", steps=24), "fault=drop:start:1:1", GRIDAGENT_HOLD_S="6")
    run = trained.start(job, hold=None)
    for rank, holder in run.ranks.items():
        assert holder.process.wait(DEADLINE_S) == 75
        log = (run.folder / f"rank-{rank}.log").read_text()
        assert ("DDP's exchange of its bucket layout failed" in log) or rank == 0
    assert "DDP's exchange" in (run.folder / "rank-1.log").read_text()


def test_without_attempts_a_death_ends_all_as_before(trained: TrainingFleet) -> None:
    run = trained.start(Job("ddp", ("fault=kill:late:9:1",), steps=24), hold=None)
    assert run.ranks.pop(1).process.wait(DEADLINE_S) == -signal.SIGKILL
    for rank, holder in run.ranks.items():
        assert holder.process.wait(DEADLINE_S) == 1
        assert "RuntimeError" in (run.folder / f"rank-{rank}.log").read_text()


def test_a_sharded_model_says_once_that_its_steps_are_no_attempts(trained: TrainingFleet) -> None:
    job = Job("fsdp", steps=24)
    run = trained.start(disturbed(job), hold=None)
    assert_same(run, run.finish(), trained.control(job))
    for rank in range(3):
        log = (run.folder / f"rank-{rank}.log").read_text()
        assert log.count("a step that a dead peer spoils is lost with the job: model is sharded") == 1


def test_a_swap_of_a_script_that_makes_attempts(trained: TrainingFleet) -> None:
    """The spare warms up in the same script; afterwards its steps are attempts like all others'."""
    job = Job("mixed", steps=36)
    run = trained.start(disturbed(job, "regroup", "fault=drop:backward:30:0"))
    report = trained.handover(run, [1]).swap()
    assert report.outcome == "commit", (report, run.logs())
    assert_same(run, run.finish(), trained.control(job))
