"""What `gridctl diagnose` says of what an engineer has in hand: materials in, diagnoses out."""

from typing import Any

import msgspec

from gridctl.model.findings import SEVERITIES


class Material(msgspec.Struct, frozen=True):
    """One input, whole: a log, the output of a tool, telemetry."""

    name: str  #: of its file; "-" for standard input
    text: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """What a diagnosis rests on."""

    rule: str  #: its id
    evidence: list[str]  #: what was seen, a few lines at most, cleaned of control characters
    source: str  #: of the rule: a vendor's document, a public report


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. All keys are always printed, null where they do not apply."""

    kind: str
    severity: str  #: one of SEVERITIES
    action: str
    fault: str  #: node, app, fabric, driver, config, environment, monitor or unknown
    preempt_job: bool  #: must a job that is running be moved off now?
    when: str  #: none, now, after_job, after_restart, window or before_admission
    why: Why
    xid: int | None = None
    sxid: int | None = None
    pci: str | None = None  #: dddd:bb:dd.f, lower case
    event_count: int | None = None  #: distinct events behind it, bursts collapsed
    raw_lines: int | None = None
    events: list[dict[str, Any]] = []  #: single events or devices

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"{self.severity} is no severity")
