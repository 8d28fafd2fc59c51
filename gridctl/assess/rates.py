"""How often what fails: priors by class of fault, brought up to date by the fleet's own record.

A class's rate has a gamma prior whose spread is the published one between fleets; counts are Poisson, so
the rate after `n` faults in `x` GPU-years is gamma again, with shape `a + n` and rate `b + x`.
"""

import math
from collections.abc import Mapping

import msgspec

from gridctl.assess.costs import After, Priors, Repeat, packaged, priors
from gridctl.detect.policy import parse_table
from gridctl.errors import ConfigError

HOURS_A_YEAR = 8766.0
#: A node whose GPUs nobody told of counts as one with so many.
GPUS_A_NODE = 8
#: A class of which no more than this share is known to be preceded by anything has no precursor.
COVERAGE_MIN = 0.05
#: A range is from the 5th to the 95th percentile: so many standard deviations to either side.
_Z90 = 1.6449
BASES = ("published", "derived", "guess")


class FaultClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of classes.tsv. Rates are per 1000 GPU-years, with the 90 % range between fleets.

    `coverage`: which share of such faults some signal precedes by hours.
    """

    name: str
    low: float
    central: float
    high: float
    coverage_low: float
    coverage: float
    coverage_high: float
    coverage_basis: str
    kinds: str  #: the kinds of findings that are such a fault, separated by blanks
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.low < self.central < self.high < math.inf:
            raise ValueError(f"{self.name}: low, central and high must rise")
        if not 0 <= self.coverage_low <= self.coverage <= self.coverage_high <= 1:
            raise ValueError(f"{self.name}: a coverage is a share, and its range must enclose it")
        if self.coverage_basis not in BASES:
            raise ValueError(f"{self.name}: {self.coverage_basis!r} is none of {', '.join(BASES)}")

    @property
    def foreseeable(self) -> bool:
        """Whether anything is known to come before."""
        return self.coverage > COVERAGE_MIN


class Signal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of signals.tsv: a kind of finding that comes before faults of a class."""

    kind: str
    class_name: str
    false_per_node_day: float  #: how often it shows on a node that then stays sound
    basis: str
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.false_per_node_day < 1 or self.basis not in BASES:
            raise ValueError(f"{self.kind}: a share between 0 and 1, and one of {', '.join(BASES)}")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """How often a signal was seen in this fleet, and how often its fault followed within a day."""

    seen: int = 0
    followed: int = 0


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of repaired nodes in one stretch of their repair's age."""

    gpu_h: float = 0.0
    faults: int = 0


class FleetHistory(msgspec.Struct, frozen=True, kw_only=True):
    """What a fleet's own record says."""

    gpu_years: float = 0.0
    faults: dict[str, int] = {}  #: by class
    signals: dict[str, Seen] = {}  #: by kind
    repeats: list[Repeated] = []  #: in the stretches of `priors.repeat.after`; [] where nothing was repaired


