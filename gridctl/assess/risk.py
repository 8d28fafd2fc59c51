"""A risk index from 0 to 100 for a device and for a node, with its parts: the same facts, the same number.

Each part takes its share of the credit that the others leave, so no sum exceeds 100, no part lowers the
index, and their order does not matter. It orders what to look at; how likely a fault is says the forecast.
"""

import math
import tomllib
from collections.abc import Iterable

import msgspec

from gridctl.assess.costs import packaged
from gridctl.assess.forecast import NOT_THE_NODE
from gridctl.model.findings import Finding

NODE = "node"
_WEEK_H = 168.0


class _Severity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    info: float
    warning: float
    critical: float
    fatal: float
    decisive: float
    source: str


class _History(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fault: float
    faults_max: int
    repaired_7d: float
    source: str


class _Unseen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    blind: float
    source: str


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of risk.toml."""

    severity: _Severity
    history: _History
    unseen: _Unseen


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What raises an index: `weight` is the share that it takes of the credit left."""

    device: str
    weight: float
    what: str
    rule: str = ""


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Of a device, or of a node. `parts` are the weightiest first."""

    device: str
    index: int
    parts: list[Part]


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a node beside its findings."""

    verdict: str = "healthy"
    faults_30d: int = 0
    repaired_h_ago: float | None = None


def weights() -> Weights:
    """The weights that are delivered with gridctl."""
    return msgspec.convert(tomllib.loads(packaged("risk.toml")), Weights)


def indices(findings: Iterable[Finding], known: Known, by: Weights) -> list[Index]:
    """The node's index first, which has all parts, then that of each device of which something is known."""
    parts = [_of_finding(finding, by) for finding in findings] + _of_history(known, by)
    devices = sorted({part.device for part in parts} - {NODE})
    return [_index(NODE, parts), *(_index(d, [p for p in parts if p.device == d]) for d in devices)]


def _index(device: str, parts: list[Part]) -> Index:
    left = math.prod(1 - part.weight for part in sorted(parts, key=lambda part: part.weight))
    shown = sorted(parts, key=lambda part: (-part.weight, part.device, part.what, part.rule))
    return Index(device=device, index=round(100 * (1 - left)), parts=shown)


def _of_finding(finding: Finding, by: Weights) -> Part:
    if finding.fault in NOT_THE_NODE:
        why = f"{finding.kind}: no defect of the node ({finding.fault})"
        return Part(device=finding.device, weight=0.0, what=why, rule=finding.rule)
    weight: float = getattr(by.severity, "decisive" if finding.preempt_job else finding.severity)
    what = f"{finding.kind} ({finding.severity}{', decisive' if finding.preempt_job else ''})"
    return Part(device=finding.device, weight=weight, what=what, rule=finding.rule)


def _of_history(known: Known, by: Weights) -> list[Part]:
    parts = []
    if counted := min(known.faults_30d, by.history.faults_max):
        weight = 1 - (1 - by.history.fault) ** counted
        parts.append(Part(device=NODE, weight=weight, what=f"{known.faults_30d} faults in 30 days"))
    if known.repaired_h_ago is not None and known.repaired_h_ago <= _WEEK_H:
        what = f"repaired {known.repaired_h_ago:.0f} h ago"
        parts.append(Part(device=NODE, weight=by.history.repaired_7d, what=what))
    if known.verdict == "blind":
        parts.append(Part(device=NODE, weight=by.unseen.blind, what="blind: what holds there is unknown"))
    return parts
