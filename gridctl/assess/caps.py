"""Limits on hand-overs that gridctl starts by itself: per node, rack, NVLink domain, job and hour.

They count every hand-over there was, by whomever, and are made of the journal, so a restart forgets none.
What is over a limit is for a person to decide. A recovery is never held back.
"""

from collections.abc import Iterable

import msgspec

from gridctl.model.policy import Caps

HOUR_S = 3600.0
DAY_S = 86400.0


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """A node was left, or is to be. "" means unknown and shares nothing with anything."""

    t_unix_s: float
    node: str
    job: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    recovery: bool = False  #: it undoes, ends or opens again: nothing is given up by it


def fleet_limit(caps: Caps, nodes: int) -> int:
    """Hand-overs in an hour, in a fleet of so many nodes."""
    return min(caps.fleet_hour_max, max(caps.fleet_hour_min, int(caps.fleet_hour_share * nodes)))


def full(caps: Caps, acts: Iterable[Act], wanted: Act, nodes: int) -> list[str]:
    """Every limit that `wanted` would break, in words; [] where it may go. A clock that was set back makes
    an act no less recent."""
    if wanted.recovery:
        return []
    before = [act for act in acts if not act.recovery and abs(wanted.t_unix_s - act.t_unix_s) < DAY_S]
    hour = [act for act in before if abs(wanted.t_unix_s - act.t_unix_s) < HOUR_S]
    of_node = sum(act.node == wanted.node for act in before)
    found = [_over(f"node {wanted.node}", of_node, caps.node_day, "24 hours")]
    for name, limit in (
        ("rack", caps.rack_hour),
        ("nvlink_domain", caps.nvlink_domain_hour),
        ("job", caps.job_hour),
    ):
        if its := getattr(wanted, name):
            count = sum(getattr(act, name) == its for act in hour)
            found.append(_over(f"{name} {its}", count, limit, "an hour"))
    found.append(_over("the fleet", len(hour), fleet_limit(caps, nodes), "an hour"))
    return [words for words in found if words]


def _over(what: str, count: int, limit: int, within: str) -> str:
    return f"{what}: {count} hand-overs within {within}, the limit is {limit}" if count >= limit else ""
