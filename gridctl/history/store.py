"""Where the Parquet files and their catalog lie: a folder, or object storage in the same layout."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gridctl.errors import GridctlError
from gridctl.history.catalog import NAME, Catalog, File, parse, text

if TYPE_CHECKING:
    import duckdb


#: So much of a disk, or a tenth of a small one, history leaves to the journal.
FREE_BYTES = 256 << 20


class StoreError(GridctlError):
    """The store cannot be read or written. The message names the file."""


class Store(Protocol):
    """A place for files. Only one process at a time writes: within `writing()`."""

    where: str  #: for people
    guarded: bool  #: does it guard by itself against content that changes?

    def catalog(self) -> Catalog:
        """An empty one where nothing was sealed yet. Raises `CatalogError`, `StoreError`."""

    def stamp(self) -> object:
        """Another value whenever the catalog is another one."""

    def replace(self, catalog: Catalog) -> None:
        """Puts a catalog in the place of the last one. Raises `StoreError` where somebody else has."""

    def put(self, path: str, source: Path) -> None:
        """Takes a finished file over. Raises `StoreError`."""

    def delete(self, path: str) -> None:
        """No error where it is gone."""

    def paths(self) -> list[str]:
        """Every Parquet file below the store, named by a catalog or not."""

    def url(self, path: str) -> str:
        """What DuckDB reads it by; of all of the store for an empty path."""

    def whole(self, file: File) -> bool:
        """Is it there, as long as it was? A quick look."""

    def sound(self, file: File) -> bool:
        """Is it what was written? All of it is read."""

    def attach(self, database: "duckdb.DuckDBPyConnection") -> None:
        """Lets a database read this store's files, also once it may read nothing else."""

    def writing(self) -> contextlib.AbstractContextManager[Path]:
        """A local folder for files in the making. Raises `StoreError` where another writer is at work."""


class LocalStore:
    """A folder. Everything in it is readable by its owner only."""

    guarded = False

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.where = str(self.root)

    def catalog(self) -> Catalog:
        """See `Store`."""
        path = self.root / NAME
        try:
            return parse(path.read_bytes(), str(path))
        except (FileNotFoundError, NotADirectoryError):
            return Catalog()
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror}") from None

    def stamp(self) -> object:
        """See `Store`."""
        try:
            stat = (self.root / NAME).stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def replace(self, catalog: Catalog) -> None:
        """See `Store`."""
        made = self.root / "making" / NAME
        try:
            made.write_bytes(text(catalog))
            _flush(made)
            os.replace(made, self.root / NAME)
            _flush(self.root)
        except OSError as error:
            raise _unwritable(self.root / NAME, error) from None

    def put(self, path: str, source: Path) -> None:
        """See `Store`."""
        target = self.root / path
        try:
            check_room(self.root)
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            source.chmod(0o600)
            _flush(source)
            os.replace(source, target)
            _flush(target.parent)
        except OSError as error:
            raise _unwritable(target, error) from None

    def delete(self, path: str) -> None:
        """See `Store`."""
        with contextlib.suppress(FileNotFoundError):
            (self.root / path).unlink()

    def paths(self) -> list[str]:
        """See `Store`."""
        return [str(path.relative_to(self.root)) for path in self.root.glob("[a-z]*/*.parquet")]

    def url(self, path: str) -> str:
        """See `Store`."""
        return f"{self.root}/{path}"

    def whole(self, file: File) -> bool:
        """See `Store`."""
        try:
            return (self.root / file.path).stat().st_size == file.bytes
        except OSError:
            return False

    def sound(self, file: File) -> bool:
        """See `Store`."""
        try:
            return sha256(self.root / file.path) == file.sha256
        except OSError:
            return False

    def attach(self, database: "duckdb.DuckDBPyConnection") -> None:
        """See `Store`."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """See `Store`."""
        making = self.root / "making"
        try:
            making.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_room(self.root)
            lock = os.open(self.root / "writer.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unwritable(self.root, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(making)  # what a killed writer left behind
            making.mkdir(mode=0o700)
            yield making
        except BlockingIOError:
            raise StoreError(f"another process compacts {self.root}: wait for it") from None
        finally:
            os.close(lock)


def store_at(where: str) -> Store:
    """The store in a folder, or at the URL of object storage. Raises `StoreError`."""
    if "://" in where:
        from gridctl.history.objects import ObjectStore

        return ObjectStore(where)
    return LocalStore(Path(where).expanduser())


def check_room(folder: Path) -> None:
    """Raises `OSError` where the disk has no more than what the journal beside it may need."""
    stat = os.statvfs(folder)
    if stat.f_bavail * stat.f_frsize < min(FREE_BYTES, stat.f_blocks * stat.f_frsize // 10):
        raise OSError(errno.ENOSPC, "what is left of the disk is kept free for the journal")


def sha256(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unwritable(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be written: {error.strerror}; the journal has everything all the same")
