"""Turns what a layer saw into a diagnosis, by a row of policy/cluster.tsv and the limits of cluster.toml."""

import re
import tomllib
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec

from gridctl.detect.policy import PolicyRow, delivered, parse_table
from gridctl.model.diagnosis import Diagnosis, Why

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_EVIDENCE_CHARS_MAX = 240
#: What stands behind it in a line is never shown.
SHOWN_CHARS_MAX = 2 * _EVIDENCE_CHARS_MAX
_EVIDENCE_MAX = 6
#: Single events or devices that one diagnosis lists.
EVENTS_MAX = 4096


class Rule(PolicyRow, frozen=True, kw_only=True):
    """What one rule concludes. `meaning` says it in words."""

    rule: str
    kind: str
    meaning: str
    fault: str


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of cluster.toml; each number is explained there."""

    nic: dict[str, float]
    fleet: dict[str, float]
    hang: dict[str, float]
    lemon: dict[str, float]
    checkpoint: dict[str, float]
    resume: dict[str, float]


@cache
def rules() -> dict[str, Rule]:
    """All rules by their id."""
    return {row.rule: row for row in parse_table(delivered("cluster.tsv"), Rule, "cluster.tsv")}


@cache
def limits() -> Limits:
    """The limits that are delivered with gridctl."""
    return msgspec.convert(tomllib.loads(delivered("cluster.toml")), Limits)


def clean(text: object) -> str:
    """Text from outside as one short line without control characters."""
    line = _CONTROL.sub(" ", str(text)[:SHOWN_CHARS_MAX])
    return line if len(line) <= _EVIDENCE_CHARS_MAX else line[: _EVIDENCE_CHARS_MAX - 3] + "..."


def rule_says(
    rule_id: str,
    evidence: Iterable[str],
    *,
    events: Iterable[dict[str, Any]] = (),
    event_count: int | None = 1,
    raw_lines: int | None = None,
) -> Diagnosis:
    """The diagnosis that a rule makes of what was seen. `rule_id` must stand in the table."""
    row = rules()[rule_id]
    seen = [clean(line) for line, _ in zip(evidence, range(_EVIDENCE_MAX), strict=False)]
    return Diagnosis(
        kind=row.kind,
        severity=row.severity,
        action=row.action,
        fault=row.fault,
        preempt_job=row.preempt == "yes",
        when=row.when,
        why=Why(rule=row.rule, evidence=[*seen, row.meaning], source=row.source),
        event_count=event_count,
        raw_lines=raw_lines,
        events=[safe(event) for event, _ in zip(events, range(EVENTS_MAX), strict=False)],
    )


def safe(event: dict[str, Any]) -> dict[str, Any]:
    """An event whose texts are as `clean` makes them."""
    return {key: clean(value) if isinstance(value, str) else value for key, value in event.items()}
