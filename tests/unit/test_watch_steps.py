"""A rank that lags, and a loss that leaves its band: the true case, near misses, what does not count."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.wire import StreamRecord
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Decision, Finding, Output, WatchedNode

POLICY = builtin()
RANKS = 16
NAMES = [f"n{number}" for number in range(8)]
Took = Callable[[int, int], float | None]  #: step, rank -> seconds


class Job:
    """Sixteen ranks on eight nodes, with some noise that is the same every time."""

    def __init__(self, seed: int = 0, ranks: int = RANKS) -> None:
        self.watch = Watch(
            POLICY, [WatchedNode(name=name) for name in NAMES], {name: {"j"} for name in NAMES}
        )
        self.chance = random.Random(seed)
        self.step, self.ranks, self.epoch = 0, ranks, 0
        self.order = list(range(ranks))
        self.outputs: list[Output] = []

    def feed(self, node: str, kind: str, **v: Any) -> None:
        record = StreamRecord(seq=1, boot="b", t_unix_s=self.step * 10.0, node=node, kind=kind, v=v)
        self.outputs += self.watch.feed(record)

    def run(self, steps: int, took: Took = lambda step, rank: 10.0, loss: float | None = 2.0) -> "Job":
        for _ in range(steps):
            self.step += 1
            for name in NAMES:
                self.feed(name, "beat", boot="b", seq=self.step)
            reports = {}
            for rank in range(self.ranks):
                step_s, noise = took(self.step, rank), self.chance.gauss(0.0, 0.05)
                reports[rank] = None if step_s is None else step_s + noise
            value = None if loss is None else loss + self.chance.gauss(0.0, 0.02)
            for rank in self.order:
                about = {"job": "j", "rank": rank, "epoch": self.epoch, "step": self.step}
                self.feed(NAMES[rank % len(NAMES)], "progress", **about, loss=value, step_s=reports[rank])
        return self

    def told(self) -> list[tuple[str, str]]:
        assert not any(isinstance(out, Decision) or out.preempt_job for out in self.outputs)
        return [(out.node, out.kind) for out in self.outputs if isinstance(out, Finding)]


def slow(which: int, factor: float = 1.5) -> Took:
    return lambda step, rank: 10.0 * factor if rank == which else 10.0


def test_a_rank_that_is_slower_than_the_others_is_told_once_and_ends() -> None:
    job = Job().run(40).run(30, slow(5))
    assert job.told() == [("n5", "straggler")]
    assert job.watch.verdict("n5") == "suspect"
    assert job.run(30).told() == [("n5", "straggler")]
    assert job.watch.verdict("n5") == "healthy"


def test_two_ranks_of_a_node_are_one_finding() -> None:
    lagging: Took = lambda step, rank: 15.0 if rank in (5, 13) else 10.0  # noqa: E731
    assert Job().run(40).run(30, lagging).told() == [("n5", "straggler")]


@pytest.mark.parametrize(
    "took",
    [
        lambda step, rank: 10.0,
        lambda step, rank: 10.1 if rank == 5 else 10.0,
        lambda step, rank: 10.0 + 5.0 * (1, -1, 0)[step % 3] * (rank == 5),  # late now and then, and made up
        lambda step, rank: 60.0 if step % 10 == 0 else 10.0,  # an evaluation of all
        lambda step, rank: 60.0 if step % 10 == (rank > 0) else 10.0,  # rank 0 checkpoints, then all wait
        lambda step, rank: 15.0 if rank % 2 else 10.0,  # half of them
        lambda step, rank: None if rank == 5 else 10.0,
        lambda step, rank: 10.0 + step / 10,  # all get slower
    ],
)
def test_near_misses(took: Took) -> None:
    assert Job().run(40).run(60, took).told() == []


def test_the_beginning_and_the_time_after_a_hand_over_do_not_count() -> None:
    assert Job().run(20, slow(5)).run(40).told() == []
    job = Job().run(40)
    job.feed("n5", "phase", job="j", rank=5, handover="h", phase="cut")
    assert job.run(18, slow(5)).run(40).told() == []
    job.epoch = 1
    assert job.run(18, slow(5)).run(40).told() == []


def test_a_finding_ends_with_the_membership_that_it_was_about() -> None:
    job = Job().run(40).run(30, slow(5))
    job.epoch = 1
    job.run(2)
    assert job.watch.verdict("n5") == "healthy"


def test_a_rank_that_gets_later_and_later_is_told_by_what_adds_up() -> None:
    assert Job().run(40).run(60, slow(5, 1.05)).told() == [("n5", "straggler")]


def test_few_ranks_say_nothing_of_each_other() -> None:
    assert Job(ranks=3).run(40).run(60, slow(1)).told() == []


def test_a_loss_that_stays_above_its_band_is_told_once_and_a_single_spike_is_not() -> None:
    job = Job().run(60).run(1, loss=9.0).run(20).run(2, loss=9.0).run(20)
    assert job.told() == []
    job.run(10, loss=4.0)
    assert job.told() == [("", "loss_spike")]
    assert job.run(30).run(10, loss=4.0).told() == [("", "loss_spike")] * 2, "a second one is another one"


def test_a_loss_that_falls_or_is_not_known_is_no_spike() -> None:
    job = Job()
    for loss in (11.0, 8.0, 6.0, 4.0, 3.0, 2.5, 2.2):
        job.run(15, loss=loss).run(1, loss=None)
    assert job.told() == []


def test_a_job_that_goes_back_to_a_checkpoint_has_the_loss_of_then() -> None:
    job = Job()
    for step in range(200):
        job.run(1, loss=6.0 - step / 50)
    job.step = 20
    for step in range(20, 120):
        job.run(1, loss=6.0 - step / 50)
    assert job.told() == []


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(RANKS)), st.integers(0, RANKS - 1), st.integers(0, 99))
def test_the_order_in_which_ranks_report_changes_nothing(order: list[int], which: int, seed: int) -> None:
    usual, other = Job(seed), Job(seed)
    usual.run(30), other.run(30)
    other.order = order
    for job in (usual, other):
        job.run(20, slow(which)).run(10, loss=5.0)
    assert (
        sorted(usual.told()) == sorted(other.told()) == [("", "loss_spike"), (NAMES[which % 8], "straggler")]
    )
