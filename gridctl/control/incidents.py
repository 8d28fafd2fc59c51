"""Incidents, a fold over the journal: what was seen, decided, planned, confirmed and done, a line each."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gridagent.journal import Record
from gridctl.model.actions import RECOVER
from gridctl.model.plans import Plan
from gridctl.model.runs import Incident, Moment

#: What a person did to an incident, by the audit's `what`.
SAYS = {"note": "notes", "link": "links", "ack": "has it in hand", "assign": "assigns it to"}


class Incidents:
    """All incidents of a journal, the oldest first."""

    def __init__(self) -> None:
        self._all: dict[str, Incident] = {}

    def all(self) -> list[Incident]:
        return list(self._all.values())

    def open(self) -> list[Incident]:
        """Those that are not closed."""
        return [incident for incident in self._all.values() if incident.state == "open"]

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
            and not (incident.runs or incident.reopened_by)
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
        self._merged(name, incident.merged_into, self._all[name].merged_into)

    def _merged(self, name: str, before: str, now: str) -> None:
        """The incident that another one went into, or does not belong to any more, says so as well."""
        for other, belongs in ((before, False), (now, True)):
            if before != now and (whole := self._all.get(other)):
                parts = [part for part in whole.merged if part != name] + [name] * belongs
                self._all[other] = msgspec.structs.replace(whole, merged=parts)


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
        return _state(incident, record)
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
    if record.kind == "audit":
        return _by_person(incident, record)
    if record.kind == "run" and data["run"] not in incident.runs:
        return {"runs": [*incident.runs, data["run"]]}
    return {}


def _state(incident: Incident, record: Record) -> dict[str, Any]:
    """It stays closed since when it was, whatever is said of it later; who had it in hand once has it no
    more when it begins anew."""
    data = record.data
    if data["state"] == "closed":
        said: dict[str, Any] = {name: data[name] for name in ("verdict", "merged_into") if name in data}
        since_unix_s = incident.closed_unix_s or record.t_unix_s
        return {"state": "closed", "closed_unix_s": since_unix_s, "reopened_by": "", **said}
    by = data.get("who", "")
    fresh = {"verdict": "", "merged_into": "", "acked_by": "", "reopened_by": by}
    anew = fresh if incident.state == "closed" else {}
    return {"state": "open", "closed_unix_s": 0.0, "kind": data["kind"], "title": data["title"], **anew}


def _by_person(incident: Incident, record: Record) -> dict[str, Any]:
    data = record.data
    said = {name: data.get(name, "") for name in ("who", "reason", "value")}
    match data.get("what"):
        case "ack":
            return {"acked_by": data["who"]}
        case "assign":
            return {"assigned_to": data["value"]}
        case "note":
            return {"notes": [*incident.notes, {"t_unix_s": record.t_unix_s, **said}]}
        case "link":
            return {"links": [*incident.links, {"t_unix_s": record.t_unix_s, **said}]}
    return {}


def _told(record: Record) -> str:
    data = record.data
    if said := _said(record.kind, data):
        return said
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
            return _planned(data["plan"])
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


def _said(kind: str, data: dict[str, Any]) -> str:
    """What a person made of an incident; "" where this is no such record."""
    if kind == "audit" and data.get("what") in SAYS:
        what = f"{SAYS[data['what']]} {data['value']}".rstrip()
    elif kind != "incident" or "who" not in data:
        return ""
    elif into := data.get("merged_into"):
        what = f"merged it into {into}"
    elif data["state"] == "closed":
        what = f"closed it as {data['verdict'].replace('_', ' ')}"
    else:
        what = "reopened it"
    return f"{data['who']} {what}: {data['reason']}"


def _planned(plan: dict[str, Any]) -> str:
    if plan.get("action"):
        what = f"{', '.join(plan['devices'])} is reset" if plan["devices"] else "a reboot"
        waived = f", without evidence: {plan['waiver']}" if plan["waiver"] else ""
        return f"plan {plan['id']}: {what}{waived}"
    moves = ", ".join(f"rank {move['rank']} -> {move['target']['node']}" for move in plan["moves"])
    return f"plan {plan['id']}: {moves}"


def _because(what: str, data: dict[str, Any]) -> str:
    """Of a job that stands all is told: how long it waits, what is to be done, and why perhaps not."""
    why = data.get("why") or []
    told = why if data.get("action") == RECOVER else why[:1]
    return f"{what}: {'. '.join(told)}" if told else what
