"""Incidents, a fold over the journal: what was seen, decided, planned, confirmed and done, a line each."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gridagent.journal import Record
from gridctl.model.actions import RECOVER
from gridctl.model.plans import Plan
from gridctl.model.runs import Incident, Moment


class Incidents:
    """All incidents of a journal, the oldest first."""

    def __init__(self) -> None:
        self._all: dict[str, Incident] = {}

    def all(self) -> list[Incident]:
        return list(self._all.values())

    def get(self, incident: str) -> Incident | None:
        return self._all.get(incident)

    def open_on(self, node: str, job: str = "") -> Incident | None:
        """The newest open incident of a node that began with a finding and is of no other job than `job`."""
        return next(
            (
                i
                for i in self._open()
                if i.node == node and i.kind != "manual" and (not job or i.job in ("", job))
            ),
            None,
        )

    def open_for(self, node: str, job: str) -> Incident | None:
        """The newest open incident to which a plan for `job` to leave `node` belongs."""
        return next((i for i in self._open() if i.node == node and i.job in ("", job)), None)

    def forgotten(self, now_unix_s: float, plans: Mapping[str, Plan]) -> list[Incident]:
        """Those that somebody opened with a plan which was never applied and has expired."""
        return [
            incident
            for incident in self._open()
            if incident.kind == "manual"
            and not incident.runs
            and all(plans[plan].expires_unix_s <= now_unix_s for plan in incident.plans if plan in plans)
        ]

    def _open(self) -> Iterator[Incident]:
        return (incident for incident in reversed(self._all.values()) if incident.state == "open")

    def take(self, record: Record) -> None:
        """Folds one record in. One that belongs to no incident is passed over."""
        data = record.data
        name = data.get("incident")
        if not name:
            return
        if name not in self._all:
            if record.kind != "incident":
                return
            self._all[name] = _opened(name, record)
        incident = self._all[name]
        changes = _changes(incident, record)
        told = Moment(
            t_unix_s=data.get("t_unix_s", record.t_unix_s),
            kind=record.kind,
            what=_told(record),
            seq=record.seq,
        )
        timeline = sorted([*incident.timeline, told], key=lambda moment: (moment.t_unix_s, moment.seq))
        self._all[name] = msgspec.structs.replace(incident, timeline=timeline, **changes)


def _opened(name: str, record: Record) -> Incident:
    data = record.data
    return Incident(
        id=name,
        kind=data["kind"],
        state="open",
        title=data["title"],
        node=data["node"],
        job=data.get("job", ""),
        opened_unix_s=data.get("t_unix_s", record.t_unix_s),
    )


def _changes(incident: Incident, record: Record) -> dict[str, Any]:
    data = record.data
    if record.kind == "incident":
        if data["state"] == "closed":
            return {"state": "closed", "closed_unix_s": record.t_unix_s}
        return {"state": "open", "closed_unix_s": 0.0, "kind": data["kind"], "title": data["title"]}
    if record.kind == "finding":
        return {"findings": [*incident.findings, data]}
    if record.kind == "decision" and data.get("type") == "decision":
        return {"decision": data}
    if record.kind == "decision" and data.get("type") == "choice":
        return {"choice": data}
    if record.kind == "plan":
        return {"plans": [*incident.plans, data["plan"]["id"]], "job": incident.job or data["plan"]["job"]}
    if record.kind == "audit" and data.get("what") == "evidence":
        others = [found for found in incident.evidence if found["id"] != data["id"]]
        return {"evidence": [*others, {**data, "t_unix_s": record.t_unix_s}]}
    if record.kind == "run" and data["run"] not in incident.runs:
        return {"runs": [*incident.runs, data["run"]]}
    return {}


def _told(record: Record) -> str:
    data = record.data
    match record.kind:
        case "incident":
            return f"incident {data['state']}: {data['title']}"
        case "finding":
            return _because(f"{data['type']} {data['kind']} on {data['device']}", data)
        case "decision" if data["type"] == "choice":
            return _because(f"{data['action']} is what ought to be done", data)
        case "decision":
            what = data.get("decision") or data["type"]
            return _because(f"{what} ({data['kind']})", data)
        case "plan":
            plan = data["plan"]
            if plan.get("action"):
                what = f"{', '.join(plan['devices'])} is reset" if plan["devices"] else "a reboot"
                waived = f", without evidence: {plan['waiver']}" if plan["waiver"] else ""
                return f"plan {plan['id']}: {what}{waived}"
            moves = ", ".join(f"rank {move['rank']} -> {move['target']['node']}" for move in plan["moves"])
            return f"plan {plan['id']}: {moves}"
        case "gate":
            how = "--yes" if data.get("yes") else "typed the node's name"
            return f"{data['who']} confirmed plan {data['plan']} ({how}): {data['reason']}"
        case "run" | "step":
            what = f"run {data['run']}" if record.kind == "run" else f"step {data['step']}"
            return f"{what}: {data['state']}" + (f" ({data['text']})" if data.get("text") else "")
        case "notice":
            return f"{data['receiver']} ({data['event']}, {data['state']}): {data['text']}"
        case "lease":
            return f"lease with fence {data['fence']} from {len(data['granted'])} agents"
        case "note" if "phase" in data:
            return f"{data['phase']}: rank {data['rank']} on {data['node']}"
    return str(data.get("text", "")) or record.kind


def _because(what: str, data: dict[str, Any]) -> str:
    """Of a job that stands all is told: how long it waits, what is to be done, and why perhaps not."""
    why = data.get("why") or []
    told = why if data.get("action") == RECOVER else why[:1]
    return f"{what}: {'. '.join(told)}" if told else what
