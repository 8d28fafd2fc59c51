"""Which node should take over: usable spares in order, with the reasons for and against each.

The order of the candidates never matters: equals are ordered by name.
"""

from collections.abc import Iterable

import msgspec

#: A node repaired this recently fails again about ten times as often (`priors.toml`).
REPAIR_DAYS = 7.0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A node, as far as it matters for a choice. "" and None mean unknown."""

    node: str
    driver: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    cooling_zone: str = ""
    verdict: str = "healthy"  #: of detection: healthy, suspect, faulty, blind
    repaired_days_ago: float | None = None
    faults_30d: int = 0


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """A spare in its place. `score` weighs the reasons for it; `reasons` names those against it too."""

    node: str
    score: int
    reasons: list[str]


def rank(source: Candidate, spares: Iterable[Candidate]) -> list[Ranked]:
    """Usable `spares` for the node `source`, the best first. What forbids one is for the pre-flight.""" ""
    return sorted((_ranked(source, spare) for spare in spares), key=lambda found: (-found.score, found.node))


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
