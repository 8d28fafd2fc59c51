"""Journal segments -> Parquet. The segments stay; what is sealed is a copy, checked byte by byte.

Every file is of one UTC day and sorted by seq. A day that goes on is written anew with what came since; row
tables, which every question reads, become one file a month once the month is over.
"""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gridagent.journal import GENESIS, JournalDamaged, read, sound, verify
from gridctl.errors import GridctlError
from gridctl.history.catalog import GRACE_S, Catalog, File
from gridctl.history.store import Store, sha256
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
        self.catalog = Catalog()  #: what the next commit builds on

    def seal(self, journal: Path) -> None:
        """Seals all whole records above what is sealed. Raises `SealError`, `StoreError`."""
        check_same(self.catalog, journal)
        self._remake()
        batch: list[_Line] = []
        size, error = 0, ""
        try:
            for record, line in sound(journal, self.catalog.sealed_seq, self.catalog.sealed_hash):
                batch.append(_taken(record.hash, line))
                size += len(line)
                if size > BATCH_BYTES:
                    self._add(batch)
                    batch, size = [], 0
        except JournalDamaged as damage:
            error = str(damage)
        if batch:
            self._add(batch)
        self._by_month()
        if error:
            raise SealError(f"sealed up to record {self.catalog.sealed_seq}, no further: {error}")

    def _add(self, batch: list[_Line]) -> None:
        """Seals records that follow each other, and commits."""
        catalog = self.catalog
        lines = self._making / "records.jsonl"
        with lines.open("wb") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in batch)
        columns = ", ".join(
            f"{name}: {quoted(kind)}" for name, kind in (RECORD | {"data": "VARCHAR"}).items()
        )
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
        last = batch[-1]
        self.commit(new, old, sealed_seq=last.seq, sealed_hash=last.hash, made_by=made_by)

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

    def _remake(self) -> None:
        """Row tables that another SELECT has made, or none yet, are made from the sealed records."""
        catalog = self.catalog
        stale = [name for name in rows() if catalog.made_by.get(name) != digest(name)]
        gone = catalog.made_by.keys() - rows().keys()
        if not catalog.of(RECORDS) or not (stale or gone):
            return
        new: list[File] = []
        for period, files in _periods(catalog.of(RECORDS)).items():
            source = parquet([self._store.url(file.path) for file in files])
            for name in stale:
                new += self.write(name, period, over(source, rows()[name]), "seq")
        old = [file for name in (*stale, *gone) for file in catalog.of(name)]
        self.commit(new, old, made_by={name: digest(name) for name in rows()})

    def _by_month(self) -> None:
        """One file for each row table and month that is over."""
        new: list[File] = []
        old: list[File] = []
        for name in rows():
            for period, files in _periods(self.catalog.of(name)).items():
                if len(files) > 1:
                    urls = [self._store.url(file.path) for file in files]
                    new += self.write(name, period, f"FROM {parquet(urls)}", "seq")
                    old += files
        if old:
            self.commit(new, old)

    def write(self, table: str, period: str, select: str, order: str, span_s: int = 0) -> list[File]:
        """One new file with all rows of `select`, sorted by `order`; none where it has no rows."""
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

    def commit(self, new: list[File], old: list[File], **changes: Any) -> None:
        """What readers see from now on: `new` in the place of `old`, and these `changes`."""
        catalog = msgspec.structs.replace(self.catalog, **changes).with_files(new, old, time.time())
        self._store.replace(catalog)
        self.catalog = catalog

    def forget(self, more: list[File]) -> None:
        """Drops what is sealed of the journal, and `more`: readers go to the journal, `seal` begins anew."""
        old = [file for file in self.catalog.files if file.table not in ("samples", "progress")]
        self.commit([], old + more, sealed_seq=0, sealed_hash=GENESIS, made_by={})

    def tidy(self, grace_s: float = GRACE_S) -> None:
        """Deletes what was replaced long enough ago, and what a killed writer has put and named nowhere."""
        catalog = self.catalog
        known = {file.path for file in catalog.files} | {gone.path for gone in catalog.replaced}
        due = [gone for gone in catalog.replaced if gone.t_unix_s + grace_s < time.time()]
        stray = [path for path in self._store.paths() if path not in known]
        paths = [gone.path for gone in due]
        for path in paths + stray:
            self._store.delete(path)
        if due:
            self.commit([], [], replaced=tuple(gone for gone in catalog.replaced if gone not in due))


def check_same(catalog: Catalog, journal: Path, *, whole: bool = False) -> None:
    """Raises `SealError` unless the journal has the record up to which it was sealed, and all, if `whole`."""
    if not catalog.sealed_seq:
        return
    if whole:
        found = verify(journal)
        if found.records < catalog.sealed_seq:
            raise SealError(
                f"the journal {journal} has {found.records} sound records, {catalog.sealed_seq} are sealed:"
                " what is sealed is the only copy of the others and stays"
                f" ({found.what or 'the end is missing'})"
            )
    last = next(read(journal, catalog.sealed_seq - 1, damaged=True), None)
    if last is None or last.seq != catalog.sealed_seq:
        raise SealError(
            f"the journal {journal} has not got record {catalog.sealed_seq} any more, up to which it was"
            " sealed: records were taken away; `gridctl journal verify` looks at what is left"
        )
    if last.hash != catalog.sealed_hash:
        raise SealError(
            f"record {catalog.sealed_seq} of the journal {journal} is another one than was sealed: somebody"
            " changed it, or it is another journal; move the store away to begin a new one"
        )


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


def _periods(files: list[File]) -> dict[str, list[File]]:
    """By month where the month is over, else as they are."""
    this_month = day_of(time.time())[:7]
    found: dict[str, list[File]] = {}
    for file in files:
        month = file.period[:7]
        found.setdefault(month if month < this_month else file.period, []).append(file)
    return found


def day_of(t_unix_s: float) -> str:
    """The UTC day of a moment."""
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(t_unix_s))
    except (ValueError, OverflowError, OSError):  # a clock of another age
        return "1970-01-01"
