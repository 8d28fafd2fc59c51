"""Two incidents side by side. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from gridctl.history.report.document import Clock
from gridctl.history.report.facts import Report

UNKNOWN = "unknown"


class Row(NamedTuple):
    """One thing of both. Numbers are seconds, GPU-hours or dollars, as the name says; None is not known."""

    what: str
    a: str | float | None
    b: str | float | None


def compare(a: Report, b: Report) -> list[Row]:
    """What they are, how long each took, what each cost, and which signals they have in common."""
    clock = Clock(None)
    return [
        Row("opened", clock.one(a.incident.opened_unix_s), clock.one(b.incident.opened_unix_s)),
        *(Row(name, one, other) for (name, one), (_, other) in zip(_told(a), _told(b), strict=True)),
        *(Row(name, one, other) for (name, one), (_, other) in zip(_took(a), _took(b), strict=True)),
        *_signals(a, b),
    ]


def _told(report: Report) -> Iterator[tuple[str, str]]:
    incident, node = report.incident, report.node
    yield "kind", incident.kind
    yield "state", incident.state
    yield "verdict", incident.verdict.replace("_", " ") or "nobody's yet"
    yield "node", incident.node
    yield "job", incident.job or "none"
    yield "node class", node.node_class or UNKNOWN
    yield "rack", node.rack or UNKNOWN
    yield "driver", node.driver or UNKNOWN
    yield "decided", ", ".join(dict.fromkeys(its.decision for its in report.decisions)) or "nothing"
    yield "runs", ", ".join(f"{run.id} {run.state}" for run in report.runs) or "none"


def _took(report: Report) -> Iterator[tuple[str, float | None]]:
    times, cost = report.times, report.cost
    yield "detect_s", times.detect_s
    yield "decide_s", times.decide_s
    yield "act_s", times.act_s
    yield "resolve_s", times.resolve_s
    yield "pause_s", times.pause_s
    yield "stood_s", times.stood_s
    yield "cost_gpu_h", cost.gpu_h if cost else None
    yield "cost_usd", cost.usd if cost else None


def _signals(a: Report, b: Report) -> Iterator[Row]:
    """By their kind: on which device, and with which words, is each incident's own."""
    mine, other = ({found.kind for found in report.evidence} for report in (a, b))
    yield Row("signals in common", *[", ".join(sorted(mine & other)) or "none"] * 2)
    yield Row("signals of its own", ", ".join(sorted(mine - other)), ", ".join(sorted(other - mine)))
    held = [", ".join(sorted({found.rule for found in report.suppressed})) for report in (a, b)]
    yield Row("held back by", held[0] or "nothing", held[1] or "nothing")
