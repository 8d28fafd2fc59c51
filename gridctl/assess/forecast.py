"""P(fault) of a node within 1, 6 and 24 hours, by class, and what each number rests on.

Three things count: how often such faults are (base rate, `rates`), what this node has behind it (a repair
lately, more faults than its fleet's mean), and what is seen of it now. Where no signal is known to come
before a class of fault, its forecast is the base rate whatever is seen.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec

from gridctl.assess.costs import BASE_RATE
from gridctl.assess.rates import Base, FaultClass, Signal, signal_p_24h
from gridctl.model.findings import Finding

HORIZONS_H = (1.0, 6.0, 24.0)
DAY_H = 24.0
PRESENT = "the fault is there"
#: Faults of others, which say nothing about when this node will fail.
NOT_THE_NODE = ("app", "config", "monitor")


class NodeHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has behind it."""

    watched_h: float = 0.0
    faults: int = 0  #: in that time
    repaired_h_ago: float | None = None


class Hazard(msgspec.Struct, frozen=True, kw_only=True):
    """Faults an hour: `pieces` are (until, faults an hour), and `tail` holds from the last of them on."""

    tail: float
    pieces: list[tuple[float, float]] = []

    def cumulative(self, hours: float) -> float:
        """Expected faults within `hours` from now."""
        begin, total = 0.0, 0.0
        for until, rate in self.pieces:
            total += max(0.0, min(until, hours) - begin) * rate
            begin = until
        return total + max(0.0, hours - begin) * self.tail

    def p(self, hours: float) -> float:
        """P(at least one fault within `hours`)."""
        return -math.expm1(-self.cumulative(hours))

    def mean_h(self) -> float:
        """Expected hours until the first fault. Raises `ZeroDivisionError` where none ever comes."""
        begin, standing, total = 0.0, 1.0, 0.0
        for until, rate in self.pieces:
            width, x = until - begin, (until - begin) * rate
            total += standing * width * (-math.expm1(-x) / x if x else 1.0)
            standing *= math.exp(-x)
            begin = until
        return total + standing / self.tail

    def times(self, factor: float) -> "Hazard":
        return Hazard(tail=self.tail * factor, pieces=[(until, rate * factor) for until, rate in self.pieces])


class ClassForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Of one class of fault."""

    name: str
    p_1h: float
    p_6h: float
    p_24h: float
    base_24h: float  #: what the base rate alone says
    basis: str


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Of a node. `p_24h_range`: within the 90 % range of base rate and coverage."""

    p_1h: float
    p_6h: float
    p_24h: float
    p_24h_range: tuple[float, float]
    base_24h: float  #: what the base rate alone says
    remaining_h: float  #: expected useful hours from now, if what is seen stays as it is
    basis: str
    classes: list[ClassForecast]
    hazard: Hazard  #: of all classes, as if nothing had come yet
    present: bool = False  #: no forecast any more: the fault has come

    def p(self, hours: float) -> float:
        """P(fault within `hours`)."""
        return 1.0 if self.present else self.hazard.p(hours)


_NEW = NodeHistory()


def forecast(
    base: Base,
    findings: Iterable[Finding] = (),
    *,
    gpus: int = 0,
    node: NodeHistory = _NEW,
    faulty: bool = False,
) -> Forecast:
    """The forecast of a node. `gpus`: 0 where that is not known; `faulty`: the verdict of detection."""
    live = [f for f in findings if f.fault not in NOT_THE_NODE]
    decisive = next((f for f in live if f.preempt_job), None)
    factor = _history(base, node, gpus)
    words = _words(node, factor)
    reach = [factor.cumulative(hours) for hours in HORIZONS_H]
    parts, whole_h, low, high = [], 0.0, 0.0, 0.0
    for its in base.known.classes.values():
        per_h = base.per_node_h(its.name, gpus)
        expected = per_h * reach[-1]
        boost, basis = _boost(base, its, expected, live, its.coverage)
        low, high = (
            total + band * expected * _boost(base, its, band * expected, live, coverage)[0]
            for total, band, coverage in (
                (low, base.band[0], its.coverage_low),
                (high, base.band[1], its.coverage_high),
            )
        )
        whole_h += boost * per_h
        chances = [-math.expm1(-boost * per_h * hours) for hours in reach]
        parts.append(_of_class(its.name, chances, per_h, basis or words))
    whole = factor.times(whole_h)
    found = Forecast(
        p_1h=whole.p(1),
        p_6h=whole.p(6),
        p_24h=whole.p(DAY_H),
        p_24h_range=(-math.expm1(-low), -math.expm1(-high)),
        base_24h=-math.expm1(-base.expected(gpus, DAY_H)),
        remaining_h=whole.mean_h(),
        basis=words,
        classes=parts,
        hazard=whole,
    )
    if decisive or faulty:
        return _come(found, decisive)
    if signals := dict.fromkeys(f.kind for f in live if f.kind in base.known.signals):
        return msgspec.structs.replace(found, basis=f"signals: {', '.join(signals)}; else {words}")
    return found


