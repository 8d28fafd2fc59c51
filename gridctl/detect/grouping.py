"""Findings into incidents: one a node, and one for all nodes that share a fate."""

from collections.abc import Iterable, Mapping
from typing import Any

from gridctl.detect.fate import Fate
from gridctl.detect.policy import SharedFate
from gridctl.model.findings import SEVERITIES, Decision, Finding, Output, Verdict, WatchedNode

#: The same kind again on a node this soon after it went away is the same incident.
AGAIN_S = 3600.0
_WEIGHS = SEVERITIES.index("warning")
_KNOWN_MAX = 65536


class Incidents:
    """Opens incidents; pure."""

    def __init__(
        self, limits: SharedFate, nodes: Iterable[WatchedNode], jobs: Mapping[str, set[str]]
    ) -> None:
        self._limits = limits
        self._facts = {node.name: node for node in nodes}
        self._fate = Fate(limits, jobs)
        self._open: dict[str, str] = {}  #: node -> kind
        self._before: dict[tuple[str, str], float] = {}  #: (node, kind) -> when it was last said

    def feed(self, out: Output) -> dict[str, Any] | None:
        """Takes an output; returns the incident's line if it opens one."""
        if isinstance(out, Verdict) and out.kind == "healthy":
            self._open.pop(out.node, None)
        if not isinstance(out, Finding | Decision) or SEVERITIES.index(out.severity) < _WEIGHS:
            return None
        if not out.node:
            return _line(out, "", [])  # of a job
        key = (out.node, out.kind)
        said_s = self._before.pop(key, float("-inf"))
        self._before[key] = out.t_unix_s
        if len(self._before) > _KNOWN_MAX:
            del self._before[next(iter(self._before))]
        if out.node in self._open or out.t_unix_s - said_s < AGAIN_S:
            return None
        self._open[out.node] = out.kind
        facts = self._facts.get(out.node) or WatchedNode(name=out.node)
        self._fate.add(out.t_unix_s, facts, out.kind)
        group, nodes = self._fate.sharers(out.t_unix_s, facts, out.kind)
        if len(nodes) > self._limits.nodes:
            return None  # belongs to the incident of the group
        return _line(out, group if len(nodes) == self._limits.nodes else "", nodes)


def _line(out: Output, group: str, nodes: list[str]) -> dict[str, Any]:
    why = [f"{len(nodes)} nodes of {group}: {', '.join(nodes)}"] if group else []
    return {
        "t": round(out.t_unix_s, 6),
        "type": "incident",
        "node": None if group else out.node or None,
        "device": "node" if group else out.device.removeprefix("pci:"),
        "kind": out.kind,
        "severity": out.severity,
        "action": "none",
        "preempt_job": False,
        "when": "none",
        "why": [*why, *out.why],
        "rule": "incident.shared-fate" if group else "incident.node",
    }
