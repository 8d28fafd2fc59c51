"""What receivers get to read, as each kind wants it. Pure.

Texts of incidents come from logs: control characters go, and each form escapes what it takes for markup.
"""

import hashlib
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from gridctl.model.findings import SEVERITIES
from gridctl.notify.duty import Notice, Subject

LINE_CHARS_MAX = 300
LINES_MAX = 20

_PAGERDUTY = {"info": "info", "warning": "warning", "critical": "error", "fatal": "critical"}
#: An alert that nobody tells of any more ends after this: a controller that is away is blind, and ends none.
_ALERT_LASTS_S = 86400.0


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A notice in words."""

    notice: Notice
    severity: str
    subject: str  #: one line
    lines: list[str]
    subjects: list[Subject]
    acked_by: str = ""

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def one_line(text: str) -> str:
    """Text from outside as a part of a line: nothing in it starts a new one or steers a terminal."""
    kept = "".join(" " if unicodedata.category(char).startswith(("C", "Z")) else char for char in text)
    return kept if len(kept) <= LINE_CHARS_MAX else kept[: LINE_CHARS_MAX - 1] + "…"


def write(notice: Notice, subjects: Sequence[Subject]) -> Message:
    """Words for a notice. `subjects`: its incidents, the first of the thread first."""
    severity = max((one.labels["severity"] for one in subjects), key=SEVERITIES.index, default="warning")
    acked_by = one_line(next((one.acked_by for one in subjects if one.acked_by), ""))
    first = subjects[0]
    more = f" and {len(subjects) - 1} more" if len(subjects) > 1 else ""
    what = {
        "acked": f"acknowledged by {acked_by}: ",
        "closed": "closed: ",
        "grown": "more: ",
        "opened": f"nobody has acknowledged, level {notice.escalation}: " if notice.escalation else "",
    }[notice.event]
    lines = [line for one in subjects[:LINES_MAX] for line in _of_one(one)]
    if len(subjects) > LINES_MAX:
        lines.append(f"... and {len(subjects) - LINES_MAX} more")
    if notice.event in ("opened", "grown"):
        lines.append(f"look: gridctl incident show {notice.thread}")
        lines.append(f"take it: gridctl incident ack {notice.thread}")
    return Message(
        notice=notice,
        severity=severity,
        subject=one_line(f"[{severity}] {what}{first.title}{more} ({first.id})"),
        lines=lines,
        subjects=list(subjects),
        acked_by=acked_by,
    )


def _of_one(one: Subject) -> list[str]:
    where = ", ".join(
        f"{name} {one_line(one.labels[name])}"
        for name in ("node", "rack", "job", "owner")
        if one.labels[name]
    )
    since = utc(one.opened_unix_s)
    lines = [f"{one.id} {one_line(one.title)} [{one.labels['severity']}], {where}, since {since}"]
    lines += [f"  {one_line(why)}" for why in one.why[:3]]
    if one.closed and one.outcome:
        lines.append(f"  closed: {one_line(one.outcome)}")
    return lines


def utc(t_unix_s: float) -> str:
    """A moment, to the second, in UTC."""
    return datetime.fromtimestamp(t_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pagerduty(message: Message, routing_key: str) -> dict[str, Any]:
    """A body for Events API v2: the thread is the key under which an event is one."""
    action = {"acked": "acknowledge", "closed": "resolve"}.get(message.notice.event, "trigger")
    body: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": action,
        "dedup_key": _dedup(message.notice),
    }
    if action == "trigger":
        first = message.subjects[0]
        body["client"] = "gridctl"
        body["payload"] = {
            "summary": message.subject,
            "source": first.labels["node"] or first.labels["job"] or "fleet",
            "severity": _PAGERDUTY[message.severity],
            "timestamp": utc(first.opened_unix_s),
            "component": first.labels["job"],
            "group": first.labels["rack"],
            "class": first.labels["kind"],
            "custom_details": {"incidents": [one.id for one in message.subjects], "text": message.text},
        }
    return body


def alerts(message: Message, now_unix_s: float) -> list[dict[str, Any]]:
    """A body for Alertmanager's /api/v2/alerts: an alert for each incident of the thread.

    Alertmanager keeps alerts in memory only, so that they are told again and again while they last.
    """
    over = message.notice.event == "closed"
    return [
        {
            "labels": {**alert_labels(message.notice, one), "severity": one.labels["severity"]},
            "annotations": {
                "summary": one_line(one.title),
                "description": "\n".join(_of_one(one)),
                "acknowledged_by": one_line(one.acked_by),
            },
            "startsAt": utc(one.opened_unix_s),
            "endsAt": utc(now_unix_s if over or one.closed else now_unix_s + _ALERT_LASTS_S),
        }
        for one in message.subjects
    ]


def alert_labels(notice: Notice, one: Subject) -> dict[str, str]:
    """What makes an alert the same alert: labels that do not change while an incident lasts."""
    fixed = {
        name: one_line(one.labels[name]) for name in ("incident", "kind", "node", "rack", "job", "owner")
    }
    return {"alertname": "gridctl_incident", "route": notice.route, **{k: v for k, v in fixed.items() if v}}


def alert_silence(message: Message, now_unix_s: float, until_unix_s: float) -> list[dict[str, Any]]:
    """Bodies for Alertmanager's /api/v2/silences: an acknowledged incident is not told of any more."""
    return [
        {
            "matchers": [
                {"name": name, "value": value, "isRegex": False, "isEqual": True}
                for name, value in alert_labels(message.notice, one).items()
                if name in ("alertname", "incident")
            ],
            "startsAt": utc(now_unix_s),
            "endsAt": utc(until_unix_s),
            "createdBy": message.acked_by or "gridctl",
            "comment": f"acknowledged by {message.acked_by}",
        }
        for one in message.subjects
    ]


def slack(message: Message) -> dict[str, Any]:
    """A body for an incoming webhook of Slack and of what is like it (Mattermost, Rocket.Chat)."""
    text = f"{message.subject}\n{message.text}"
    return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def webhook(message: Message) -> dict[str, Any]:
    """A body for a site's own receiver."""
    notice = message.notice
    return {
        "version": 1,
        "event": notice.event,
        "escalation": notice.escalation,
        "thread": notice.thread,
        "key": _dedup(notice),
        "route": notice.route,
        "severity": message.severity,
        "subject": message.subject,
        "text": message.text,
        "acked_by": message.acked_by,
        "incidents": [
            {**one.labels, "title": one.title, "opened_unix_s": one.opened_unix_s, "closed": one.closed}
            for one in message.subjects
        ],
    }


def mail_ids(notice: Notice) -> tuple[str, str]:
    """Message-ID of this mail, and of its thread: mail programs show together what refers to the same."""
    own = hashlib.sha256(" ".join(notice.key).encode()).hexdigest()[:32]
    first = hashlib.sha256(f"{notice.route} {notice.thread} {notice.receiver}".encode()).hexdigest()[:32]
    return f"<{own}@gridctl>", f"<{first}@gridctl>"


def _dedup(notice: Notice) -> str:
    return f"gridctl/{notice.route}/{notice.thread}"
