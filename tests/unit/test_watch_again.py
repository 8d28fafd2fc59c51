"""What simulated fleets taught: an event that comes again, and a job that starts again."""

from typing import Any

from gridagent.wire import StreamRecord
from gridctl.detect.policy import builtin
from gridctl.detect.watch import Watch
from gridctl.model.findings import Finding, Output, WatchedNode

CONTAINED = "NVRM: Xid (PCI:0000:9a:00): 94, pid=7, name=python3, Contained: SM (0x1). RST: No, D-RST: No"


class Node:
    """One node under watch, told of second by second."""

    def __init__(self) -> None:
        self.watch = Watch(builtin(), [WatchedNode(name="a", gpus=1)], {"a": {"job"}})
        self._seq = 0

    def tell(self, t_s: float, kind: str, **v: Any) -> list[Output]:
        self._seq += 1
        return self.watch.feed(StreamRecord(self._seq, "b1", t_s, "a", kind, v))

    def beat(self, t_s: float) -> None:
        self.tell(t_s, "beat", boot="b1", seq=int(t_s))


def contained(node: Node, t_s: float) -> list[Finding]:
    said = node.tell(t_s, "log", source="kmsg", line=f"[{1000 + t_s:.6f}] {CONTAINED}")
    return [out for out in said if isinstance(out, Finding)]


def test_the_same_line_after_a_quiet_hour_is_another_event() -> None:
    node = Node()
    node.beat(0)
    assert len(contained(node, 10)) == 1
    assert contained(node, 1800) == []
    assert contained(node, 5300) == []  # less than an hour after the last one
    (again,) = contained(node, 9000)
    assert (again.kind, again.t_unix_s, again.preempt_job) == ("ecc_contained", 9000, False)


def hangs(node: Node, begin_s: int, end_s: int, busy: bool) -> list[float]:
    """Lets time pass without a step; returns when a hang was told."""
    told = []
    for t_s in range(begin_s, end_s):
        node.beat(t_s)
        node.tell(t_s, "sample", device="gpu:0", v={"util_pct": 100 if busy else 0})
        told += [out.t_unix_s for out in node.watch.tick(t_s) if out.kind == "silent_hang"]
    return told


def stepping() -> Node:
    node = Node()
    for t_s in range(100):
        node.beat(t_s)
        node.tell(t_s, "sample", device="gpu:0", v={"util_pct": 98})
        if t_s % 5 == 0:
            node.tell(t_s, "progress", job="job", rank=0, step=t_s // 5, loss=2.0)
    return node


def test_a_job_that_stands_with_busy_gpus_hangs() -> None:
    (told_s,) = hangs(stepping(), 100, 400, busy=True)
    assert told_s < 200


def test_a_job_that_was_stopped_does_not_hang_in_the_moment_it_starts_again() -> None:
    node = stepping()
    assert hangs(node, 100, 1600, busy=False) == []
    assert hangs(node, 1600, 2400, busy=True) == []  # it loads and warms up: half of the pause is granted


def test_a_job_that_never_makes_a_step_after_its_restart_hangs_in_the_end() -> None:
    node = stepping()
    hangs(node, 100, 400, busy=False)
    assert len(hangs(node, 400, 1200, busy=True)) == 1
