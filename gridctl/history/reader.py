"""Questions about what was, in SQL, over the journal and what the nodes' streams told.

Sealed files and the journal's newest records are read as they are, without a lock, by any number of readers
beside the writers. A line that is torn or damaged is left out here; `gridctl journal verify` speaks of it.
Queries can only read, and see nothing but the tables and views that `views.sql` describes.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridagent.journal import segments
from gridctl.errors import GridctlError
from gridctl.history.catalog import Catalog, CatalogError, File
from gridctl.history.seal import RECORDS
from gridctl.history.spool import spooled
from gridctl.history.store import LocalStore, Store, store_at
from gridctl.history.tables import (
    PROGRESS,
    SAMPLE,
    about_files,
    digest,
    each_view,
    empty,
    lines,
    needed,
    over,
    parquet,
    quoted,
    rows,
    spooled_progress,
    spooled_samples,
)
from gridctl.home import Home
from gridctl.model.policy import Kept

if TYPE_CHECKING:
    import duckdb

#: What may be asked; `views.sql` says what is in each.
VIEWS = tuple(
    "incidents events findings decisions plans runs steps gates handovers stands checkpoints nodes node_spans"
    " faults devices jobs progress spares audit samples".split()
)

_NO_OUTSIDE: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
}
_LOCK = "SET temp_directory = ''; SET enable_external_access = false; SET lock_configuration = true"

log = logging.getLogger("gridctl.history")


class HistoryError(GridctlError):
    """A question about the history that has no answer: wrong SQL, nothing of that name, a damaged file."""


class History:
    """Reads a journal's folder and its store; always as of the call. Safe to use from several threads.

    `store`: the folder `history` beside the journal, unless it is another one. `spool`: likewise `spool`.
    """

    def __init__(self, journal: Path | str, store: Store | None = None, spool: Path | None = None) -> None:
        self._folder = Path(journal)
        self._store = store or LocalStore(self._folder.parent / "history")
        self._spool = spool or self._folder.parent / "spool"
        self._guard = threading.Lock()
        self._seen: object = None
        self._bad: set[str] = set()  #: paths of sealed files that are not what the catalog says
        self._database: duckdb.DuckDBPyConnection | None = None
        self._known: dict[str, str] = {}  #: table or view -> the statement that makes it
        self._made: set[str] = set()  #: those that the database has already

    @classmethod
    def of(cls, home: Home, kept: Kept) -> "History":
        """A home's, with the store that its policy names. Raises `StoreError` for one that cannot be."""
        return cls(home.journal, store_at(kept.store or str(home.history)), home.spool)

    def query(self, sql: str, rows_max: int | None = None) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Names of the columns, and the rows (the first `rows_max`), of one SELECT over the views.

        Raises `HistoryError` for anything else: writes, files, extensions, settings, wrong SQL.
        """
        return self._run(sql, None, rows_max)

    def incidents(self) -> list[dict[str, Any]]:
        """All incidents, the newest first: rows of the view `incidents`."""
        return self._rows("FROM incidents ORDER BY opened_unix_s DESC, incident")

    def incident(self, incident: str) -> dict[str, Any]:
        """An incident with `runs` and `timeline` (its events, in order). Raises `HistoryError` if unknown."""
        found = self._one("FROM incidents WHERE incident = $id", incident, "incident")
        found["timeline"] = self._rows(
            "SELECT seq, t_unix_s, kind, actor, data FROM events WHERE incident = $id ORDER BY seq", incident
        )
        found["runs"] = self._rows("FROM runs WHERE incident = $id ORDER BY started_unix_s, run", incident)
        return found

    def runs(self) -> list[dict[str, Any]]:
        """All runs, the newest first: rows of the view `runs`."""
        return self._rows("FROM runs ORDER BY started_unix_s DESC, run")

    def run(self, run: str) -> dict[str, Any]:
        """A run with its `steps`, in order. Raises `HistoryError` if unknown."""
        found = self._one("FROM runs WHERE run = $id", run, "run")
        found["steps"] = self._rows("FROM steps WHERE run = $id ORDER BY position, started_unix_s", run)
        return found

    def _one(self, sql: str, name: str, what: str) -> dict[str, Any]:
        rows = self._rows(sql, name)
        if not rows:
            raise HistoryError(f"the journal {self._folder} knows no {what} {name!r}")
        return rows[0]

    def _rows(self, sql: str, name: str | None = None) -> list[dict[str, Any]]:
        columns, rows = self._run(sql, None if name is None else {"id": name})
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _run(
        self, sql: str, values: dict[str, str] | None, rows_max: int | None = None
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        import duckdb

        try:
            statements = duckdb.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise HistoryError("history answers one SELECT at a time, and nothing but SELECT")
            try:
                return self._fetch(sql, values, rows_max)
            except duckdb.Error as error:
                # A file was replaced since, or is damaged: then the journal is read in its place.
                if not (about_files(error) and self._look_again()):
                    raise
                return self._fetch(sql, values, rows_max)
        except duckdb.Error as error:
            raise HistoryError(f"the history cannot answer this: {error}") from None

    def _fetch(
        self, sql: str, values: dict[str, str] | None, rows_max: int | None
    ) -> tuple[list[str], list[tuple[Any, ...]]]:
        with self._cursor(sql) as cursor:
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            cursor.execute(sql, values)
            columns = [column[0] for column in cursor.description or ()]
            return columns, cursor.fetchall() if rows_max is None else cursor.fetchmany(rows_max)

    def _look_again(self) -> bool:
        """Is there anything new to be read after a file could not be?"""
        with self._guard:
            before = self._seen
            catalog, _ = self._catalog()
            bad = {file.path for file in catalog.files if not self._store.sound(file)} - self._bad
            for path in sorted(bad):
                log.warning("%s is damaged: see `gridctl history compact --rebuild`", self._store.url(path))
            self._bad |= bad
            self._database = None
            return bool(bad) or before != self._stamp()

    @contextmanager
    def _cursor(self, sql: str) -> "Iterator[duckdb.DuckDBPyConnection]":
        """A cursor of its own for this call, on a database that has all of the history for `sql`."""
        with self._guard:
            seen = self._stamp()
            if self._database is None or seen != self._seen:
                self._database, self._seen, self._made = self._load(), seen, set()
            for name, statement in needed(sql, self._known).items():
                if name not in self._made:  # to make a view takes as long as to read some of it
                    self._database.execute(statement)
                    self._made.add(name)
            cursor = self._database.cursor()
        try:
            yield cursor
        finally:
            cursor.close()

    def _stamp(self) -> object:
        sizes = [(s.name, (stat := s.stat()).st_size, stat.st_mtime_ns) for s in segments(self._folder)]
        return self._store.stamp(), sizes, [path.name for path in spooled(self._spool)]

    def _load(self) -> "duckdb.DuckDBPyConnection":
        database, self._known = self._begun(exact=False)
        self._known |= each_view()
        folders = (self._store.url(""), f"{self._spool}/")
        # An ASOF join of few rows by a loop takes twice as long as by sorting.
        database.execute("SET GLOBAL asof_loop_join_threshold = 0")
        database.execute(f"SET allowed_directories = [{', '.join(map(quoted, folders))}]")
        database.execute(_LOCK)
        return database

    def unlocked(self) -> "duckdb.DuckDBPyConnection":
        """A new database with every table as of now, exact to the byte, without views or a lock: for exports.

        Raises `duckdb.Error`.
        """
        database, known = self._begun(exact=True)
        for statement in known.values():
            database.execute(statement)
        return database

    def _begun(self, *, exact: bool) -> "tuple[duckdb.DuckDBPyConnection, dict[str, str]]":
        """A database with the tail of the journal, and the statements that make all other tables."""
        import duckdb

        catalog, error = self._catalog()
        bad = [file for file in catalog.files if file.path in self._bad or not self._store.whole(file)]
        if any(file.table == RECORDS for file in bad):
            kept = tuple(file for file in catalog.files if file.table in ("samples", "progress"))
            catalog = Catalog(files=kept, spooled=catalog.spooled)
        database = duckdb.connect(":memory:", config=_NO_OUTSIDE)
        self._store.attach(database)
        fresh = lines(segments(self._folder, catalog.sealed_seq), exact=exact)
        database.execute(f"CREATE TABLE tail AS SELECT * FROM ({fresh}) WHERE seq > {catalog.sealed_seq}")
        return database, {**self._of_journal(catalog, bad), **self._of_telemetry(catalog, bad, error)}

    def _catalog(self) -> tuple[Catalog, str]:
        """The catalog, or what is wrong with it: then the journal has everything but telemetry."""
        try:
            return self._store.catalog(), ""
        except CatalogError as damage:
            return Catalog(), str(damage)

    def _of_journal(self, catalog: Catalog, bad: list[File]) -> dict[str, str]:
        made = {RECORDS: _view(RECORDS, self._sealed(catalog.of(RECORDS)), "FROM tail")}
        for name, select in rows().items():
            found = catalog.of(name)
            same = catalog.made_by.get(name, "") == digest(name) and not set(bad).intersection(found)
            if same or not catalog.sealed_seq:
                made[f"row_{name}"] = _view(f"row_{name}", self._sealed(found), over("tail", select))
            else:  # not sealed like this, or damaged: slower, and right
                made[f"row_{name}"] = _view(f"row_{name}", "", over(RECORDS, select))
        return made

    def _of_telemetry(self, catalog: Catalog, bad: list[File], error: str) -> dict[str, str]:
        paths = spooled(self._spool, catalog.spooled)
        made = {}
        for table, columns, select in (
            ("samples", SAMPLE, spooled_samples(paths)),
            ("progress", PROGRESS, spooled_progress(paths)),
        ):
            lost = next((self._store.url(file.path) for file in bad if file.table == table), "")
            if why := error or (lost and f"{lost} is damaged; `gridctl history compact --rebuild` drops it"):
                made[table] = _view(table, "", empty(columns, why))
            else:
                made[table] = _view(table, self._sealed(catalog.of(table)), select)
        return made

    def _sealed(self, found: list[File]) -> str:
        return f"FROM {parquet([self._store.url(file.path) for file in found])}" if found else ""


def _view(name: str, sealed: str, fresh: str) -> str:
    return f"CREATE VIEW {name} AS {f'{sealed} UNION ALL BY NAME ({fresh})' if sealed else fresh}"
