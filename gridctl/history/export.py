"""The whole history as one .duckdb file that older and other tools open, and back."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gridagent.journal import GENESIS, SEGMENT_BYTES, segments, verify
from gridctl.errors import GridctlError
from gridctl.history.compact import Place, compact, working
from gridctl.history.reader import History
from gridctl.history.seal import RECORDS, day_of, line_of
from gridctl.history.tables import PROGRESS, RECORD, SAMPLE, quoted, rows, views
from gridctl.history.telemetry import ORDERS
from gridctl.model.policy import Kept

if TYPE_CHECKING:
    import duckdb

#: DuckDB 1.2 and everything newer read it.
STORAGE = "v1.2.0"


class ExportError(GridctlError):
    """A file cannot be written, or is no export of a history."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What went over. `head`: hash of the last record."""

    file: str
    bytes: int
    records: int
    samples: int
    head: str


def export(place: Place, target: Path) -> Exported:
    """Writes `target`: every table, sorted, and the views over them. Raises `ExportError`, `HistoryError`."""
    import duckdb

    if target.exists():
        raise ExportError(f"{target} is there already: choose another name")
    made = target.with_name(f"{target.name}.part")
    made.unlink(missing_ok=True)
    try:
        database = History(place.journal, place.store, place.spool).unlocked()
        try:
            database.execute(f"ATTACH {quoted(str(made))} AS export (STORAGE_VERSION '{STORAGE}')")
            for table in (RECORDS, *(f"row_{name}" for name in rows()), *ORDERS):
                order = ORDERS.get(table, "seq")
                database.execute(f"CREATE TABLE export.{table} AS FROM memory.main.{table} ORDER BY {order}")
            database.execute("USE export")
            database.execute(views())
            records, head = _one(
                database, f"SELECT count(*), coalesce(arg_max(hash, seq), '{GENESIS}') FROM records"
            )
            (samples,) = _one(database, "SELECT count(*) FROM samples")
            database.execute("USE memory; DETACH export")
        finally:
            database.close()
        os.replace(made, target)
    except duckdb.Error as error:
        made.unlink(missing_ok=True)
        raise ExportError(f"{target}: {error}") from None
    except OSError as error:
        raise ExportError(f"{target}: {error.strerror}") from None
    return Exported(
        file=str(target), bytes=target.stat().st_size, records=records, samples=samples, head=head
    )


def take_in(place: Place, kept: Kept, source: Path) -> Exported:
    """Writes the journal of an export byte by byte, checks its chain, and seals it with the telemetry.

    Raises `ExportError` where the home has a history, or the file is no export; the home is then as it was.
    """
    import duckdb

    if segments(place.journal) or place.store.catalog().files:
        raise ExportError(f"{place.journal.parent} has a history already: import into another GRIDCTL_HOME")
    try:
        database = duckdb.connect(":memory:")
        database.execute(f"ATTACH {quoted(str(source))} AS export (READ_ONLY)")
        database.execute("SET enable_external_access = false")
        head = _write_journal(place.journal, database)
        (records,) = _one(database, "SELECT count(*) FROM export.records")
        (samples,) = _one(database, "SELECT count(*) FROM export.samples")
        database.close()
        _write_telemetry(place, source)
        compact(place, kept)
    except duckdb.Error as error:
        raise ExportError(f"{source} is no export of a history: {error}") from None
    return Exported(
        file=str(source), bytes=source.stat().st_size, records=records, samples=samples, head=head
    )


def _write_journal(journal: Path, database: "duckdb.DuckDBPyConnection") -> str:
    """The hash of the last record. Raises `ExportError` where the chain does not hold."""
    made = journal.with_name(f"{journal.name}.part")
    made.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in segments(made):
        path.unlink()
    for number, content in enumerate(_contents(database), start=1):
        path = made / f"{number:08d}.jsonl"
        path.write_bytes(content)
        path.chmod(0o600)
    checked = verify(made)
    if not checked.ok:
        raise ExportError(f"record {checked.first_bad} of the export: {checked.what}; nothing was taken over")
    if journal.exists():
        (journal / "writer.lock").unlink(missing_ok=True)
        journal.rmdir()
    made.rename(journal)
    return checked.head


def _contents(database: "duckdb.DuckDBPyConnection") -> Iterator[bytes]:
    """The segments of the journal. Raises `ExportError` at a record whose hash is another one."""
    found = database.execute(f"SELECT {', '.join(RECORD)} FROM export.records ORDER BY seq")
    content = bytearray()
    while part := found.fetchmany(1000):
        for record in part:
            line, hash_ = line_of(*record[:6])
            if hash_ != record[6]:
                raise ExportError(f"record {record[0]} of the export was changed; nothing was taken over")
            if content and len(content) + len(line) > SEGMENT_BYTES:
                yield bytes(content)
                content.clear()
            content += line
    yield bytes(content)


def _write_telemetry(place: Place, source: Path) -> None:
    """Each table, day and tier as a file of the store."""
    with working(place) as (sealer, _, database):
        database.execute(f"ATTACH {quoted(str(source))} AS export (READ_ONLY)")
        new = []
        for table, columns in (("samples", SAMPLE), ("progress", PROGRESS)):
            span = "span_s" if table == "samples" else "1"
            day = "floor(t_unix_s / 86400)::BIGINT"
            found = database.execute(f"SELECT DISTINCT {day}, {span} FROM export.{table} ORDER BY ALL")
            for number, span_s in found.fetchall():
                its = f"SELECT {', '.join(columns)} FROM export.{table} WHERE {day} = {number}"
                period = day_of(number * 86400.0)
                new += sealer.write(table, period, f"{its} AND {span} = {span_s}", ORDERS[table], span_s)
        sealer.commit(new, [])


def _one(database: "duckdb.DuckDBPyConnection", select: str) -> tuple[Any, ...]:
    found = database.execute(select).fetchone()
    assert found is not None
    return tuple(found)
