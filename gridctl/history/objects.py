"""The store in object storage: the same layout as a folder's. `pip install gridctl[objects]`.

obstore speaks to S3, GCS and Azure and takes credentials from the environment as their own tools do. The
catalog is replaced only as long as it is the one that was read (a conditional put), so two that compact never
lose each other's work: the second one is told, and begins anew the next time.
"""

import contextlib
import hashlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridctl.history.catalog import NAME, Catalog, File, parse, text
from gridctl.history.store import StoreError

if TYPE_CHECKING:
    import duckdb

#: What lies there without a name for so long was left behind: no compaction takes as long.
STRAY_S = 86_400.0


class ObjectStore:
    """A bucket's folder, by its URL. Raises `StoreError` where it cannot be spoken to."""

    guarded = True

    def __init__(self, where: str) -> None:
        try:
            from obstore.store import from_url
        except ImportError:
            raise StoreError(f"{where}: object storage needs `pip install gridctl[objects]`") from None
        self.where = where.rstrip("/")
        self._e_tag = ""  #: of the catalog that was read last; empty where there is none
        with self._speaking(""):
            self._store = from_url(self.where)

    def catalog(self) -> Catalog:
        """See `Store`."""
        import obstore

        with self._speaking(NAME):
            try:
                found = obstore.get(self._store, NAME)
                content = bytes(found.bytes())
            except FileNotFoundError:
                self._e_tag = ""
                return Catalog()
            self._e_tag = found.meta["e_tag"] or ""
        return parse(content, self.url(NAME))

    def stamp(self) -> object:
        """See `Store`."""
        import obstore

        with self._speaking(NAME):
            try:
                return obstore.head(self._store, NAME)["e_tag"]
            except FileNotFoundError:
                return None

    def replace(self, catalog: Catalog) -> None:
        """See `Store`."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: Any = {"e_tag": self._e_tag} if self._e_tag else "create"
        with self._speaking(NAME):
            try:
                self._e_tag = obstore.put(self._store, NAME, text(catalog), mode=mode)["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError):
                raise StoreError(f"another process compacts {self.where}: it was first") from None

    def put(self, path: str, source: Path) -> None:
        """See `Store`."""
        import obstore

        with self._speaking(path):
            obstore.put(self._store, path, source)
        source.unlink()

    def delete(self, path: str) -> None:
        """See `Store`."""
        import obstore

        with self._speaking(path), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, path)

    def paths(self) -> list[str]:
        """See `Store`: without new ones, which another writer may be about to name."""
        import obstore

        with self._speaking(""):
            found = [its for part in obstore.list(self._store) for its in part]
        before = time.time() - STRAY_S
        return [
            its["path"]
            for its in found
            if its["path"].endswith(".parquet") and its["last_modified"].timestamp() < before
        ]

    def url(self, path: str) -> str:
        """See `Store`."""
        return f"{self.where}/{path}"

    def whole(self, file: File) -> bool:
        """See `Store`: an object is put as a whole or not at all, and asking for each would take long."""
        return True

    def sound(self, file: File) -> bool:
        """See `Store`."""
        import obstore

        digest = hashlib.sha256()
        with self._speaking(file.path):
            try:
                for part in obstore.get(self._store, file.path).stream():
                    digest.update(part)
            except FileNotFoundError:
                return False
        return digest.hexdigest() == file.sha256

    def attach(self, database: "duckdb.DuckDBPyConnection") -> None:
        """See `Store`: DuckDB's own way, httpfs, would have to be downloaded."""
        from obstore.fsspec import FsspecStore

        database.register_filesystem(FsspecStore(self.where.partition("://")[0]))

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """See `Store`: who is second is told when it replaces the catalog."""
        with tempfile.TemporaryDirectory(prefix="gridctl-") as folder:
            yield Path(folder)

    @contextlib.contextmanager
    def _speaking(self, path: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            told = str(error).splitlines()[0][:300]
            raise StoreError(f"{self.url(path)}: {told}; the journal has everything all the same") from None
