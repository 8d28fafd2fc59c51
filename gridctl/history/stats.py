"""How much there is, where, and how far it is sealed."""

import msgspec

from gridagent.journal import read, segments
from gridctl.history.catalog import Catalog, CatalogError, File
from gridctl.history.compact import Place
from gridctl.history.seal import SealError, check_same
from gridctl.history.spool import spooled
from gridctl.model.policy import Kept


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table, or one tier of it. `first` and `last`: seq, or t_unix_s of telemetry."""

    table: str
    span_s: int
    rows: int
    bytes: int
    bytes_per_row: float | None
    files: int
    first: float
    last: float


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What `gridctl history stats` tells."""

    journal_dir: str
    journal_segments: int
    journal_bytes: int
    journal_seq: int  #: the newest record's; damaged ones left out
    store: str
    generation: int
    sealed_seq: int
    sealed_hash: str
    spool_dir: str
    spool_files: int
    spool_bytes: int
    rows: int
    bytes: int
    bytes_per_sample: float | None  #: of Parquet, over all tiers; None without any
    replaced_files: int  #: that are still there for readers of an older catalog
    keeps: Kept
    tables: list[Table]
    problem: str  #: what does not fit, empty if nothing


def stats(place: Place, kept: Kept) -> Stats:
    """Looks at names, sizes and the catalog; reads no Parquet. Raises `StoreError`."""
    problem = ""
    try:
        catalog = place.store.catalog()
        check_same(catalog, place.journal)
    except CatalogError as error:
        catalog, problem = Catalog(), str(error)
    except SealError as error:
        problem = str(error)
    if bad := [place.store.url(file.path) for file in catalog.files if not place.store.whole(file)]:
        problem = problem or f"{bad[0]} is missing or cut: `gridctl history compact --rebuild`"
    parts = segments(place.journal)
    last = 0
    for record in read(place.journal, catalog.sealed_seq, damaged=True):
        last = record.seq
    lines = spooled(place.spool)
    tables = _tables(catalog.files)
    samples = [table for table in tables if table.table == "samples"]
    return Stats(
        journal_dir=str(place.journal),
        journal_segments=len(parts),
        journal_bytes=sum(path.stat().st_size for path in parts),
        journal_seq=max(last, catalog.sealed_seq),
        store=place.store.where,
        generation=catalog.generation,
        sealed_seq=catalog.sealed_seq,
        sealed_hash=catalog.sealed_hash,
        spool_dir=str(place.spool),
        spool_files=len(lines),
        spool_bytes=sum(path.stat().st_size for path in lines),
        rows=sum(file.rows for file in catalog.files),
        bytes=sum(file.bytes for file in catalog.files),
        bytes_per_sample=_per_row(samples),
        replaced_files=len(catalog.replaced),
        keeps=kept,
        tables=tables,
        problem=problem,
    )


def _tables(files: tuple[File, ...]) -> list[Table]:
    groups: dict[tuple[str, int], list[File]] = {}
    for file in files:
        groups.setdefault((file.table, file.span_s), []).append(file)
    return [
        Table(
            table=table,
            span_s=span_s,
            rows=sum(file.rows for file in found),
            bytes=sum(file.bytes for file in found),
            bytes_per_row=_per_row(found),
            files=len(found),
            first=min(file.first for file in found),
            last=max(file.last for file in found),
        )
        for (table, span_s), found in sorted(groups.items())
    ]


def _per_row(found: list[File] | list[Table]) -> float | None:
    rows = sum(part.rows for part in found)
    return round(sum(part.bytes for part in found) / rows, 3) if rows else None
