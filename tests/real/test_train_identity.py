"""Every later loss is the same to the last bit, on all ranks, whoever leaves and whatever is trained."""

import pytest
from fleet import Job, TrainingFleet, assert_same

KINDS = [
    Job("ddp"),
    Job("ddp", ("torchdata",)),
    Job("ddp", ("wrapped",)),
    Job("fsdp"),
    Job("ema"),
    Job("accumulate"),
    Job("scaler", ("bfloat16",)),
    Job("scaler", ("float16",)),
    Job("optimizers", ("fused",)),
    Job("optimizers", ("tensor_lr",)),
    Job("buckets"),
    Job("two_ddp"),
    Job("unused"),
    Job("static"),
    Job("late_group", ("3",)),
    Job("functional"),
    Job("attributes"),
    Job("held"),
]
#: Further optimizers: what they add is more of the same state. In `make matrix`.
MORE_KINDS = [Job("optimizers", (name,)) for name in ("sgd", "adam", "rmsprop")]


@pytest.mark.parametrize(
    "job",
    [*KINDS, *(pytest.param(job, marks=pytest.mark.matrix) for job in MORE_KINDS)],
    ids=lambda job: "-".join((job.kind, *job.args)),
)
def test_a_rank_moves_and_nothing_else_changes(trained: TrainingFleet, job: Job) -> None:
    run = trained.start(job)
    handover = trained.handover(run, [1])
    report = handover.swap()
    assert report.outcome == "commit", (report, run.logs())
    assert handover.warm[1].buckets == handover.reports[1].buckets
    assert handover.warm[1].groups == handover.reports[1].groups
    assert handover.warm[1].inventory == handover.reports[1].inventory
    assert not handover.reports[1].blockers
    assert_same(run, run.finish(), trained.control(run.job))


def test_rank_0_leaves_and_a_group_is_made_afterwards(trained: TrainingFleet) -> None:
    """The host of the old epoch's store is gone by then."""
    run = trained.start(Job("late_group", ("24",)))
    report = trained.handover(run, [0], then=22).swap()
    assert report.outcome == "commit", (report, run.logs())
    assert run.left[0].process.wait(60) == 0  # released, and with it the old store
    assert_same(run, run.finish(), trained.control(run.job))


@pytest.mark.parametrize("job", [Job("ddp", world=4), Job("hsdp", world=4)], ids=lambda job: job.kind)
def test_two_of_four_ranks_leave_at_one_boundary(trained: TrainingFleet, job: Job) -> None:
    run = trained.start(job)
    report = trained.handover(run, [0, 3]).swap()
    assert report.outcome == "commit", (report, run.logs())
    assert sorted(report.digests) == ["0", "3"]
    assert_same(run, run.finish(), trained.control(run.job))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_second_swap_takes_the_first_ones_chair(trained: TrainingFleet, kind: str) -> None:
    """Rank 0 hosted the store of epoch 1 and leaves in the swap to epoch 2."""
    run = trained.start(Job(kind))
    first = trained.handover(run, [1], then=20).swap()
    assert (first.outcome, first.epoch) == ("commit", 1), (first, run.logs())
    second = trained.handover(run, [0]).swap()
    assert (second.outcome, second.epoch) == ("commit", 2), (second, run.logs())
    assert_same(run, run.finish(), trained.control(run.job))


def test_a_group_made_during_the_hand_over_aborts_it(trained: TrainingFleet) -> None:
    run = trained.start(Job("late_group", ("15",)))
    report = trained.handover(run, [1]).swap()
    assert report.outcome == "abort"
    assert "process groups were made or destroyed" in report.reason
    assert_same(run, run.finish(), trained.control(run.job))


def test_after_an_aborted_swap_the_next_one_succeeds(trained: TrainingFleet) -> None:
    run = trained.start(Job("fsdp"))
    first = trained.handover(run, [2], damage="bit", then=20).swap()
    assert (first.outcome, first.epoch) == ("abort", 0), (first, run.logs())
    second = trained.handover(run, [2]).swap()
    assert (second.outcome, second.epoch) == ("commit", 1), (second, run.logs())
    assert_same(run, run.finish(), trained.control(run.job))


def test_cancelled_after_it_was_prepared(trained: TrainingFleet) -> None:
    run = trained.start(Job("ddp"))
    handover = trained.handover(run, [1])
    handover.prepare()
    handover.abort()
    handover.end()
    assert_same(run, run.finish(), trained.control(run.job))


def test_through_gridagent_exec_and_park(trained: TrainingFleet) -> None:
    """No fork server: every process is what an operator starts. Training never waits for the hand-over."""
    run = trained.start(Job("ddp", steps=400), execute=True)
    spare = trained.park(run, execute=True)
    run.pace(0.02)
    handover = trained.handover(run, [1], spares=[spare], lead_steps=15, free=True)
    report = handover.swap()
    assert report.outcome == "commit", (report, run.logs())
    assert_same(run, run.finish(), trained.control(run.job))