class Tables(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is assumed, with its sources."""

    priors: Priors
    classes: dict[str, FaultClass]
    signals: dict[str, Signal]

    def class_of(self, kind: str) -> str:
        """The class of fault that a kind of finding is; what none claims is "unattributed"."""
        return next((c.name for c in self.classes.values() if kind in c.kinds.split()), UNATTRIBUTED)


UNATTRIBUTED = "unattributed"


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """How often what fails in one fleet."""

    known: Tables
    per_gpu_h: dict[str, float]  #: by class
    band: tuple[float, float]  #: 90 % range of the rates over their means; it narrows with each fault counted
    signals: dict[str, Seen]
    after: list[After]  #: how much more often a node fails after its repair

    def per_node_h(self, name: str, gpus: int) -> float:
        """Faults of a class in an hour of a node with so many GPUs (0: not known)."""
        return self.per_gpu_h[name] * (gpus or GPUS_A_NODE)

    def expected(self, gpus: int, hours: float) -> float:
        """Faults of any class that a node of this fleet has in so many hours."""
        return hours * math.fsum(self.per_node_h(name, gpus) for name in self.per_gpu_h)


class Gamma(msgspec.Struct, frozen=True, kw_only=True):
    """A rate that is not known exactly: mean `shape / rate`."""

    shape: float
    rate: float

    @property
    def mean(self) -> float:
        return self.shape / self.rate

    def updated(self, events: int, exposure: float) -> "Gamma":
        """After `events` in `exposure`. Raises `ValueError` for what cannot have been counted."""
        if events < 0 or not 0 <= exposure < math.inf:
            raise ValueError(f"{events} events in {exposure} is no record")
        return Gamma(shape=self.shape + events, rate=self.rate + exposure)

    def quantile(self, p: float) -> float:
        """The value below which the rate is with probability `p`."""
        low, high = 0.0, self.shape + 1.0
        while gamma_cdf(self.shape, high) < p:
            high *= 2
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if gamma_cdf(self.shape, middle) < p else (low, middle)
        return high / self.rate


def tables() -> Tables:
    """The tables that are delivered with gridctl. Raises `ConfigError` where they contradict each other."""
    classes = {row.name: row for row in parse_table(packaged("classes.tsv"), FaultClass, "classes.tsv")}
    signals = {row.kind: row for row in parse_table(packaged("signals.tsv"), Signal, "signals.tsv")}
    return checked(Tables(priors=priors(), classes=classes, signals=signals))


def checked(found: Tables) -> Tables:
    """The tables, if no signal claims to foresee what nothing precedes. Raises `ConfigError`."""
    for signal in found.signals.values():
        its = found.classes.get(signal.class_name)
        if its is None or not its.foreseeable:
            raise ConfigError(
                f"signals.tsv: {signal.kind} cannot precede {signal.class_name}: no precursor is known for it"
            )
    return found


def prior_of(low: float, central: float, high: float) -> Gamma:
    """The gamma prior with this mean whose spread is that of a lognormal with this 90 % range."""
    sigma = math.log(high / low) / (2 * _Z90)
    shape = 1 / math.expm1(sigma**2)
    return Gamma(shape=shape, rate=shape / central)


def class_rate(its: FaultClass, fleet: FleetHistory) -> Gamma:
    """Faults of a class per 1000 GPU-years, after the fleet's own record."""
    prior = prior_of(its.low, its.central, its.high)
    return prior.updated(fleet.faults.get(its.name, 0), fleet.gpu_years / 1000)


def base_of(known: Tables, fleet: FleetHistory) -> Base:
    """The base rates of a fleet: the priors after its own record."""
    rate = known.priors.fault
    total = prior_of(rate.low, rate.per_1000_node_days, rate.high).updated(sum(fleet.faults.values()), 0.0)
    per_gpu_h = {
        its.name: class_rate(its, fleet).mean / 1000 / HOURS_A_YEAR for its in known.classes.values()
    }
    return Base(
        known=known,
        per_gpu_h=per_gpu_h,
        band=(total.quantile(0.05) / total.mean, total.quantile(0.95) / total.mean),
        signals=fleet.signals,
        after=_after(known.priors.repeat, fleet.repeats, math.fsum(per_gpu_h.values())),
    )


def _after(repeat: Repeat, seen: list[Repeated], per_gpu_h: float) -> list[After]:
    """The factors after a repair, each with a gamma prior: faults over those that the base rate expects."""
    return [
        After(
            until_h=its.until_h,
            factor=Gamma(shape=repeat.weight, rate=repeat.weight / its.factor)
            .updated(own.faults, own.gpu_h * per_gpu_h)
            .mean,
        )
        for its, own in zip(repeat.after, seen or [Repeated()] * len(repeat.after), strict=True)
    ]


def signal_p_24h(
    signal: Signal, base_24h: float, coverage: float, seen: Mapping[str, Seen], weight: float
) -> float:
    """P(its fault within a day), the signal being there: Bayes with the delivered figures, then a beta
    prior of so much weight, updated by what followed the signal in this fleet. Never below the base rate."""
    known = coverage * base_24h
    believed = known / (known + signal.false_per_node_day * (1 - base_24h)) if known else base_24h
    own = seen.get(signal.kind, Seen())
    return max(base_24h, (weight * believed + own.followed) / (weight + own.seen))


def gamma_cdf(shape: float, x: float) -> float:
    """The regularised lower incomplete gamma function: its series, or Lentz's fraction beyond the mean."""
    if x <= 0:
        return 0.0
    head = math.exp(shape * math.log(x) - x - math.lgamma(shape))
    if x < shape + 1:
        term = total = 1 / shape
        divisor = shape
        while term > total * 1e-16:
            divisor += 1
            term *= x / divisor
            total += term
        return min(1.0, head * total)
    b = x + 1 - shape
    c, d = 1e300, 1 / b
    fraction = d
    for i in range(1, 100_000):
        factor = -i * (i - shape)
        b += 2
        d = 1 / (factor * d + b)
        c = b + factor / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return max(0.0, 1 - head * fraction)