def _come(found: Forecast, cause: Finding | None) -> Forecast:
    return msgspec.structs.replace(
        found,
        p_1h=1.0,
        p_6h=1.0,
        p_24h=1.0,
        p_24h_range=(1.0, 1.0),
        remaining_h=0.0,
        basis=f"{PRESENT}: {cause.kind} on {cause.device}" if cause else f"{PRESENT}: detection's verdict",
        present=True,
    )


def _of_class(name: str, chances: Sequence[float], base_per_h: float, basis: str) -> ClassForecast:
    p_1h, p_6h, p_24h = chances
    return ClassForecast(
        name=name,
        p_1h=p_1h,
        p_6h=p_6h,
        p_24h=p_24h,
        base_24h=-math.expm1(-base_per_h * DAY_H),
        basis=basis,
    )


def _history(base: Base, node: NodeHistory, gpus: int) -> Hazard:
    """The node's hazard over its fleet's mean. Repeats after a repair are partly those of frail nodes, so
    of the two factors the greater one counts and not the product."""
    shape = base.known.priors.frailty.shape
    frail = (shape + node.faults) / (shape + base.expected(gpus, node.watched_h))
    pieces: list[tuple[float, float]] = []
    if node.repaired_h_ago is not None:
        pieces = [
            (after.until_h - node.repaired_h_ago, max(after.factor, frail))
            for after in base.after
            if after.until_h > node.repaired_h_ago
        ]
    return Hazard(tail=frail, pieces=pieces)


def _words(node: NodeHistory, factor: Hazard) -> str:
    reasons = []
    if factor.pieces and node.repaired_h_ago is not None:
        reasons.append(f"repaired {node.repaired_h_ago:.0f} h ago")
    if factor.tail > 1:
        reasons.append(f"{node.faults} faults in {node.watched_h / DAY_H:.0f} days")
    return f"{BASE_RATE} and history: {', '.join(reasons)}" if reasons else BASE_RATE


def _boost(
    base: Base, its: FaultClass, expected: float, live: Sequence[Finding], coverage: float
) -> tuple[float, str]:
    """By how much what is seen now raises the class's hazard, of which `expected` faults come in a day.

    Of several signals the strongest counts, as they are not independent. A signal that is not there says
    nothing: its source may be missing."""
    base_24h = -math.expm1(-expected)
    best, basis = base_24h, ""
    for kind in dict.fromkeys(finding.kind for finding in live):
        signal = base.known.signals.get(kind)
        if signal is None or signal.class_name != its.name:
            continue
        weight = base.known.priors.signal.weight
        p_24h = signal_p_24h(signal, base_24h, coverage, base.signals, weight)
        if p_24h > best:
            best, basis = p_24h, _signal_words(signal, its, base)
    return (-math.log1p(-best) / expected, basis) if best > base_24h else (1.0, "")


def _signal_words(signal: Signal, its: FaultClass, base: Base) -> str:
    own = base.signals.get(signal.kind)
    figures = (
        "a guess is in its figures" if "guess" in (signal.basis, its.coverage_basis) else "published figures"
    )
    words = f"signal {signal.kind} ({figures})"
    return f"{words}; here {own.followed} of {own.seen} were followed by it" if own and own.seen else words
