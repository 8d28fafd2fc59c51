"""Puts what was found on hardware into diagnoses."""

from collections.abc import Iterable, Sequence
from typing import Any

from gridctl.detect.diagnose.ruling import EVENTS_MAX, clean, safe
from gridctl.detect.meaning import Meaning, by_rule
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis, Why

_EVIDENCE_MAX = 5


def say(
    told: Meaning,
    evidence: Iterable[str],
    *,
    pci: str | None = None,
    sxid: int | None = None,
    count: int | None = 1,
    lines: int | None = None,
    events: Sequence[dict[str, Any]] = (),
) -> Diagnosis:
    """The diagnosis of something that has a meaning already."""
    return Diagnosis(
        kind=told.kind,
        severity=told.severity,
        action=told.action,
        fault=told.fault,
        preempt_job=told.preempt,
        when=told.when,
        why=Why(
            rule=told.rule,
            evidence=[
                *(clean(line) for line, _ in zip(evidence, range(_EVIDENCE_MAX), strict=False)),
                told.meaning,
            ],
            source=told.source,
        ),
        xid=told.xid,
        sxid=sxid,
        pci=address(pci),
        event_count=count,
        raw_lines=lines,
        events=[safe(event) for event in events[:EVENTS_MAX]],
    )


def address(name: str | None) -> str | None:
    """The name of a GPU if it is an address, and no index or UUID."""
    return name if name and ":" in name else None


def rule(name: str, evidence: Iterable[str], more: str = "", **rest: Any) -> Diagnosis:
    """The diagnosis that a row of hardware.tsv makes; `rest` as of `say`."""
    return say(by_rule(hardware().rules[name], more=more), evidence, **rest)
