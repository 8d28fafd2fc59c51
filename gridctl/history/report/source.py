"""What a report reads: the incident's records, what else was said of its node then, and what was measured."""

import json
from typing import Any

import msgspec

from gridagent.journal import Record
from gridctl.errors import Refused
from gridctl.history import History, HistoryError
from gridctl.history.report.shapes import sound
from gridctl.history.tables import quoted

#: A plot shows so much before the first line and after the last record.
MARGIN_S = 600.0
#: What lasts longer is shown by its beginning: a plot of a week shows no cut.
SHOWN_MAX_S = 6 * 3600.0
POINTS_MAX = 400
#: Other records of the node belong to the story from so long before.
BEFORE_S = 3600.0
#: A node that was away may tell of a phase so long after the incident was closed.
LATE_S = 86400.0
BOUNDARY_STEPS = 5
EARLIER_MAX = 10

Row = dict[str, Any]

METRICS = (
    "temp_c",
    "mem_temp_c",
    "ecc_sbe_total",
    "ecc_dbe_total",
    "ecc_sram_ue_total",
    "remap_corr_total",
    "remap_uncorr_total",
)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Raw material of a report. `blind`: why a table of measurements has nothing; "" where it has."""

    incident: str
    records: list[Record]  #: of the incident, in order
    around: list[Record]  #: of its node and of no incident: what was suppressed, and who opened it again
    earlier: list[Row]
    merged: list[str]
    facts: Row
    from_unix_s: float
    to_unix_s: float
    samples: list[Row] = []
    progress: list[Row] = []
    boundary: list[Row] = []  #: steps beside the cuts
    blind: dict[str, str] = {}
    unread: int = 0  #: records of the incident that have another shape than theirs


def read(history: History, incident: str) -> Source:
    """Raises `Refused` for an unknown incident, `HistoryError` where the journal cannot be asked."""
    told = _of(history, incident)
    records = [record for record in told if sound(record)]
    opened = [record for record in records if record.kind == "incident"]
    if not opened:
        raise Refused(
            "unknown-incident", f"the journal knows no incident {incident!r}: see `gridctl incidents`"
        )
    node, job = str(opened[0].data.get("node", "")), _job(records)
    begin = min(
        _when(record) for record in records if record.data.get("type") == "finding" or record in opened
    )
    end = max(record.t_unix_s for record in records if not _of_people(record))
    window = (begin - MARGIN_S, min(end, begin + SHOWN_MAX_S) + MARGIN_S)
    blind: dict[str, str] = {}
    return Source(
        incident=incident,
        records=records,
        around=_around(history, node, window[0] - BEFORE_S, end) if node else [],
        earlier=_earlier(history, node, incident, begin) if node else [],
        merged=_merged(history, incident),
        facts=_facts(history, node, begin) if node else {},
        from_unix_s=window[0],
        to_unix_s=window[1],
        samples=_measured(history, "samples", _samples(node, window), blind),
        progress=_measured(history, "progress", _progress(job, window), blind),
        boundary=_measured(history, "progress", _beside(job, window, _cuts(records)), blind),
        blind=blind,
        unread=len(told) - len(records),
    )


def _of(history: History, incident: str) -> list[Record]:
    """All records of an incident, in order."""
    its = f"incident = {quoted(incident)}"
    states = rows(history, f"SELECT seq, recorded_unix_s, state FROM row_incidents WHERE {its} ORDER BY seq")
    if not states:
        return []
    few = rows(history, f"SELECT seq FROM row_audit WHERE {its}")
    more = f"data ->> '$.incident' = {quoted(incident)} AND kind NOT IN ('incident', 'audit')"
    more += f" AND seq > {states[0]['seq']}"
    if states[-1]["state"] == "closed":
        more += f" AND t_unix_s <= {states[-1]['recorded_unix_s'] + LATE_S!r}"
    found = [*_numbered(history, [*states, *few]), *_records(history, more)]
    return sorted(found, key=lambda record: record.seq)


def _numbered(history: History, found: list[Row]) -> list[Record]:
    """The records that these rows were made of: a record is read whole only where it is wanted."""
    seqs = ", ".join(str(row["seq"]) for row in found)
    return _records(history, f"seq IN ({seqs})") if seqs else []


def _records(history: History, where: str) -> list[Record]:
    found = rows(
        history,
        f"SELECT seq, t_unix_s, kind, actor, data, prev, hash FROM records WHERE {where} ORDER BY seq",
    )
    return [Record(**{**row, "data": _data(row["data"])}) for row in found]


def rows(history: History, sql: str) -> list[Row]:
    """Each row by the names of its columns. Raises `HistoryError`."""
    columns, found = history.query(sql)
    return [dict(zip(columns, row, strict=True)) for row in found]


def _data(text: Any) -> Row:
    found = json.loads(text) if isinstance(text, str) else text
    return found if isinstance(found, dict) else {}


def _when(record: Record) -> float:
    """When it happened, by its node's clock, unless that is off by more than a day."""
    told = record.data.get("t_unix_s")
    if isinstance(told, int | float) and abs(told - record.t_unix_s) < LATE_S:
        return float(told)
    return record.t_unix_s


