"""Journal segments -> Parquet. The segments stay; what is sealed is a copy of what they say, checked byte by byte.

Every file is of one UTC day and sorted by seq. A day that goes on is written anew with what came since; row
tables, which every question reads, become one file a month once the month is over.
"""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gridagent.journal import GENESIS, JournalDamaged, sound
from gridctl.errors import GridctlError
from gridctl.history.catalog import GRACE_S, Catalog, File, Replaced
from gridctl.history.store import Store, StoreError, sha256
from gridctl.history.tables import RECORD, digest, over, parquet, quoted, rows

if TYPE_CHECKING:
    import duckdb

RECORDS = "records"
#: So much of the journal is sealed at a time; a killed compactor loses no more than that work.
BATCH_BYTES = 64 << 20
#: A record does not say what its line said, or the line was written by something else.
_UNLIKE = "record {seq}: Parquet would not give its line back byte by byte; it was not sealed"


class SealError(GridctlError):
    """The journal cannot be sealed any further; what was sealed before stays."""


class _Raw(msgspec.Struct, frozen=True, kw_only=True):
    """A record whose data is left as it stands in its line."""

    seq: int
    t_unix_s: float
    kind: str
    actor: str
    data: msgspec.Raw
    prev: str


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """A record with its data as a string, as a database takes it in unchanged."""

    seq: int
    t_unix_s: float
    kind: str
    actor: str
    data: str
    prev: str
    hash: str


_decode = msgspec.json.Decoder(_Raw).decode
_encode = msgspec.json.Encoder(order="deterministic").encode


def line_of(seq: int, t_unix_s: float, kind: str, actor: str, data: str, prev: str) -> tuple[bytes, str]:
    """The line of a record as the journal has it, and its hash."""
    raw = msgspec.Raw(data.encode())
    body = _encode(_Raw(seq=seq, t_unix_s=t_unix_s, kind=kind, actor=actor, data=raw, prev=prev))
    digest = hashlib.sha256(body).hexdigest()
    return b'%s,"hash":"%s"}\n' % (body[:-1], digest.encode()), digest


