"""The catalog of a store: which files there are and how far the journal is sealed.

The one writer replaces it as a whole; a reader reads it, then the files that it names. A file is never
written twice and never changed. One that was replaced stays for a while, for those who have read an older
catalog.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from gridagent.journal import GENESIS
from gridctl.errors import GridctlError

VERSION = 2
NAME = "catalog.json"
#: So long a replaced file stays: no question takes longer.
GRACE_S = 900.0


class CatalogError(GridctlError):
    """The catalog cannot be read."""


class NewerCatalog(CatalogError):
    """Only a newer gridctl reads it."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One Parquet file. `first` and `last`: seq of a table of the journal, else t_unix_s."""

    table: str  #: records, a row table, samples or progress
    path: str  #: below the store
    period: str  #: what it is of, in UTC: a day, 2026-03-01, or a month, 2026-03
    rows: int
    bytes: int
    sha256: str
    first: float
    last: float
    span_s: int = 0  #: how long a time one row of telemetry is of


class Replaced(msgspec.Struct, frozen=True, kw_only=True):
    """A file that no catalog names any more since `t_unix_s`."""

    path: str
    t_unix_s: float


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """What a store holds. Records up to `sealed_seq`, whose hash is `sealed_hash`, are in Parquet."""

    version: int = VERSION
    generation: int = 0
    sealed_seq: int = 0
    sealed_hash: str = GENESIS
    spooled: int = 0  #: spool files up to this number are in Parquet
    made_by: dict[str, str] = {}  #: row table -> digest of the SELECT that made its files
    files: tuple[File, ...] = ()
    replaced: tuple[Replaced, ...] = ()

    def of(self, table: str) -> list[File]:
        """The files of a table, in order."""
        return sorted((file for file in self.files if file.table == table), key=lambda file: file.first)

    def with_files(self, new: Iterable[File], old: Iterable[File], now_unix_s: float) -> "Catalog":
        """The next catalog: `new` in the place of `old`."""
        new = tuple(new)
        # Paths name their content: what was made again with the same rows is the same file.
        made = {file.path for file in new}
        gone = {file.path for file in old} - made
        return msgspec.structs.replace(
            self,
            generation=self.generation + 1,
            files=(*(f for f in self.files if f.path not in gone | made), *new),
            replaced=(
                *(r for r in self.replaced if r.path not in made),
                *(Replaced(path=path, t_unix_s=now_unix_s) for path in sorted(gone)),
            ),
        )


def parse(content: bytes, where: str) -> Catalog:
    """Raises `CatalogError`."""
    try:
        found = msgspec.json.decode(content)
        version = found["version"]
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"version {version!r}")
        if version > VERSION:
            raise NewerCatalog(
                f"{where} has version {version}, this gridctl reads up to {VERSION}: use a newer gridctl"
            )
        while version < VERSION:
            found = _MIGRATIONS[version](found)
            version += 1
        return msgspec.convert(found, Catalog)
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, UnicodeDecodeError) as error:
        raise CatalogError(
            f"{where} is damaged ({error}); `gridctl history compact --rebuild` makes it anew"
        ) from None


def text(catalog: Catalog) -> bytes:
    """The catalog as it is stored."""
    return msgspec.json.encode(catalog)


def _from_1(found: dict[str, Any]) -> dict[str, Any]:
    """Version 1 named a file's time `day` and knew no months."""
    files = [{**file, "period": file["day"]} for file in found.get("files", [])]
    return {**found, "version": 2, "files": files}


_MIGRATIONS = {1: _from_1}
