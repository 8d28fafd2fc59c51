"""Which node should take over: refusals first, then a rank with its reasons.

The order of the candidates never matters: equals are ordered by name.
"""

from collections.abc import Iterable

import msgspec

#: A node repaired this recently fails again about ten times as often (`priors.toml`).
REPAIR_DAYS = 7.0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as far as it matters for a choice. "" and None mean unknown."""

    node: str
    serial: str = ""
    gpus: int = 0
    gpu_model: str = ""
    driver: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    cooling_zone: str = ""
    free: int = 0  #: parked spare processes
    quarantined: bool = False
    cordoned: bool = False
    verdict: str = "healthy"  #: of detection: healthy, suspect, faulty, blind
    repaired_days_ago: float | None = None
    faults_30d: int = 0


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What a site insists on."""

    same_rack: bool = False
    same_driver: bool = True
    same_size: bool = True


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A spare that may be taken. `score` counts the reasons for it; `reasons` names those against it too."""

    node: str
    score: int
    reasons: list[str]


class RefusedSpare(msgspec.Struct, frozen=True, kw_only=True):
    """A spare that may not be taken: all its reasons, by code."""

    node: str
    reasons: dict[str, str]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Usable spares, the best first, and the refused ones by name."""

    usable: list[Ranked]
    refused: list[RefusedSpare]


def rank(source: Candidate, spares: Iterable[Candidate], rules: Rules, *, needed: int = 1) -> Choice:
    """Ranks `spares` for the node `source`, of which `needed` processes should move."""
    usable: list[Ranked] = []
    refused: list[RefusedSpare] = []
    for spare in spares:
        if reasons := _refusals(source, spare, rules, needed):
            refused.append(RefusedSpare(node=spare.node, reasons=reasons))
        else:
            usable.append(_ranked(source, spare))
    usable.sort(key=lambda found: (-found.score, found.node))
    refused.sort(key=lambda found: found.node)
    return Choice(usable=usable, refused=refused)


def _refusals(source: Candidate, spare: Candidate, rules: Rules, needed: int) -> dict[str, str]:
    """Codes as in `gridctl.model.refusals`."""
    found = {}
    if spare.node == source.node or (spare.serial and spare.serial == source.serial):
        found["same-host"] = f"it is the machine that should be left (serial {spare.serial or 'unknown'})"
    if spare.quarantined:
        found["spare-quarantined"] = "it is quarantined"
    if spare.cordoned:
        found["spare-cordoned"] = "it is cordoned"
    if spare.verdict in ("faulty", "blind"):
        found["spare-unfit"] = f"detection says {spare.verdict}"
    if spare.free < needed:
        found["no-spare"] = f"{needed} parked processes are needed, it has {spare.free}"
    if rules.same_size and (spare.gpus, spare.gpu_model) != (source.gpus, source.gpu_model):
        found["spare-size"] = f"{_size(spare)}, where {_size(source)} are needed"
    if rules.same_driver and spare.driver != source.driver:
        found["spare-driver"] = f"driver {spare.driver or 'unknown'}, not {source.driver or 'unknown'}"
    if rules.same_rack and spare.rack != source.rack:
        found["spare-rack"] = f"rack {spare.rack or 'unknown'}, not {source.rack or 'unknown'}"
    return found


def _ranked(source: Candidate, spare: Candidate) -> Ranked:
    """What speaks for a spare weighs in powers of two, so that no sum of lesser reasons beats a greater."""
    recent = spare.repaired_days_ago is not None and spare.repaired_days_ago <= REPAIR_DAYS
    weighed = (
        (spare.verdict == "healthy", "healthy", f"detection says {spare.verdict}"),
        (not recent, "no repair lately", f"repaired within {REPAIR_DAYS:g} days"),
        (spare.faults_30d == 0, "no fault in 30 days", f"{spare.faults_30d} faults in 30 days"),
        (_same(spare.driver, source.driver), "same driver", f"driver {spare.driver or 'unknown'}"),
        (_same(spare.nvlink_domain, source.nvlink_domain), "same NVLink domain", "another NVLink domain"),
        (_same(spare.rack, source.rack), "same rack", f"rack {spare.rack or 'unknown'}"),
        (
            not _same(spare.cooling_zone, source.cooling_zone),
            "another cooling zone",
            "same cooling zone: it shares a cause there",
        ),
    )
    score = sum(1 << place for place, (holds, _, _) in enumerate(reversed(weighed)) if holds)
    return Ranked(node=spare.node, score=score, reasons=[yes if holds else no for holds, yes, no in weighed])


def _same(one: str, other: str) -> bool:
    return one == other != ""


def _size(node: Candidate) -> str:
    return f"{node.gpus} x {node.gpu_model or 'unknown GPU'}"
