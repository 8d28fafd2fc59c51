"""A recording through the watchdog, in its own time: records in, the lines of `gridctl replay` out."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gridagent.wire import StreamRecord
from gridctl.detect.grouping import Incidents
from gridctl.detect.ingest import Ingest
from gridctl.detect.policy import DetectPolicy
from gridctl.detect.watch import Watch
from gridctl.model.findings import Output, WatchedNode

TICK_S = 1.0
#: A clock that is ahead, or jumps, by more than this tells nothing about the time of other nodes.
JUMP_S = 30.0
#: The fleet's time is what this share of its nodes has reached: neither the fastest nor the slowest decides.
REACHED_SHARE = 0.25

Line = dict[str, Any]


class Playback:
    """Feeds a `Watch`. Equal records give equal lines."""

    def __init__(
        self, policy: DetectPolicy, nodes: Iterable[WatchedNode], jobs: Mapping[str, set[str]]
    ) -> None:
        nodes = list(nodes)
        self._spares = {node.name: node for node in nodes if node.spare}
        self.watch = Watch(policy, nodes, jobs)
        self.ingest = Ingest(policy, self.watch)
        self._incidents = Incidents(policy.thresholds.shared_fate, nodes, jobs)
        self._clock = FleetClock(node.name for node in nodes)
        self._ticked_s = 0.0

    def feed(self, record: StreamRecord) -> Iterator[Line]:
        """Takes one record."""
        yield from self.take(record, self._clock.feed(record.node, record.t_unix_s))
        if self._clock.now_s >= self._ticked_s + TICK_S:
            self._ticked_s = self._clock.now_s
            yield from self.tick(self._ticked_s)

    def take(self, record: StreamRecord, heard_s: float) -> Iterator[Line]:
        """The same where a reader knows better what time it is; it calls `tick` then."""
        if record.kind == "progress" and (spare := self._spares.pop(record.node, None)):
            self.watch.update(msgspec.structs.replace(spare, spare=False))  # a rank runs on it now
        yield from self._lines(self.ingest.record(record, heard_s))

    def tick(self, now_s: float) -> Iterator[Line]:
        """Lets time pass."""
        yield from self._lines(self.watch.tick(now_s))

    def _lines(self, outputs: Iterable[Output]) -> Iterator[Line]:
        for out in outputs:
            incident = self._incidents.feed(out)
            yield as_line(out)
            if incident is not None:
                yield incident


class FleetClock:
    """What time it is, from nodes that each have a clock of their own.

    Order holds per node only: a clock may be ahead or jump, and a file may tell of one node first and of
    the next one later. So time is what a part of the fleet has reached, jumps of single clocks taken out.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.now_s = 0.0
        self._latest_s: dict[str, float] = dict.fromkeys(nodes, 0.0)
        self._own_s: dict[str, tuple[float, float]] = {}  #: node -> (its last time, the fleet's time then)
        self._ahead_s: dict[str, float] = {}  #: node -> by how much its clock is off
        self._beyond: set[str] = set()

    def feed(self, node: str, t_s: float) -> float:
        """Takes the time of a node's record; returns when that was, in the fleet's time."""
        last_s, at_s = self._own_s.get(node, (self.now_s, self.now_s))
        jump_s = (t_s - last_s) - (self.now_s - at_s)
        if abs(jump_s) > JUMP_S:
            ahead_s = self._ahead_s.get(node, 0.0) + jump_s
            self._ahead_s[node] = ahead_s if abs(ahead_s) > JUMP_S else 0.0
        self._own_s[node] = (t_s, self.now_s)
        seen_s = t_s - self._ahead_s.get(node, 0.0)
        if seen_s > self._latest_s.get(node, -1.0):
            self._latest_s[node] = seen_s
        if seen_s > self.now_s:
            self._beyond.add(node)
            self._advance()
        return max(seen_s, self.now_s)

    def _advance(self) -> None:
        needed = max(1, min(2, len(self._latest_s)), int(len(self._latest_s) * REACHED_SHARE))
        if len(self._beyond) < needed:
            return
        reached = sorted((self._latest_s[node] for node in self._beyond), reverse=True)
        self.now_s = reached[needed - 1]
        self._beyond = {node for node in self._beyond if self._latest_s[node] > self.now_s}


def as_line(out: Output) -> Line:
    """What `gridctl replay` prints of an output."""
    return {
        "t": round(out.t_unix_s, 6),
        "type": type(out).__name__.lower(),
        "node": out.node or None,
        "device": out.device.removeprefix("pci:"),
        "kind": out.kind,
        "severity": out.severity,
        "action": out.action,
        "preempt_job": out.preempt_job,
        "when": out.when,
        "why": out.why,
        "rule": out.rule,
    }
