"""What keeps a store: sealing the journal, taking telemetry in, thinning it, deleting what was replaced."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gridctl.history.catalog import GRACE_S, Catalog, CatalogError, File, NewerCatalog
from gridctl.history.seal import Sealer, SealError, check_same
from gridctl.history.store import Store, StoreError, store_at
from gridctl.history.tables import about_files, quoted
from gridctl.history.telemetry import ORDERS, Telemetry, due
from gridctl.home import Home
from gridctl.model.policy import Kept

if TYPE_CHECKING:
    import duckdb


@dataclass(frozen=True)
class Place:
    """What belongs to one home: the journal, the spool, and the store that both go into."""

    journal: Path
    spool: Path
    store: Store

    @classmethod
    def of(cls, home: Home, kept: Kept) -> "Place":
        """A home's, with the store that its policy names. Raises `StoreError` for one that cannot be."""
        return cls(home.journal, home.spool, store_at(kept.store or str(home.history)))


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """What a compaction found and left behind."""

    records: int  #: sealed now for the first time
    sealed_seq: int
    samples: int  #: rows of telemetry that were taken in
    files: int
    bytes: int
    problem: str = ""  #: why the journal could be sealed only so far
    damaged: tuple[str, ...] = ()  #: files that were not what was written; made anew where that can be


def compact(place: Place, kept: Kept, *, rebuild: bool = False) -> Compacted:
    """Does all that is due. `rebuild`: all of the journal is made anew, and what is damaged is left out.

    Raises `StoreError` where another one compacts or nothing can be written, `SealError` where a rebuild
    would lose something, `CatalogError` for one that cannot be read; what was there before stays.
    """
    import duckdb

    with working(place) as (sealer, telemetry, _):
        sealer.catalog = before = _catalog(place.store, rebuild)
        damaged = _start_anew(place, sealer) if rebuild or _rotten(place.store, before) else []
        telemetry.clear(place.spool, time.time() - GRACE_S)
        try:
            problem = _seal(sealer, place.journal)
        except duckdb.Error as error:
            if not about_files(error) or not (found := _start_anew(place, sealer)):
                raise
            damaged += found
            problem = _seal(sealer, place.journal)
        rows = _telemetry_rows(sealer.catalog)
        telemetry.take_in(place.spool)
        taken = _telemetry_rows(sealer.catalog) - rows
        telemetry.thin(kept, time.time())
        sealer.tidy()
    catalog = sealer.catalog
    return Compacted(
        records=max(0, catalog.sealed_seq - before.sealed_seq),
        sealed_seq=catalog.sealed_seq,
        samples=taken,
        files=len(catalog.files),
        bytes=sum(file.bytes for file in catalog.files),
        problem=problem,
        damaged=tuple(place.store.url(file.path) for file in damaged),
    )


def retain(place: Place, kept: Kept) -> list[tuple[File, int]]:
    """Puts telemetry into the tiers of its age; returns what was not in its tier. Raises like `compact`."""
    with working(place) as (sealer, telemetry, _):
        sealer.catalog = place.store.catalog()
        found = due(sealer.catalog, kept, time.time())
        telemetry.thin(kept, time.time())
        sealer.tidy()
    return found


@contextmanager
def working(place: Place) -> "Iterator[tuple[Sealer, Telemetry, duckdb.DuckDBPyConnection]]":
    """A place as its one writer, with the database that both parts work through. Raises `StoreError`."""
    import duckdb

    with place.store.writing() as making:
        database = duckdb.connect(":memory:")
        try:
            database.execute(f"SET temp_directory = {quoted(str(making / 'temp'))}; SET memory_limit = '1GB'")
            place.store.attach(database)
            sealer = Sealer(place.store, making, database)
            yield sealer, Telemetry(place.store, sealer, database), database
        except duckdb.Error as error:
            raise StoreError(f"{place.store.where}: {error}") from None
        except OSError as error:
            raise StoreError(f"{place.store.where}: {error.strerror}: {error.filename}") from None
        finally:
            database.close()


def _seal(sealer: Sealer, journal: Path) -> str:
    """What is wrong with the journal behind what could be sealed."""
    try:
        sealer.seal(journal)
    except SealError as error:
        return str(error)
    return ""


def _catalog(store: Store, rebuild: bool) -> Catalog:
    try:
        return store.catalog()
    except CatalogError as error:
        if not rebuild or isinstance(error, NewerCatalog):
            raise
        return Catalog()


def _rotten(store: Store, catalog: Catalog) -> bool:
    """Is a file of the journal's not what was written? Parquet itself does not notice every changed bit.

    They are small; telemetry is not, and has no second copy.
    """
    mine = (file for file in catalog.files if file.table not in ORDERS)
    return not store.guarded and not all(store.sound(file) for file in mine)


def _start_anew(place: Place, sealer: Sealer) -> list[File]:
    """Forgets what is sealed of the journal, and damaged telemetry; returns every damaged file."""
    check_same(sealer.catalog, place.journal, whole=True)
    damaged = [file for file in sealer.catalog.files if not place.store.sound(file)]
    sealer.forget([file for file in damaged if file.table in ORDERS])
    return damaged


def _telemetry_rows(catalog: Catalog) -> int:
    return sum(file.rows for file in catalog.files if file.table in ORDERS)
