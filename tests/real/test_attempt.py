"""A step that is void is repeated by all, or applied by all, and the run is the undisturbed one to the bit."""

import pytest
from fleet import Job, TrainingFleet, assert_same

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
