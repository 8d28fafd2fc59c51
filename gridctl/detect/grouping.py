"""Findings into incidents: one a node, and one for all nodes that share a fate."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gridctl.model.findings import SEVERITIES, Decision, Finding, Output, Verdict, WatchedNode

#: The same kind on nodes of one group within so long is one event (case reports: within seconds).
SHARED_WINDOW_S = 60.0
#: From so many nodes on. Two may be chance.
SHARED_NODES = 3
#: The same kind again on a node this soon after it went away is the same incident.
AGAIN_S = 3600.0
_WEIGHS = SEVERITIES.index("warning")
_RECENT_MAX = 256
_KNOWN_MAX = 65536


class Incidents:
    """Opens incidents; pure."""

    def __init__(self, nodes: Iterable[WatchedNode], jobs: Mapping[str, set[str]]) -> None:
        self._facts = {node.name: node for node in nodes}
        self._jobs = jobs
        self._open: dict[str, str] = {}  #: node -> kind
        self._before: dict[tuple[str, str], float] = {}  #: (node, kind) -> when it was last said
        self._recent: dict[tuple[str, str], deque[tuple[float, str]]] = {}  #: (kind, group) -> time, node

    def feed(self, out: Output) -> dict[str, Any] | None:
        """Takes an output; returns the incident's line if it opens one."""
        if isinstance(out, Verdict) and out.kind == "healthy":
            self._open.pop(out.node, None)
        if not isinstance(out, Finding | Decision) or SEVERITIES.index(out.severity) < _WEIGHS:
            return None
        key = (out.node, out.kind)
        said_s = self._before.pop(key, float("-inf"))
        self._before[key] = out.t_unix_s
        if len(self._before) > _KNOWN_MAX:
            del self._before[next(iter(self._before))]
        if out.node in self._open or out.t_unix_s - said_s < AGAIN_S:
            return None
        self._open[out.node] = out.kind
        shared = [(group, self._near(out, group)) for group in self._groups(out.node)]
        group, others = max(shared, key=lambda found: len(found[1]), default=("", []))
        if len(others) > SHARED_NODES:
            return None  # belongs to the incident of the group
        return _line(out, group if len(others) == SHARED_NODES else "", others)

    def _groups(self, name: str) -> Iterator[str]:
        """What a node shares its fate with."""
        if facts := self._facts.get(name):
            for what in ("nvlink_domain", "rack", "cooling_zone"):
                if value := getattr(facts, what):
                    yield f"{what} {value}"
        for job in sorted(self._jobs.get(name, ())):
            yield f"job {job}"

    def _near(self, out: Output, group: str) -> list[str]:
        """The nodes of the group that had the same lately, this one too."""
        recent = self._recent.setdefault((out.kind, group), deque(maxlen=_RECENT_MAX))
        recent.append((out.t_unix_s, out.node))
        return sorted({node for t_s, node in recent if abs(out.t_unix_s - t_s) <= SHARED_WINDOW_S})


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
