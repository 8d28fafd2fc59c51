"""Are the forecasts worth anything? Brier scores against the base rate, for each class of fault.

A class whose forecasts are no better than its base rate has no skill, and the base rate is the right answer
for it. Forecasts that differ from the base rate and are not better claim more than is known: a defect.
"""

import math
from collections.abc import Iterable

import msgspec

#: One-sided 95 %: so many standard errors must the gain be from nothing.
_Z95 = 1.6449
#: Fewer faults than this prove nothing, whatever the scores say.
EVENTS_MIN = 10
BINS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A forecast and what came of it."""

    name: str  #: the class of fault
    p: float
    base: float  #: what the base rate said
    happened: bool


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """Forecasts of about the same probability."""

    forecasts: int
    p_mean: float
    happened: float  #: the share that came true


class Skill(msgspec.Struct, frozen=True, kw_only=True):
    """Of one class. `skill` is 1 - brier / brier_base: 1 perfect, 0 the base rate, below 0 worse.

    `brier` is reliability - resolution + uncertainty, taken over the distinct probabilities.
    """

    name: str
    forecasts: int
    events: int
    brier: float
    brier_base: float
    skill: float | None  #: None where no fault came, so that nothing can be said
    gain_low: float  #: lower 95 % bound of brier_base - brier, forecasts taken as independent
    reliability: float
    resolution: float
    uncertainty: float
    claims: bool  #: whether any forecast differs from the base rate
    verdict: str
    calibration: list[Bin]


def skills(outcomes: Iterable[Outcome]) -> list[Skill]:
    """One row a class, by name. Raises `ValueError` for what is no probability."""
    by_class: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if not (0 <= outcome.p <= 1 and 0 <= outcome.base <= 1):
            raise ValueError(f"{outcome} holds no probability")
        by_class.setdefault(outcome.name, []).append(outcome)
    return [_skill(name, found) for name, found in sorted(by_class.items())]


def _skill(name: str, found: list[Outcome]) -> Skill:
    count = len(found)
    events = sum(o.happened for o in found)
    brier = _mean(((o.p - o.happened) ** 2 for o in found), count)
    brier_base = _mean(((o.base - o.happened) ** 2 for o in found), count)
    gains = [(o.base - o.happened) ** 2 - (o.p - o.happened) ** 2 for o in found]
    mean_gain = _mean(gains, count)
    error = math.sqrt(_mean(((gain - mean_gain) ** 2 for gain in gains), count) / count)
    gain_low = mean_gain - _Z95 * error
    claims = any(not math.isclose(o.p, o.base, rel_tol=1e-9) for o in found)
    rate = events / count
    groups: dict[float, list[Outcome]] = {}
    for o in found:
        groups.setdefault(o.p, []).append(o)
    shares = [(p, len(its), sum(o.happened for o in its) / len(its)) for p, its in groups.items()]
    return Skill(
        name=name,
        forecasts=count,
        events=events,
        brier=brier,
        brier_base=brier_base,
        skill=1 - brier / brier_base if events and brier_base else None,
        gain_low=gain_low,
        reliability=_mean((n * (p - share) ** 2 for p, n, share in shares), count),
        resolution=_mean((n * (share - rate) ** 2 for _, n, share in shares), count),
        uncertainty=rate * (1 - rate),
        claims=claims,
        verdict=_verdict(events, claims, mean_gain, gain_low),
        calibration=_bins(found),
    )


def _verdict(events: int, claims: bool, gain: float, gain_low: float) -> str:
    if not claims:
        return "base rate"
    if events < EVENTS_MIN:
        return f"not known: {events} faults, {EVENTS_MIN} are needed"
    if gain_low > 0:
        return "better than the base rate"
    return "not shown to be better than the base rate" if gain > 0 else "worse than the base rate"


def _bins(found: list[Outcome]) -> list[Bin]:
    last = len(BINS) - 2
    placed: dict[int, list[Outcome]] = {}
    for o in found:
        place = next((i for i in range(last) if o.p < BINS[i + 1]), last)
        placed.setdefault(place, []).append(o)
    return [
        Bin(
            forecasts=len(its),
            p_mean=_mean((o.p for o in its), len(its)),
            happened=sum(o.happened for o in its) / len(its),
        )
        for _, its in sorted(placed.items())
    ]


def _mean(values: Iterable[float], count: int) -> float:
    return math.fsum(values) / count
