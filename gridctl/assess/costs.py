"""Acting now against waiting, in GPU-hours and in money, with every part shown.

Now: all GPUs of the job wait for the pause, and the spare is in use earlier than it had to be.
Later: with some probability the fault comes first and the whole job pays for a recovery; else the
same pause is paid at the later time. Where the probability is nothing better than a base rate, the
part says so.
"""

import math
import pkgutil
import tomllib

import msgspec

HOURS_A_DAY = 24.0
BASE_RATE = "base rate"


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults of a node, of any cause."""

    per_1000_node_days: float
    low: float
    high: float
    source: str


class After(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much more often a node fails until so many hours after its repair."""

    until_h: float
    factor: float


class Repeat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much more often a node fails that was repaired in the last seven days."""

    factor_7d: float
    weight: float  #: shape of the gamma prior of each factor in `after`
    source: str
    after: list[After]  #: the same by age of the repair, the youngest first


class Frailty(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How unlike the nodes of a fleet are: shape of a gamma distribution with mean 1."""

    shape: float
    source: str


class SignalWeight(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many observations of a site's own a delivered figure of a signal is worth."""

    weight: float
    source: str


class Recovery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a job needs after a crash."""

    hours: float
    source: str


class Priors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is assumed where nothing better is known (`priors.toml`, with its sources)."""

    fault: Rate
    repeat: Repeat
    frailty: Frailty
    signal: SignalWeight
    recovery: Recovery


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be weighed. Unknown values are None and take a prior, which the parts then say."""

    job_gpus: int  #: GPUs that wait while the job pauses
    spare_gpus: int  #: GPUs that the swap takes into use
    pause_s: float
    defer_h: float  #: how much later the alternative is, e.g. the hours to the next window
    nodes: int = 1  #: nodes whose fault would stop the job: the suspects, not the whole job
    p_fault: float | None = None  #: probability of the fault within `defer_h`, where it is known
    p_fault_basis: str = ""  #: what `p_fault` rests on
    p_fault_range: tuple[float, float] | None = None  #: its 90 % range
    p_after: float = (
        0.0  #: probability of a fault of the spare within `defer_h`: a move does not end all risk
    )
    p_after_basis: str = ""
    recovery_h: float | None = None
    repaired_days_ago: float | None = None
    usd_per_gpu_h: float | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a cost. `basis` is what its least certain number rests on."""

    name: str
    gpu_h: float
    usd: float | None
    how: str
    basis: str


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """A sum with its parts."""

    gpu_h: float
    usd: float | None
    parts: list[Part]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Now against later. `uncertain`: within the range of the base rate either could be cheaper."""

    now: Cost
    deferred: Cost
    cheaper: str  #: now, deferred or equal
    p_fault: float
    p_fault_basis: str
    uncertain: bool


def priors() -> Priors:
    """The priors that are delivered with gridctl."""
    return msgspec.convert(tomllib.loads(packaged("priors.toml")), Priors)


def packaged(name: str) -> str:
    """A file that stands beside this one."""
    content = pkgutil.get_data(__name__, name)
    assert content is not None, f"{name} is a part of this package"
    return content.decode()


def base_rate(
    prior: Priors,
    hours: float,
    *,
    nodes: int = 1,
    repaired_days_ago: float | None = None,
    per_1000_node_days: float | None = None,
) -> float:
    """P(at least one fault of these nodes within `hours`), constant hazard, from base rate and history."""
    rate = prior.fault.per_1000_node_days if per_1000_node_days is None else per_1000_node_days
    if repaired_days_ago is not None and repaired_days_ago <= 7:
        rate *= prior.repeat.factor_7d
    return -math.expm1(-rate / 1000 * nodes * hours / HOURS_A_DAY)


def compare(situation: Situation, prior: Priors) -> Comparison:
    """Weighs acting now against waiting for `defer_h`. Raises `ValueError` for impossible numbers."""
    _check(situation)
    if situation.p_fault is not None:
        p_fault, basis = situation.p_fault, situation.p_fault_basis or "given"
        range_of_p = list(situation.p_fault_range or (p_fault,))
    else:
        p_fault, basis = _from_base(situation, prior, None), _base_text(situation, prior)
        range_of_p = [_from_base(situation, prior, rate) for rate in (prior.fault.low, prior.fault.high)]
    now = _now(situation, prior)
    deferred = _deferred(situation, prior, p_fault, basis)
    words = {_cheaper(now, _deferred(situation, prior, p, basis)) for p in range_of_p}
    cheaper = _cheaper(now, deferred)
    return Comparison(
        now=now,
        deferred=deferred,
        cheaper=cheaper,
        p_fault=p_fault,
        p_fault_basis=basis,
        uncertain=words != {cheaper},
    )


def _check(situation: Situation) -> None:
    numbers = (
        situation.job_gpus,
        situation.spare_gpus,
        situation.pause_s,
        situation.defer_h,
        situation.nodes,
    )
    optional = (situation.recovery_h, situation.usd_per_gpu_h, situation.repaired_days_ago)
    for value in (*numbers, *(v for v in optional if v is not None)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"a cost cannot be made of {value}: all numbers must be finite and not negative")
    for p in (situation.p_fault or 0.0, situation.p_after, *(situation.p_fault_range or ())):
        if not 0 <= p <= 1:
            raise ValueError(f"{p} is no probability")


def _from_base(situation: Situation, prior: Priors, rate: float | None) -> float:
    return base_rate(
        prior,
        situation.defer_h,
        nodes=situation.nodes,
        repaired_days_ago=situation.repaired_days_ago,
        per_1000_node_days=rate,
    )


def _base_text(situation: Situation, prior: Priors) -> str:
    text = f"{BASE_RATE}: {prior.fault.per_1000_node_days:g} per 1000 node-days"
    if situation.repaired_days_ago is not None and situation.repaired_days_ago <= 7:
        text += f", times {prior.repeat.factor_7d:g} after a repair"
    return text


def _now(situation: Situation, prior: Priors) -> Cost:
    pause_h = situation.pause_s / 3600
    recovery_h, why = _recovery(situation, prior, situation.p_after_basis)
    spare_fails = priced(
        situation.usd_per_gpu_h,
        "recovery if the spare fails",
        situation.p_after * recovery_h * situation.job_gpus,
        f"P(fault in {situation.defer_h:g} h) {situation.p_after:.2g} x {recovery_h:g} h"
        f" x {situation.job_gpus} GPUs",
        why,
    )
    return total(
        [
            priced(
                situation.usd_per_gpu_h,
                "pause",
                situation.job_gpus * pause_h,
                f"{situation.job_gpus} GPUs x {situation.pause_s:g} s",
                "estimate of the pause",
            ),
            priced(
                situation.usd_per_gpu_h,
                "spare in use earlier",
                situation.spare_gpus * situation.defer_h,
                f"{situation.spare_gpus} GPUs x {situation.defer_h:g} h",
                "given",
            ),
            *([spare_fails] if situation.p_after else []),
        ]
    )


def _recovery(situation: Situation, prior: Priors, basis: str) -> tuple[float, str]:
    """Hours of a recovery, and what its cost rests on."""
    if situation.recovery_h is not None:
        return situation.recovery_h, basis
    return prior.recovery.hours, f"{basis}; recovery: {BASE_RATE}, {prior.recovery.source}"


def _deferred(situation: Situation, prior: Priors, p_fault: float, basis: str) -> Cost:
    recovery_h, why = _recovery(situation, prior, basis)
    pause_h = situation.pause_s / 3600
    chance = f"P(fault in {situation.defer_h:g} h) {p_fault:.2g}"
    return total(
        [
            priced(
                situation.usd_per_gpu_h,
                "recovery if it fails first",
                p_fault * recovery_h * situation.job_gpus,
                f"{chance} x {recovery_h:g} h x {situation.job_gpus} GPUs",
                why,
            ),
            priced(
                situation.usd_per_gpu_h,
                "the same pause later",
                (1 - p_fault) * pause_h * situation.job_gpus,
                f"{1 - p_fault:.2g} x {situation.job_gpus} GPUs x {situation.pause_s:g} s",
                "estimate of the pause",
            ),
        ]
    )


def priced(usd_per_gpu_h: float | None, name: str, gpu_h: float, how: str, basis: str) -> Part:
    """A part, in money too where the price is known."""
    usd = None if usd_per_gpu_h is None else gpu_h * usd_per_gpu_h
    return Part(name=name, gpu_h=gpu_h, usd=usd, how=how, basis=basis)


def total(parts: list[Part]) -> Cost:
    """The sum of all parts."""
    usd = [part.usd for part in parts if part.usd is not None]
    return Cost(
        gpu_h=math.fsum(part.gpu_h for part in parts),
        usd=math.fsum(usd) if len(usd) == len(parts) else None,
        parts=parts,
    )


def _cheaper(now: Cost, deferred: Cost) -> str:
    if math.isclose(now.gpu_h, deferred.gpu_h, rel_tol=1e-9):
        return "equal"
    return "now" if now.gpu_h < deferred.gpu_h else "deferred"