def _of_people(record: Record) -> bool:
    """What people say of an incident may come a month later; it ends nothing."""
    return record.kind == "audit" or (record.kind == "incident" and "who" in record.data)


def _job(records: list[Record]) -> str:
    """The job of the incident; else that of its plans."""
    named = [record.data.get("job") for record in records]
    planned = [plan.get("job") for r in records if isinstance(plan := r.data.get("plan"), dict)]
    return str(next(filter(None, [*named, *planned]), ""))


def _cuts(records: list[Record]) -> list[int]:
    """The steps at which ranks changed their process."""
    values = [
        value for record in records for value in record.data.get("values") or [] if isinstance(value, dict)
    ]
    return [value["boundary_step"] for value in values if isinstance(value.get("boundary_step"), int)]


def _around(history: History, node: str, begin: float, end: float) -> list[Record]:
    """What belongs to no incident: it is of this one's story where it is of its node and its time."""
    its = f"node = {quoted(node)} AND coalesce(incident, '') = '' AND recorded_unix_s >= {begin!r}"
    then = f"{its} AND recorded_unix_s <= {end + MARGIN_S!r}"
    found = rows(
        history,
        f"SELECT seq FROM row_findings WHERE {then} UNION SELECT seq FROM row_decisions WHERE {then}"
        f" UNION SELECT seq FROM row_audit WHERE what = 'uncordon' AND {its}",
    )
    return [record for record in _numbered(history, found) if sound(record)]


def _earlier(history: History, node: str, incident: str, begin: float) -> list[Row]:
    """The newest first. Out of the few records that open and close: a view that folds all is slower."""
    return rows(
        history,
        "SELECT incident, coalesce(arg_max(kind, seq), '') AS kind, min(t_unix_s) AS opened_unix_s"
        f" FROM row_incidents WHERE node = {quoted(node)} AND incident <> {quoted(incident)}"
        f" GROUP BY incident HAVING opened_unix_s < {begin!r}"
        f" ORDER BY opened_unix_s DESC, incident LIMIT {EARLIER_MAX}",
    )


def _merged(history: History, incident: str) -> list[str]:
    """Those whose last word is that they are a part of this one."""
    found = rows(
        history,
        "SELECT incident FROM row_incidents WHERE incident IS NOT NULL GROUP BY incident"
        " HAVING arg_max(coalesce(merged_into, ''), seq) FILTER (state = 'open' OR merged_into IS NOT NULL)"
        f" = {quoted(incident)} ORDER BY incident",
    )
    return [row["incident"] for row in found]


def _facts(history: History, node: str, begin: float) -> Row:
    found = rows(
        history,
        f"SELECT arg_max(data, seq) AS data FROM row_facts WHERE node = {quoted(node)}"
        f" AND recorded_unix_s <= {begin + MARGIN_S!r}",
    )
    return _data(found[0]["data"]) if found and found[0]["data"] else {}


def _measured(history: History, table: str, sql: str, blind: dict[str, str]) -> list[Row]:
    """Rows of a table of measurements, which a history need not have."""
    try:
        found = rows(history, sql)
    except HistoryError as error:
        lacks = "does not exist" in str(error)
        blind[table] = "" if lacks else str(error).splitlines()[0]
        return []
    if not found:
        blind.setdefault(table, "")
    return found


def _bucket_s(window: tuple[float, float]) -> float:
    return max(1.0, (window[1] - window[0]) // POINTS_MAX)


def _within(window: tuple[float, float]) -> str:
    return f"t_unix_s BETWEEN {window[0]!r} AND {window[1]!r}"


def _samples(node: str, window: tuple[float, float]) -> str:
    names = ", ".join(map(quoted, METRICS))
    t = f"floor(t_unix_s / {_bucket_s(window)!r}) * {_bucket_s(window)!r}"
    return (
        f"SELECT device, metric, {t} AS t, avg(value) AS value FROM samples WHERE node = {quoted(node)}"
        f" AND metric IN ({names}) AND {_within(window)} GROUP BY ALL ORDER BY metric, device, t"
    )


def _progress(job: str, window: tuple[float, float]) -> str:
    t = f"floor(t_unix_s / {_bucket_s(window)!r}) * {_bucket_s(window)!r}"
    return (
        f"SELECT rank, {t} AS t, avg(loss) FILTER (isfinite(loss)) AS loss,"
        " avg(step_s) FILTER (isfinite(step_s)) AS step_s"
        f" FROM progress WHERE job = {quoted(job)} AND {_within(window)} GROUP BY ALL ORDER BY rank, t"
    )


def _beside(job: str, window: tuple[float, float], cuts: list[int]) -> str:
    near = [f"step BETWEEN {cut - BOUNDARY_STEPS} AND {cut + BOUNDARY_STEPS - 1}" for cut in cuts] or [
        "false"
    ]
    return (
        "SELECT step, avg(loss) FILTER (isfinite(loss)) AS loss,"
        " avg(step_s) FILTER (isfinite(step_s)) AS step_s"
        f" FROM progress WHERE job = {quoted(job)} AND {_within(window)} AND ({' OR '.join(near)})"
        " GROUP BY step ORDER BY step"
    )
