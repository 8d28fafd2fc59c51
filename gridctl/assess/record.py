"""What a fleet's own journal says about faults, repairs and signals: a fold over its records.

A fault is a decision of detection to leave a node or to quarantine it; those of one node within an hour are
one. A repair is a person's word that a node is open again (`gridctl uncordon`). A node counts from the first
record that names it. While no controller ran nothing was seen, and that time is not left out: rates err low.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gridctl.assess.forecast import DAY_H, NodeHistory, forecast
from gridctl.assess.rates import (
    GPUS_A_NODE,
    HOURS_A_YEAR,
    FleetHistory,
    Repeated,
    Seen,
    Tables,
    base_of,
)
from gridctl.assess.skill import Outcome
from gridctl.model.actions import RECOVER
from gridctl.model.findings import Finding

HOUR_S = 3600.0
DAY_S = 86400.0
#: A signal that comes with its fault has foreseen nothing.
LEAD_MIN_S = 60.0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the journal, as far as it matters here."""

    t_unix_s: float
    kind: str
    data: dict[str, Any]


class _Node:
    """One node's own."""

    __slots__ = ("faults", "first_unix_s", "given_up", "live", "repairs", "signals")

    def __init__(self, first_unix_s: float) -> None:
        self.first_unix_s = first_unix_s
        self.faults: list[tuple[float, str]] = []  #: (when, class), in order
        self.given_up = False  #: by a decision, until it is healthy or a person opens it
        self.repairs: list[float] = []  #: when a person opened it again
        self.live: dict[tuple[str, str], Finding] = {}  #: since it was last healthy, by device and kind
        self.signals: list[tuple[float, str]] = []  #: a kind once a day


class FleetRecord:
    """Feeds on journal records, in order. A record that says something else than written is passed over."""

    def __init__(self, known: Tables) -> None:
        self.known = known
        self._nodes: dict[str, _Node] = {}

    def take(self, kind: str, data: Mapping[str, Any], t_unix_s: float) -> None:
        """Folds one record in."""
        name, t = data.get("node"), data.get("t_unix_s", t_unix_s)
        if not isinstance(name, str) or not name or not isinstance(t, int | float):
            return
        node = self._nodes.setdefault(name, _Node(t))
        if data.get("action") == RECOVER:
            return  # a process that died is no fault of its node, as far as anybody knows
        if kind == "finding":
            self._seen(node, data, t)
        elif kind == "decision" and data.get("type") == "decision":
            node.given_up = True
            if not node.faults or abs(t - node.faults[-1][0]) >= HOUR_S:
                bisect.insort(node.faults, (t, self.known.class_of(str(data.get("kind")))))
        elif kind == "audit" and data.get("what") == "uncordon":
            bisect.insort(node.repairs, t)
            self._sound(node)

    def _seen(self, node: _Node, data: Mapping[str, Any], t: float) -> None:
        if data.get("type") == "verdict" and data.get("kind") == "healthy":
            self._sound(node)
        if data.get("type") != "finding":
            return
        try:
            found = msgspec.convert(data, Finding)
        except msgspec.ValidationError:
            return
        node.live[found.device, found.kind] = found
        last = next((at for at, kind in reversed(node.signals) if kind == found.kind), None)
        if found.kind in self.known.signals and (last is None or t - last >= DAY_S):
            bisect.insort(node.signals, (t, found.kind))

    def _sound(self, node: _Node) -> None:
        node.live.clear()
        node.given_up = False

    def nodes(self) -> list[str]:
        """All that were ever named."""
        return sorted(self._nodes)

    def node(self, name: str, now_unix_s: float) -> NodeHistory:
        """What a node has behind it."""
        its = self._nodes.get(name)
        if its is None:
            return NodeHistory()
        repaired = its.repairs[-1] if its.repairs else None
        return NodeHistory(
            watched_h=max(0.0, now_unix_s - its.first_unix_s) / HOUR_S,
            faults=len(its.faults),
            repaired_h_ago=None if repaired is None else max(0.0, now_unix_s - repaired) / HOUR_S,
        )

    def faults_since(self, name: str, t_unix_s: float) -> list[tuple[float, str]]:
        """(when, class) of a node's faults after a moment."""
        its = self._nodes.get(name)
        return [] if its is None else [fault for fault in its.faults if fault[0] > t_unix_s]

    def came(self, name: str, from_unix_s: float, until_unix_s: float) -> set[str]:
        """The classes of the faults that were decided on in that time."""
        return {of_class for t, of_class in self.faults_since(name, from_unix_s) if t <= until_unix_s}

    def given_up(self, name: str) -> bool:
        """Whether a node was decided on and nobody has opened it since."""
        return name in self._nodes and self._nodes[name].given_up

    def live(self, name: str) -> list[Finding]:
        """What was found of a node since it was last healthy, as far as the journal says."""
        return list(self._nodes[name].live.values()) if name in self._nodes else []

    def fleet(self, now_unix_s: float, gpus: Mapping[str, int]) -> FleetHistory:
        """Counts of the whole fleet. `gpus`: by node, as far as they are known."""
        faults: dict[str, int] = {}
        signals: dict[str, Seen] = {}
        gpu_h = 0.0
        for name, its in self._nodes.items():
            gpu_h += max(0.0, now_unix_s - its.first_unix_s) / HOUR_S * (gpus.get(name) or GPUS_A_NODE)
            for _, of_class in its.faults:
                faults[of_class] = faults.get(of_class, 0) + 1
            for t, kind in its.signals:
                followed = self._followed(its, t, kind)
                if followed or t + DAY_S <= now_unix_s:
                    before = signals.get(kind, Seen())
                    signals[kind] = Seen(seen=before.seen + 1, followed=before.followed + followed)
        return FleetHistory(
            gpu_years=gpu_h / HOURS_A_YEAR,
            faults=faults,
            signals=signals,
            repeats=self._repeats(now_unix_s, gpus),
        )

    def _repeats(self, now_unix_s: float, gpus: Mapping[str, int]) -> list[Repeated]:
        """Time that repaired nodes were at risk, and the first fault of each, by age of the repair."""
        edges = [0.0, *(after.until_h for after in self.known.priors.repeat.after)]
        hours, faults = [0.0] * (len(edges) - 1), [0] * (len(edges) - 1)
        for name, its in self._nodes.items():
            size = gpus.get(name) or GPUS_A_NODE
            for repair, following in itertools.pairwise([*its.repairs, now_unix_s]):
                failed = next((at for at, _ in its.faults if repair < at <= following), None)
                age_h = ((following if failed is None else failed) - repair) / HOUR_S
                for place, (begin, end) in enumerate(itertools.pairwise(edges)):
                    hours[place] += size * max(0.0, min(age_h, end) - begin)
                    faults[place] += failed is not None and begin < age_h <= end
        return [Repeated(gpu_h=h, faults=n) for h, n in zip(hours, faults, strict=True)]

    def _followed(self, its: _Node, t: float, kind: str) -> bool:
        of_class = self.known.signals[kind].class_name
        return any(of_class == name and LEAD_MIN_S <= at - t <= DAY_S for at, name in its.faults)


