"""The forecasts that a watchdog's lines would have given day by day, against the truth of a recording.

As `gridctl risk --skill` does it from a journal, but what came is what the truth says, found or not.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gridagent.wire import StreamRecord
from gridctl.assess.rates import Tables
from gridctl.assess.record import Entry, hindcast
from gridctl.assess.skill import Outcome
from gridctl.model.findings import WatchedNode
from gridctl.model.truth import Truth

#: What a journal would hold as a person's word that a node is open again.
_OPENED = ("undrain", "maintenance_end")


class Hindsight:
    """Takes the records and lines of a replay."""

    def __init__(self, known: Tables, nodes: Iterable[WatchedNode]) -> None:
        self._known = known
        self._gpus = {node.name: node.gpus for node in nodes}
        self._entries = [
            Entry(t_unix_s=0.0, kind="audit", data={"node": name, "t_unix_s": 0.0}) for name in self._gpus
        ]

    def record(self, record: StreamRecord) -> None:
        """Takes a record: only what people say of a node counts."""
        if record.kind == "note" and record.v.get("action") in _OPENED:
            data = {"what": "uncordon", "node": record.node, "t_unix_s": record.t_unix_s}
            self._entries.append(Entry(t_unix_s=record.t_unix_s, kind="audit", data=data))

    def line(self, line: Mapping[str, Any]) -> None:
        """Takes a line as `gridctl replay` prints it."""
        if line["type"] in ("finding", "verdict", "decision") and line["node"]:
            data = {"layer": "", "fault": "", **line, "t_unix_s": line["t"]}
            kind = "decision" if line["type"] == "decision" else "finding"
            self._entries.append(Entry(t_unix_s=line["t"], kind=kind, data=data))

    def outcomes(self, truth: Truth) -> list[Outcome]:
        """Every forecast and what came of it; none of a recording of less than two days.

        A forecast is about one node: what befalls a job or a place as a whole is the fault of none of them.
        """
        faults: dict[str, list[tuple[float, str]]] = {}
        for fault in truth.faults:
            if len(members := fault.members()) == 1:
                faults.setdefault(members[0], []).append((fault.t, self._known.class_of(fault.kind)))

        def came(node: str, from_s: float, until_s: float) -> set[str]:
            return {of_class for t, of_class in faults.get(node, ()) if from_s < t <= until_s}

        return list(hindcast(self._entries, self._known, self._gpus, came))
