"""A void step is repeated by all, or applied by all, and the run is the undisturbed one to the bit."""

import signal
import time

import pytest
from agents import DEADLINE_S, Agent, wait_for
from fleet import Job, TrainingFleet, assert_same

from gridagent.wire import RankStatus

#: Where one of three ranks loses its groups.
MOMENTS = ("start", "forward", "backward", "late", "memory", "vote", "voted", "tail")


def disturbed(kind: str, *words: str, world: int = 3, **environment: str) -> Job:
    return Job(kind, ("attempt", *words), world=world, steps=24, env=tuple(environment.items()))


def plain(job: Job) -> Job:
    """The same training by a script that knows of no attempt."""
    return Job(job.kind, world=job.world, steps=job.steps)


@pytest.mark.parametrize("moment", MOMENTS)
def test_groups_that_break_cost_no_step_and_no_bit(trained: TrainingFleet, moment: str) -> None:
    """BatchNorm, dropout, clipping, a schedule. First rank 1's groups break, later rank 0's."""
    job = disturbed("ddp", "regroup", f"fault=drop:{moment}:9:1", f"fault=drop:{moment}:17:0")
    run = trained.start(job, hold=None)
    assert_same(run, run.finish(), trained.control(plain(job)))
    for rank in range(3):
        log = (run.folder / f"rank-{rank}.log").read_text()
        assert log.count(f"rank {rank} stands") == 2, log


@pytest.mark.parametrize("moment", ["forward", "backward", "vote", "voted"])
def test_accumulation_clipping_and_a_grad_scaler(trained: TrainingFleet, moment: str) -> None:
    """The window has three batches and may lie across the ends of the data's epochs; one step overflows."""
    faults = [f"fault=drop:{moment}:{step}:{rank}" for step, rank in ((3, 1), (10, 2), (14, 0))]
    job = disturbed("mixed", "regroup", *faults)
    run = trained.start(job, hold=None)
    assert_same(run, run.finish(), trained.control(plain(job)))


def status_of(agent: Agent, job: str) -> RankStatus:
    (found,) = [rank for rank in agent.client().status().ranks if rank.job == job]
    return found


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("moment", ["start", "forward", "backward", "late", "memory", "vote", "tail"])
def test_survivors_of_a_killed_rank_stand_and_end_when_nobody_comes(
    trained: TrainingFleet, moment: str, world: int
) -> None:
    """Of four ranks one is no neighbour of the dead one. All stand long before the time-out of a minute."""
    job = disturbed("ddp", f"fault=kill:{moment}:9:1", world=world, GRIDAGENT_HOLD_S="6")
    run = trained.start(job, hold=None)
    victim = run.ranks.pop(1)
    assert victim.process.wait(DEADLINE_S) == -signal.SIGKILL
    killed_s = time.monotonic()
    agents = [holder.agent for holder in run.ranks.values()]
    wait_for("all stand", lambda: all(status_of(a, run.name).state == "standing" for a in agents))
    assert time.monotonic() - killed_s < 40
    steps = {status_of(agent, run.name).step for agent in agents}
    assert steps == {10} if moment == "tail" else steps == {9}, steps
    for holder in run.ranks.values():
        assert holder.process.wait(DEADLINE_S) == 75
    for rank in run.ranks:
        log = (run.folder / f"rank-{rank}.log").read_text()
        assert "nobody made the groups anew within 6 s" in log
        assert "Traceback" not in log