#: (node, from, until) -> the classes of fault that came to it then.
Came = Callable[[str, float, float], set[str]]


def hindcast(
    entries: Iterable[Entry], known: Tables, gpus: Mapping[str, int], came: Came | None = None
) -> Iterator[Outcome]:
    """The forecast that each day would have begun with, out of what was known then, and what came of it.

    The last day is left out until it is over, and a node whose fault had come already. `came` knows the
    truth; without it the faults are those that were decided on.
    """
    ordered = sorted(entries, key=lambda entry: entry.t_unix_s)
    if not ordered:
        return
    whole, then = FleetRecord(known), FleetRecord(known)
    for entry in ordered:
        whole.take(entry.kind, entry.data, entry.t_unix_s)
    place, start, end = 0, ordered[0].t_unix_s, ordered[-1].t_unix_s
    for day in range(1, int((end - start) / DAY_S)):
        now = start + day * DAY_S
        while place < len(ordered) and ordered[place].t_unix_s <= now:
            then.take(ordered[place].kind, ordered[place].data, ordered[place].t_unix_s)
            place += 1
        yield from _day(then, came or whole.came, known, gpus, now)


def _day(
    then: FleetRecord, came: Came, known: Tables, gpus: Mapping[str, int], now: float
) -> Iterator[Outcome]:
    base = base_of(known, then.fleet(now, gpus))
    for name in then.nodes():
        own, live = then.node(name, now), then.live(name)
        found = forecast(base, live, gpus=gpus.get(name, 0), node=own, faulty=then.given_up(name))
        if found.present:
            continue
        happened = came(name, now, now + DAY_H * HOUR_S)
        for its in found.classes:
            yield Outcome(name=its.name, p=its.p_24h, base=its.base_24h, happened=its.name in happened)
