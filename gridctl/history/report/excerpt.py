"""A recording cut out of an incident: what is kept of its nodes, as records that `gridctl replay` plays.

Nothing is made up: what a finding rests on and is not kept as a line or a value stands in the recording as a
note, and whatever is not in it is said. Without heartbeats a replay says nothing of silence.
"""

import ast
import contextlib
import datetime
import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from gridagent.journal import Record
from gridagent.wire import StreamRecord
from gridctl.history import History, HistoryError
from gridctl.history.report.source import Source, rows
from gridctl.history.tables import quoted
from gridctl.model.findings import WatchedNode
from gridctl.model.plans import Plan
from gridctl.ports.recording import Header, Job

#: What a node has told in so long is asked for at once: a day of it would not fit into memory.
CHUNK_S = 300.0
#: What lasts longer is cut out by its beginning.
CUT_MAX_S = 3600.0
MARGIN_S = 600.0

#: How detection writes down an Xid of which it quotes the text.
_XID = re.compile(r"""Xid (\d{1,5}): .*: ('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)


class Excerpt(msgspec.Struct, frozen=True, kw_only=True):
    """A recording to be. `records` can be walked through once; `lacking` is complete after that."""

    header: Header
    start_unix_s: float
    records: Iterator[StreamRecord]
    lacking: list[str]


def excerpt(history: History, source: Source, spooled: Sequence[StreamRecord]) -> Excerpt:
    """`spooled`: what an archive of evidence has of the incident's node, in order.

    Raises `HistoryError` where the journal cannot be asked.
    """
    begin, end = source.from_unix_s, min(source.to_unix_s, source.from_unix_s + CUT_MAX_S + 2 * MARGIN_S)
    opened = next(record.data for record in source.records if record.kind == "incident")
    node, plan = str(opened.get("node", "")), _plan(source.records)
    job, ranks = (plan.job, _ranks(plan)) if plan else ("", {})
    nodes = sorted({node, *ranks.values()} - {""})
    lacking = ["heartbeats, probes and notes of nodes are kept nowhere: nothing is said of silence"]
    known = _span(spooled)
    said = [r for r in _said(source, node) if not known[0] <= r.t_unix_s <= known[1]]
    if unquoted := sum(record.kind == "note" for record in said):
        lacking.append(f"{unquoted} findings quote no line of a log: they stand in it as notes")
    if quoted := sum(record.kind == "log" for record in said):
        lacking.append(f"{quoted} lines are as findings quote them: without the process, and cut where long")
    if not spooled:
        lacking.append(f"no spool of {node or 'any node'}: no archive of evidence is at hand")
    return Excerpt(
        header=Header(
            recording=1,
            name=source.incident,
            start=datetime.datetime.fromtimestamp(begin, datetime.UTC).isoformat(timespec="milliseconds"),
            nodes=[_watched(name, source.facts if name == node else {}) for name in nodes],
            jobs=[Job(id=job, ranks=ranks)] if ranks else [],
        ),
        start_unix_s=begin,
        records=heapq.merge(
            said,
            [record for record in spooled if begin <= record.t_unix_s <= end],
            _samples(history, nodes, (begin, end), {node: known}, lacking),
            _steps(history, job, (begin, end), {node: known}, lacking),
            key=lambda record: record.t_unix_s,
        ),
        lacking=lacking,
    )


def _plan(records: Iterable[Record]) -> Plan | None:
    """The newest plan for ranks to leave the node."""
    found = None
    for record in records:
        if record.kind == "plan":
            with contextlib.suppress(msgspec.ValidationError):
                plan = msgspec.convert(record.data["plan"], Plan)
                found = plan if plan.moves else found
    return found


def _ranks(plan: Plan) -> dict[str, str]:
    """Where the job's ranks were before the plan was applied."""
    members = {str(member.rank): member.node for member in plan.members if member.role == "survivor"}
    return {**members, **{str(move.rank): move.origin or move.source.node for move in plan.moves}}


def _watched(name: str, told: dict[str, Any]) -> WatchedNode:
    gpus = told.get("gpus")
    return WatchedNode(
        name=name,
        rack=str(told.get("rack", "")),
        nvlink_domain=str(told.get("nvlink_domain", "")),
        cooling_zone=str(told.get("cooling_zone", "")),
        gpus=gpus if isinstance(gpus, int) else 0,
        driver=str(told.get("driver", "")),
    )


def _span(records: Sequence[StreamRecord]) -> tuple[float, float]:
    """From when to when these tell; nowhen, if there are none."""
    times = [record.t_unix_s for record in records]
    return (min(times), max(times)) if times else (0.0, -1.0)


def _said(source: Source, node: str) -> list[StreamRecord]:
    """The lines that findings quote, as the driver has printed them; the others as notes."""
    found = [r for r in (*source.records, *source.around) if r.data.get("type") in ("finding", "suppressed")]
    pcis = {_place(r, node): str(r.data["pci"]) for r in found if r.data.get("pci")}
    made: dict[tuple[float, str], StreamRecord] = {}
    for record in found:
        data = record.data
        t, place = float(data.get("t_unix_s", record.t_unix_s)), _place(record, node)
        of = place[0]
        quoted = [match for line in data.get("why", []) if (match := _XID.fullmatch(str(line)))]
        pci = data.get("pci") or pcis.get(place) or ""
        for match in quoted if pci else []:
            line = f"NVRM: Xid (PCI:{pci}): {match[1]}, {ast.literal_eval(match[2])}"
            made.setdefault((t, line), _record(t, of, "log", {"source": "kmsg", "line": line}))
        if not (quoted and pci):
            text = f"{data.get('type')} {data.get('kind')} on {data.get('device')}: {data.get('why')}"
            made.setdefault((t, text), _record(t, of, "note", {"text": text}))
    mapped = [
        _record(source.from_unix_s, of, "sample", {"device": device, "pci": pci, "v": {}})
        for (of, device), pci in pcis.items()
    ]
    return sorted([*mapped, *made.values()], key=lambda record: record.t_unix_s)


def _place(record: Record, node: str) -> tuple[str, str]:
    """The node and the device that a finding is about."""
    return str(record.data.get("node") or node), str(record.data.get("device"))


def _record(t_unix_s: float, node: str, kind: str, v: dict[str, Any]) -> StreamRecord:
    return StreamRecord(seq=0, boot="", t_unix_s=t_unix_s, node=node, kind=kind, v=v)


def _samples(
    history: History,
    nodes: list[str],
    window: tuple[float, float],
    known: dict[str, tuple[float, float]],
    lacking: list[str],
) -> Iterator[StreamRecord]:
    """The last value of every metric in each span that is kept; a span of a minute is one value."""
    names, spans, count = ", ".join(map(quoted, nodes)) or "''", set[float](), 0
    sql = (
        'SELECT t_unix_s, span_s, node, device, metric, "last" AS value FROM samples'
        f" WHERE node IN ({names})",
        "ORDER BY t_unix_s, node, device, metric",
    )
    for found in _chunks(history, sql, window, "samples", lacking):
        grouped: dict[tuple[float, str, str], dict[str, Any]] = {}
        for row in found:
            spans.add(float(row["span_s"]))
            values = grouped.setdefault((float(row["t_unix_s"]), row["node"], row["device"]), {})
            values[row["metric"]] = row["value"]
        for (t, node, device), v in grouped.items():
            if not _covers(known, node, t):
                count += 1
                yield _record(t, node, "sample", {"device": device, "v": v})
    if count == 0:
        lacking.append("no samples of that time are kept")
    elif max(spans) > 1:
        lacking.append(f"samples are one for {max(spans):.0f} s: what came between is not in it")


def _steps(
    history: History,
    job: str,
    window: tuple[float, float],
    known: dict[str, tuple[float, float]],
    lacking: list[str],
) -> Iterator[StreamRecord]:
    count = 0
    sql = (
        "SELECT t_unix_s, node, job, rank, step, step_s, loss, grad_norm FROM progress"
        f" WHERE job = {quoted(job)}",
        "ORDER BY t_unix_s, rank, step",
    )
    for found in _chunks(history, sql, window, "progress", lacking) if job else ():
        for row in found:
            t, node = float(row.pop("t_unix_s")), row.pop("node")
            if not _covers(known, node, t):
                count += 1
                yield _record(t, node, "progress", row)
    if count == 0:
        lacking.append("no steps of that time are kept")


def _covers(known: dict[str, tuple[float, float]], node: str, t: float) -> bool:
    begin, end = known.get(node, (0.0, -1.0))
    return begin <= t <= end


def _chunks(
    history: History, sql: tuple[str, str], window: tuple[float, float], table: str, lacking: list[str]
) -> Iterator[list[dict[str, Any]]]:
    """The rows of one piece of time after another; none where the history has no such table."""
    begin, end = window
    while begin < end:
        until = min(begin + CHUNK_S, end)
        try:
            yield rows(history, f"{sql[0]} AND t_unix_s >= {begin!r} AND t_unix_s < {until!r} {sql[1]}")
        except HistoryError as error:
            if "does not exist" not in str(error):
                lacking.append(f"{table} cannot be read: {str(error).splitlines()[0]}")
            return
        begin = until
