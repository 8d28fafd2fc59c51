"""Readers beside the watchdog: each gets what the nodes tell from now on, or is told of a gap."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import msgspec

from gridagent.wire import StreamRecord
from gridctl.control.sentinel import watched
from gridctl.errors import Refused
from gridctl.model.findings import WatchedNode
from gridctl.model.fleet import Node, jobs, several

#: A reader that is further behind loses the newest; about 20 MB.
KEPT_MAX = 20_000
#: What a gap says that is a reader's own doing, and not an agent's.
TOO_SLOW = "the reader was too slow"


class Tap:
    """One reader's records."""

    def __init__(self, nodes: frozenset[str], before: Mapping[str, int]) -> None:
        """`nodes`: of these, all if empty. `before`: node -> the last record that is too old."""
        self._nodes, self._before = nodes, dict(before)
        self._kept: deque[StreamRecord] = deque()
        self._dropped: dict[str, StreamRecord] = {}
        self._lost: dict[str, int] = {}
        self._news = asyncio.Event()

    def feed(self, record: StreamRecord) -> None:
        """Takes one record; never waits."""
        node = record.node
        if (self._nodes and node not in self._nodes) or record.seq <= self._before.get(node, 0):
            return
        self._before.pop(node, None)  # from now on all is new, also where the node's spool begins anew
        if len(self._kept) >= KEPT_MAX:
            self._dropped[node] = record
            self._lost[node] = self._lost.get(node, 0) + 1
        else:
            self._kept.append(record)
        self._news.set()

    async def batch(self, wait_s: float) -> list[StreamRecord]:
        """What came since the last call; none if nothing comes for so long."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), wait_s)
        self._news.clear()
        found = [*self._kept, *self._gaps()]
        self._kept.clear()
        return found

    def _gaps(self) -> Iterator[StreamRecord]:
        for node, last in self._dropped.items():
            v = {"last": last.seq, "records": self._lost[node], "text": TOO_SLOW}
            yield StreamRecord(
                seq=last.seq, boot=last.boot, t_unix_s=last.t_unix_s, node=node, kind="gap", v=v
            )
        self._dropped, self._lost = {}, {}


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of GET /v1/records."""

    start_unix_s: float
    nodes: list[WatchedNode]
    jobs: dict[str, dict[str, str]]  #: job -> rank -> node


def beginning(
    nodes: Mapping[str, Node], names: frozenset[str], now_unix_s: float
) -> tuple[Beginning, dict[str, int]]:
    """What holds when a reader begins, and each node's newest record then. `names`: of these, all if empty.

    Raises `Refused` for a name that no node has.
    """
    if unknown := names - nodes.keys():
        raise Refused("unknown-node", f"the fleet has no node {several(unknown)}; `gridctl nodes` lists them")
    kept = [nodes[name] for name in sorted(names or nodes)]
    where = {node.name for node in kept}
    ranks = {
        job.name: {str(r.rank): r.node for r in job.ranks if r.node in where} for job in jobs(nodes.values())
    }
    told = Beginning(
        start_unix_s=now_unix_s,
        nodes=[watched(node) for node in kept],
        jobs={job: held for job, held in ranks.items() if held},
    )
    return told, {node.name: node.status.stream_seq for node in kept if node.status}


class Taps:
    """All readers. What they get goes on to `onward`, the watchdog, which may raise `Refused`."""

    def __init__(self, onward: Callable[[StreamRecord], None]) -> None:
        self._onward = onward
        self.taps: set[Tap] = set()  #: who reads now

    def feed(self, record: StreamRecord) -> None:
        """Takes one record."""
        for tap in self.taps:
            tap.feed(record)
        self._onward(record)

    @contextlib.contextmanager
    def open(self, nodes: frozenset[str], before: Mapping[str, int]) -> Iterator[Tap]:
        """A reader for as long as it lasts."""
        tap = Tap(nodes, before)
        self.taps.add(tap)
        try:
            yield tap
        finally:
            self.taps.discard(tap)
