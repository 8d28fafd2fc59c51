"""Every later loss is the same to the last bit, on all ranks, whoever leaves and whatever is trained."""

from fleet import Job, TrainingFleet, assert_same


def test_a_rank_moves_and_nothing_else_changes(trained: TrainingFleet) -> None:
    run = trained.start(Job("plain.py"))
    report = trained.handover(run, [1]).swap()
    assert report.outcome == "commit", (report, run.logs())
    assert_same(run, run.finish(), trained.control(run.job))