class Sealer:
    """Seals into a store, within its `writing()`. `database`: of this thread alone."""

    def __init__(self, store: Store, making: Path, database: "duckdb.DuckDBPyConnection") -> None:
        self._store = store
        self._making = making
        self._database = database
        self._made = 0

    def seal(self, catalog: Catalog, journal: Path) -> Catalog:
        """Seals all whole records above what is sealed. Raises `SealError`, `StoreError`."""
        catalog = self._remake(catalog)
        batch: list[_Line] = []
        size, error = 0, ""
        try:
            for record, line in sound(journal, catalog.sealed_seq, catalog.sealed_hash):
                batch.append(_taken(record.hash, line))
                size += len(line)
                if size > BATCH_BYTES:
                    catalog = self._add(catalog, batch)
                    batch, size = [], 0
        except JournalDamaged as damage:
            error = str(damage)
        if batch:
            catalog = self._add(catalog, batch)
        if error:
            raise SealError(f"sealed up to record {catalog.sealed_seq}, no further: {error}")
        return self._by_month(catalog)

    def _add(self, catalog: Catalog, batch: list[_Line]) -> Catalog:
        """Seals records that follow each other, and commits."""
        lines = self._making / "records.jsonl"
        with lines.open("wb") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in batch)
        columns = ", ".join(f"{name}: {quoted(kind)}" for name, kind in (RECORD | {"data": "VARCHAR"}).items())
        self._database.execute(
            "CREATE OR REPLACE TEMP TABLE fresh AS SELECT * REPLACE (data::JSON AS data) FROM read_json("
            f"{quoted(str(lines))}, format = 'newline_delimited', maximum_object_size = {256 << 20}, "
            f"columns = {{{columns}}})"
        )
        self._check(catalog.sealed_seq, catalog.sealed_hash, batch[-1])
        days: dict[str, list[int]] = {}
        for line in batch:
            days.setdefault(day_of(line.t_unix_s), []).append(line.seq)
        new, old = [], []
        for day, seqs in days.items():
            # A clock that jumped may have put the records of a day apart.
            source = f"fresh WHERE seq BETWEEN {seqs[0]} AND {seqs[-1]}"
            if len(seqs) != seqs[-1] - seqs[0] + 1:
                source = f"fresh WHERE seq IN ({', '.join(map(str, seqs))})"
            for table, select in {RECORDS: f"FROM {source}", **_selects(source)}.items():
                before = [file for file in catalog.of(table) if file.period == day]
                files = [self._store.url(file.path) for file in before]
                whole = f"FROM {parquet(files)} UNION ALL BY NAME ({select})" if files else select
                new += self.write(table, day, whole, "seq")
                old += before
        made_by = {name: digest(name) for name in rows()}
        sealed = msgspec.structs.replace(
            catalog, sealed_seq=batch[-1].seq, sealed_hash=batch[-1].hash, made_by=made_by
        )
        return self.commit(sealed, new, old)

    def _check(self, seq: int, head: str, last: _Line) -> None:
        """Raises `SealError` unless the table `fresh` continues the chain byte by byte up to `last`."""
        for record in self._each(f"SELECT {', '.join(RECORD)} FROM fresh ORDER BY seq"):
            seq += 1
            if record[0] != seq or record[5] != head or line_of(*record[:6])[1] != record[6]:
                raise SealError(_UNLIKE.format(seq=seq))
            head = record[6]
        if (seq, head) != (last.seq, last.hash):
            raise SealError(_UNLIKE.format(seq=seq + 1))

    def _each(self, select: str) -> Iterator[tuple[int, float, str, str, str, str, str]]:
        found = self._database.execute(select)
        while part := found.fetchmany(1000):
            yield from part

    def _remake(self, catalog: Catalog) -> Catalog:
        """Row tables that another SELECT has made, or none yet, are made from the sealed records."""
        stale = [name for name in rows() if catalog.made_by.get(name) != digest(name)]
        gone = catalog.made_by.keys() - rows().keys()
        if not catalog.of(RECORDS) or not (stale or gone):
            return catalog
        new: list[File] = []
        for file in catalog.of(RECORDS):
            source = parquet([self._store.url(file.path)])
            for name in stale:
                new += self.write(name, file.period, over(source, rows()[name]), "seq")
        old = [file for name in (*stale, *gone) for file in catalog.of(name)]
        made_by = {name: digest(name) for name in rows()}
        return self.commit(msgspec.structs.replace(catalog, made_by=made_by), new, old)

    def _by_month(self, catalog: Catalog) -> Catalog:
        """One file for each row table and month that is over."""
        this_month = day_of(time.time())[:7]
        new: list[File] = []
        old: list[File] = []
        for name in rows():
            months: dict[str, list[File]] = {}
            for file in catalog.of(name):
                months.setdefault(file.period[:7], []).append(file)
            for month, files in months.items():
                if month < this_month and len(files) > 1:
                    urls = [self._store.url(file.path) for file in files]
                    new += self.write(name, month, f"FROM {parquet(urls)}", "seq")
                    old += files
        return self.commit(catalog, new, old) if old else catalog

    def write(self, table: str, period: str, select: str, order: str, span_s: int = 0) -> list[File]:
        """One new file with all rows of `select`; none where it has no rows. `order`: what it is sorted by."""
        self._made += 1
        made = self._making / f"{self._made}.parquet"
        key = "seq" if order == "seq" else "t_unix_s"
        self._database.execute(
            f"COPY (SELECT * FROM ({select}) ORDER BY {order}) TO {quoted(str(made))} "
            "(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE 61440)"
        )
        found = self._database.execute(
            f"SELECT count(*), min({key}), max({key}) FROM {parquet([str(made)])}"
        ).fetchone()
        assert found is not None
        if not found[0]:
            made.unlink()
            return []
        digest_ = sha256(made)
        # Named by content: a file that was begun, left behind and made again is the same one.
        path = f"{table}/{period}{f'-{span_s}s' if span_s else ''}-{digest_[:16]}.parquet"
        size = made.stat().st_size
        self._store.put(path, made)
        return [
            File(
                table=table, path=path, period=period, rows=found[0], bytes=size, sha256=digest_,
                first=found[1], last=found[2], span_s=span_s,
            )
        ]  # fmt: skip

    def commit(self, catalog: Catalog, new: list[File], old: list[File]) -> Catalog:
        """The catalog with `new` in the place of `old` is what readers see from now on."""
        kept = {file.path for file in new}
        replaced = tuple(file for file in catalog.replaced if file.path not in kept)
        catalog = msgspec.structs.replace(catalog, replaced=replaced)
        made = catalog.with_files(new, [file for file in old if file.path not in kept], time.time())
        self._store.replace(made)
        return made

    def tidy(self, catalog: Catalog, grace_s: float = GRACE_S) -> Catalog:
        """Deletes what was replaced long enough ago, and what a killed writer has put and named nowhere."""
        named = {file.path for file in catalog.files}
        waiting = {file.path for file in catalog.replaced}
        due = [file for file in catalog.replaced if file.t_unix_s + grace_s < time.time()]
        stray = [path for path in self._store.paths() if path not in named | waiting]
        for path in (*(file.path for file in due), *stray):
            self._store.delete(path)
        if not due:
            return catalog
        left: tuple[Replaced, ...] = tuple(file for file in catalog.replaced if file not in due)
        catalog = msgspec.structs.replace(catalog, generation=catalog.generation + 1, replaced=left)
        self._store.replace(catalog)
        return catalog


def forgotten(catalog: Catalog) -> Catalog:
    """The catalog without anything of the journal: the next `seal` makes all of it anew."""
    kept = [file for file in catalog.files if file.table in ("samples", "progress")]
    old = [file for file in catalog.files if file not in kept]
    empty = msgspec.structs.replace(catalog, sealed_seq=0, sealed_hash=GENESIS, made_by={})
    return empty.with_files((), old, time.time())


def _selects(source: str) -> dict[str, str]:
    return {name: over(source, select) for name, select in rows().items()}


def _taken(hash_: str, line: bytes) -> _Line:
    raw = _decode(line)
    return _Line(
        seq=raw.seq,
        t_unix_s=raw.t_unix_s,
        kind=raw.kind,
        actor=raw.actor,
        data=bytes(raw.data).decode(),
        prev=raw.prev,
        hash=hash_,
    )


def day_of(t_unix_s: float) -> str:
    """The UTC day of a moment."""
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(t_unix_s))
    except (ValueError, OverflowError, OSError):  # a clock of another age
        return "1970-01-01"
