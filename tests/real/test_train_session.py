"""The session in a training script: without an agent, before a hand-over, and where it cannot take part."""

from pathlib import Path

import msgspec
import pytest
from driver import OpRefused
from fleet import Job, Run, TrainingFleet, assert_same


def log(run: Run, rank: int) -> str:
    return Path(run.folder, f"rank-{rank}.log").read_text()


def test_without_an_agent_a_script_runs_as_before_with_one_warning(trained: TrainingFleet) -> None:
    run = trained.start_alone(Job("ddp"))
    assert_same(run, run.finish(), trained.control(run.job))
    for rank in range(3):
        assert log(run, rank).splitlines() == [
            "no gridagent here (GRIDAGENT_SOCKET is not set): training runs without hand-over"
        ]


def test_a_preflight_finds_all_that_stands_in_the_way(trained: TrainingFleet) -> None:
    run = trained.start(Job("blocked"))
    handover = trained.handover(run, [1])
    handover.describe()
    found = {blocker.code: blocker for blocker in handover.reports[1].blockers}
    assert found.keys() == {"unregistered-tensor", "gradient-at-boundary", "state-cannot-move"}
    assert all(blocker.fatal for blocker in found.values())
    assert (
        "model/anchor is a tensor that is neither parameter nor buffer" in found["unregistered-tensor"].text
    )
    assert "own.seen: set cannot be moved" in found["state-cannot-move"].text
    handover.op(handover.targets[1], "handover.retire", {"reason": "not needed"})
    handover.end()
    run.finish()


@pytest.mark.parametrize("args", [(), ("torchdata",)], ids=["own", "torchdata"])
def test_the_loader_ends_exactly_at_the_boundary(trained: TrainingFleet, args: tuple[str, ...]) -> None:
    """Eleven batches an epoch, boundary 22: the target opens the next epoch of the data."""
    run = trained.start(Job("ddp", args))
    handover = trained.handover(run, [1], lead_steps=8)
    report = handover.swap()
    assert (report.outcome, report.boundary_step) == ("commit", 22), report
    assert_same(run, run.finish(), trained.control(run.job))


def test_the_boundary_is_after_the_last_step(trained: TrainingFleet) -> None:
    """The target has the rank and nothing left to train."""
    run = trained.start(Job("ddp", steps=17))
    report = trained.handover(run, [1]).swap()
    assert (report.outcome, report.boundary_step) == ("commit", 17), report
    assert_same(run, run.finish(), trained.control(run.job))


def test_the_job_ends_before_the_boundary(trained: TrainingFleet) -> None:
    run = trained.start(Job("ddp", steps=16))
    report = trained.handover(run, [1]).swap()
    assert report.outcome == "abort"
    assert "come to its end" in report.reason or "is gone" in report.reason
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_spare_whose_job_is_nearly_over_says_so(trained: TrainingFleet) -> None:
    run = trained.start(Job("ddp", steps=16))
    handover = trained.handover(run, [1])
    handover.describe()
    handover.reports[1] = msgspec.structs.replace(handover.reports[1], step=15)
    with pytest.raises(OpRefused, match="came to its end within"):
        handover.specialise()
    handover.end()
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_script_that_fails_in_the_spare_says_why(
    trained: TrainingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's folder of arguments does not exist on the spare's node, say."""
    run = trained.start(Job("ddp"))
    handover = trained.handover(run, [1])
    handover.describe()
    launch = handover.launch(1)
    moved = msgspec.structs.replace(launch, cwd="/nowhere")
    monkeypatch.setattr(handover, "launch", lambda _rank: moved)
    with pytest.raises(OpRefused, match=r"FileNotFoundError.*/nowhere"):
        handover.specialise()
    handover.end()
    (spare,) = handover.spares
    assert spare.process.wait(60) != 0
    run.left.remove(spare)
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_collective_in_flight_in_a_side_thread_forbids_the_boundary(trained: TrainingFleet) -> None:
    """Rank 2 never takes part in it before the boundary: abort, and then it completes."""
    run = trained.start(Job("side_thread"))
    report = trained.handover(run, [1]).swap()
    assert report.outcome == "abort"
    assert "1 collectives are still in flight" in report.reason
    assert_same(run, run.finish(), trained.control(run.job))
