"""What the records of a journal must say for a report to read them; `gridctl.model.runs` says what it means.

A journal is a file, and may have been written by anybody: what has another shape is left out and counted.
"""

from typing import Any

import msgspec

from gridagent.journal import Record


class _Any(msgspec.Struct):
    """What any record may have."""

    incident: str = ""
    t_unix_s: float = 0.0
    node: str = ""
    job: str = ""
    text: str = ""
    code: str = ""
    who: str = ""
    reason: str = ""


class _Incident(_Any, kw_only=True):
    state: str
    kind: str
    title: str
    verdict: str = ""
    merged_into: str = ""


class _Said(_Any, kw_only=True):
    """Of detection."""

    type: str
    kind: str
    device: str = ""
    action: str = ""
    decision: str = ""
    pci: str = ""
    why: list[str]


class _Gate(_Any, kw_only=True):
    plan: str
    run: str


class _Planned(_Any, kw_only=True):
    plan: dict[str, Any]


class _Run(_Any, kw_only=True):
    run: str
    state: str
    plan: str = ""


class _Step(_Any, kw_only=True):
    run: str
    step: str
    state: str
    values: list[Any] = []


class _Lease(_Any, kw_only=True):
    fence: int
    granted: list[str]


class _Audit(_Any, kw_only=True):
    what: str
    value: str = ""


class _Evidence(_Any, kw_only=True):
    id: str
    node: str
    who: str
    state: str
    file: str = ""
    sha256: str = ""
    taken_unix_s: float = 0.0


class _Phase(_Any, kw_only=True):
    phase: str
    rank: int
    run: str = ""


_SHAPES: dict[str, type[_Any]] = {
    "incident": _Incident,
    "finding": _Said,
    "decision": _Said,
    "gate": _Gate,
    "plan": _Planned,
    "run": _Run,
    "step": _Step,
    "lease": _Lease,
    "audit": _Audit,
}


def sound(record: Record) -> bool:
    """Whether a record has the shape of its kind."""
    shape = _SHAPES.get(record.kind, _Any)
    if record.data.get("what") == "evidence":
        shape = _Evidence
    elif "phase" in record.data:
        shape = _Phase
    try:
        msgspec.convert(record.data, shape)
    except msgspec.ValidationError:
        return False
    return True
