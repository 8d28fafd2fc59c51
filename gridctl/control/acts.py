"""What people do to an incident: note, link, ack, assign, close, reopen, merge.

Each is one record of the journal. What is so already is not written again: the same command twice is the same
as once. Whatever somebody says of an incident, detection goes on: it adds to an open one, and opens another
where all are closed.
"""

from collections.abc import Callable
from typing import Any

from gridctl.control.ledger import Ledger
from gridctl.errors import Refused
from gridctl.model.runs import Act, Incident

#: A record is read whole by everybody who reads the journal: what is larger belongs into a file, and a link.
REASON_BYTES_MAX = 65_536
VALUE_CHARS_MAX = 2_000
VERDICTS = ("true_fault", "false_alarm", "unknown")

_Record = tuple[str, dict[str, Any]]


def act(ledger: Ledger, name: str, verb: str, its: Act) -> Incident:
    """The incident as it is then. Raises `Refused`; then nothing was written."""
    incident = ledger.incident(name)
    _check(verb, its)
    record = VERBS[verb](ledger, incident, its)
    if record is not None:
        ledger.append(*record)
    return ledger.incident(name)


def _check(verb: str, its: Act) -> None:
    if not its.who.strip():
        raise Refused("bad-request", f"{verb}: who does it must be said")
    if not its.reason.strip():
        lacks = "a note has words" if verb == "note" else "a reason is needed (--reason)"
        raise Refused("not-confirmed", f"{lacks}: it stands in the journal")
    if len(its.reason.encode()) > REASON_BYTES_MAX:
        text = f"more than {REASON_BYTES_MAX} bytes are too much for the journal: link a file instead"
        raise Refused("bad-request", text)
    if max(len(its.value), len(its.who)) > VALUE_CHARS_MAX:
        raise Refused("bad-request", f"{verb}: a name or an address has at most {VALUE_CHARS_MAX} characters")


def _audit(verb: str, incident: Incident, its: Act) -> _Record:
    said = {"who": its.who, "reason": its.reason, "value": its.value}
    return "audit", {"what": verb, "incident": incident.id, **said}


def _changed(incident: Incident, its: Act, state: str, **more: str) -> _Record:
    about = {"incident": incident.id, "state": state, "kind": incident.kind, "node": incident.node}
    said = {"title": incident.title, "who": its.who, "reason": its.reason}
    return "incident", {**about, "job": incident.job, **said, **more}


def _note(_: Ledger, incident: Incident, its: Act) -> _Record | None:
    known = any((note["who"], note["reason"]) == (its.who, its.reason) for note in incident.notes)
    return None if known else _audit("note", incident, its)


def _link(_: Ledger, incident: Incident, its: Act) -> _Record | None:
    web = its.value.startswith(("https://", "http://"))
    if not web or not its.value.isprintable() or " " in its.value:
        raise Refused("bad-request", f"{its.value[:80]!a} is no address: write https://...")
    known = any(link["value"] == its.value for link in incident.links)
    return None if known else _audit("link", incident, its)


def _ack(_: Ledger, incident: Incident, its: Act) -> _Record | None:
    if incident.state != "open":
        raise Refused("not-now", f"{incident.id} is closed: there is nothing to take in hand")
    return None if incident.acked_by == its.who else _audit("ack", incident, its)


def _assign(_: Ledger, incident: Incident, its: Act) -> _Record | None:
    if not its.value.strip():
        raise Refused("bad-request", "assign: to whom must be said")
    return None if incident.assigned_to == its.value else _audit("assign", incident, its)


def _close(ledger: Ledger, incident: Incident, its: Act) -> _Record | None:
    """Also of one that is closed already: what it was is a person's to say, and often only later."""
    if its.value not in VERDICTS:
        raise Refused("bad-request", f"{its.value[:40]!a} is no verdict: {', '.join(VERDICTS)}")
    _refuse_unended(ledger, incident)
    same = incident.state == "closed" and incident.verdict == its.value
    return None if same else _changed(incident, its, "closed", verdict=its.value)


def _reopen(_: Ledger, incident: Incident, its: Act) -> _Record | None:
    return None if incident.state == "open" else _changed(incident, its, "open")


def _merge(ledger: Ledger, incident: Incident, its: Act) -> _Record | None:
    into = ledger.incident(its.value)
    if incident.merged_into == into.id:
        return None
    if incident.merged_into:
        where = f"{incident.id} is a part of {incident.merged_into}"
        raise Refused("not-now", f"{where}: `gridctl incident reopen {incident.id}` ends that")
    whole: Incident | None = into
    while whole is not None:
        if whole.id == incident.id:
            raise Refused(
                "bad-request", f"{into.id} is {incident.id} or a part of it: nothing is merged into itself"
            )
        whole = ledger.incidents.get(whole.merged_into)
    _refuse_unended(ledger, incident)
    return _changed(incident, its, "closed", merged_into=into.id)


def _refuse_unended(ledger: Ledger, incident: Incident) -> None:
    if unended := sorted(set(ledger.unended()).intersection(incident.runs)):
        run = unended[0]
        raise Refused("not-now", f"run {run} of {incident.id} has not ended: see `gridctl run show {run}`")


VERBS: dict[str, Callable[[Ledger, Incident, Act], _Record | None]] = {
    "note": _note,
    "link": _link,
    "ack": _ack,
    "assign": _assign,
    "close": _close,
    "reopen": _reopen,
    "merge": _merge,
}
