"""Which findings make a node faulty: one decisive signal, or two independent layers."""

from collections.abc import Sequence
from itertools import combinations

from gridctl.model.findings import SEVERITIES, Finding

_CRITICAL = SEVERITIES.index("critical")
#: No defect of the node itself: two of these are no ground to leave it.
_NOT_THE_NODE = ("app", "config", "environment", "monitor")


def grounds(findings: Sequence[Finding], window_s: float) -> tuple[list[Finding], str]:
    """The findings that make a node faulty, the first cause first, and the rule; [] if none.

    `window_s`: so near must critical findings of two layers be to each other.
    """
    decisive = [finding for finding in findings if finding.preempt_job]
    if decisive:
        return decisive, decisive[0].rule
    grave = [
        finding
        for finding in findings
        if SEVERITIES.index(finding.severity) >= _CRITICAL and finding.fault not in _NOT_THE_NODE
    ]
    for one, other in combinations(grave, 2):
        together = one.device == other.device or "node" in (one.device, other.device)
        near = abs(one.t_unix_s - other.t_unix_s) <= window_s
        if one.layer != other.layer and together and near:
            return [one, other], "two-layers"
    return [], ""
