"""Records of the journal in the Elastic Common Schema, one JSON object each: what a SIEM takes in.

Names: elastic.co/docs/reference/ecs, version 8. What has no name there stands below `gridctl`.
"""

from datetime import UTC, datetime
from typing import Any

from gridagent.journal import Record

VERSION = "8.11"
_CATEGORY = {"audit": "configuration", "gate": "configuration", "lease": "session", "finding": "host"}
_TYPES = {
    "audit": "admin",
    "gate": "allowed",
    "run": "change",
    "step": "change",
    "plan": "info",
    "finding": "indicator",
}
_OUTCOMES = {
    **dict.fromkeys(("done", "collected", "sent", "closed"), "success"),
    **dict.fromkeys(("failed", "undo-failed", "aborted", "rolled-back", "given-up"), "failure"),
}


def ecs(record: Record) -> dict[str, Any]:
    """One record. Members that it does not have are left out."""
    data = record.data
    told = data.get("plan")
    plan: dict[str, Any] = told if isinstance(told, dict) else {}
    node = data.get("node") or plan.get("node")
    who = data.get("who") or plan.get("who")
    action = data.get("what") or data.get("type") or data.get("step") or record.kind
    state = str(data.get("state", ""))
    found: dict[str, Any] = {
        "@timestamp": _utc(record.t_unix_s),
        "ecs": {"version": VERSION},
        "event": {
            "kind": "alert" if record.kind == "finding" else "event",
            "category": [_CATEGORY.get(record.kind, "process")],
            "type": [_TYPES.get(record.kind, "info")],
            "action": f"{action}-{state}" if state else str(action),
            "outcome": _OUTCOMES.get(state, "unknown"),
            "reason": data.get("reason") or data.get("text") or _first(data.get("why")),
            "sequence": record.seq,
            "id": record.hash,
            "hash": record.hash,
            "module": "gridctl",
            "dataset": f"gridctl.{record.kind}",
            "provider": record.actor,
        },
        "user": {"name": who} if who else None,
        "host": {"name": node} if node else None,
        "related": {"hosts": _hosts(data, plan, node), "user": [who] if who else []},
        "rule": {"name": data["rule"]} if data.get("rule") else None,
        "observer": {"product": "gridctl", "vendor": "gridctl"},
        "gridctl": {"kind": record.kind, "prev": record.prev, **data},
    }
    return {name: value for name, value in found.items() if value is not None}


def _hosts(data: dict[str, Any], plan: dict[str, Any], node: Any) -> list[str]:
    named = [node, *(member.get("node") for member in plan.get("members", []) if isinstance(member, dict))]
    granted = data.get("granted")
    named += granted if isinstance(granted, list) else []
    return sorted({name for name in named if isinstance(name, str) and name})


def _first(why: Any) -> str | None:
    return str(why[0]) if isinstance(why, list) and why else None


def _utc(t_unix_s: float) -> str:
    try:
        return datetime.fromtimestamp(t_unix_s, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return "1970-01-01T00:00:00.000000Z"
