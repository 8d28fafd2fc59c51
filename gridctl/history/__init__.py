"""Views over the journal, for questions about what was: incidents, findings, plans, runs, nodes.

The files are read as they are, without a lock, by any number of readers beside the one writer. A line
that is torn or damaged is left out here; `gridctl journal verify` is what speaks of it. Queries are SQL
(DuckDB), can only read, and see nothing but these views: columns are described in `views.sql`.
"""

import threading
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gridctl.errors import GridctlError

if TYPE_CHECKING:
    import duckdb

#: What may be asked; `views.sql` says what is in each.
VIEWS = (
    *("incidents", "events", "findings", "decisions", "plans", "runs", "steps", "gates", "handovers"),
    *(
        "stands",
        "checkpoints",
        "nodes",
        "node_spans",
        "faults",
        "devices",
        "jobs",
        "progress",
        "spares",
        "audit",
        "samples",
    ),
)

_RECORD = (
    "{seq: 'BIGINT', t_unix_s: 'DOUBLE', kind: 'VARCHAR', actor: 'VARCHAR', data: 'JSON', "
    "prev: 'VARCHAR', hash: 'VARCHAR'}"
)
_TOLD = """
CREATE TABLE samples (t_unix_s DOUBLE, span_s INTEGER, node VARCHAR, device VARCHAR, metric VARCHAR,
                      value DOUBLE, low DOUBLE, high DOUBLE, last DOUBLE, n BIGINT);
CREATE TABLE progress (t_unix_s DOUBLE, node VARCHAR, job VARCHAR, rank INTEGER, epoch INTEGER,
                       step BIGINT, step_s DOUBLE, loss DOUBLE, grad_norm DOUBLE)
"""
_RECORD_BYTES_MAX = 64 << 20
_NO_OUTSIDE: dict[str, str | bool | int | float | list[str]] = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
}
#: Rows are more than the optimizer thinks, and a join by time is not to be a loop over all of them.
_JOINS = "SET GLOBAL asof_loop_join_threshold = 0"
_LOCK = "SET temp_directory = ''; SET enable_external_access = false; SET lock_configuration = true"


class HistoryError(GridctlError):
    """A question about the history that has no answer: wrong SQL, or nothing of that name."""


class History:
    """Reads one journal folder; always as of the call. Safe to use from several threads."""

    def __init__(self, journal: Path | str) -> None:
        self._folder = Path(journal)
        self._guard = threading.Lock()
        self._seen: tuple[tuple[str, int, int], ...] | None = None
        self._database: duckdb.DuckDBPyConnection | None = None

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

        cursor = self._cursor()
        try:
            statements = duckdb.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                raise HistoryError("history answers one SELECT at a time, and nothing but SELECT")
            cursor.execute("BEGIN TRANSACTION READ ONLY")
            cursor.execute(statements[0], values)
            columns = [column[0] for column in cursor.description or ()]
            return columns, cursor.fetchall() if rows_max is None else cursor.fetchmany(rows_max)
        except duckdb.Error as error:
            raise HistoryError(f"the history cannot answer this: {error}") from None
        finally:
            cursor.close()

    def _cursor(self) -> "duckdb.DuckDBPyConnection":
        """A cursor of its own for this call, on a database that has all of the journal."""
        with self._guard:
            segments = sorted(self._folder.glob("[0-9]*.jsonl"))
            seen = tuple((s.name, (stat := s.stat()).st_size, stat.st_mtime_ns) for s in segments)
            if self._database is None or seen != self._seen:
                self._database, self._seen = _load(segments), seen
            return self._database.cursor()


def _load(segments: list[Path]) -> "duckdb.DuckDBPyConnection":
    import duckdb

    database = duckdb.connect(":memory:", config=_NO_OUTSIDE)
    database.execute(
        "CREATE TABLE records (seq BIGINT, t_unix_s DOUBLE, kind VARCHAR, actor VARCHAR, data JSON, "
        "prev VARCHAR, hash VARCHAR)"
    )
    full = [str(segment) for segment in segments if segment.stat().st_size]
    if full:
        database.execute(
            "INSERT INTO records SELECT seq, t_unix_s, kind, actor, data, prev, hash FROM read_json($files, "
            f"format = 'newline_delimited', ignore_errors = true, maximum_object_size = {_RECORD_BYTES_MAX}, "
            f"columns = {_RECORD}) WHERE seq IS NOT NULL AND kind IS NOT NULL",
            {"files": full},
        )
    package = files(__package__)
    for row in sorted(package.joinpath("rows").iterdir(), key=lambda file: file.name):
        name = row.name.removesuffix(".sql")
        database.execute(f"CREATE TABLE row_{name} AS {row.read_text(encoding='utf-8')}")
    database.execute(_TOLD)
    database.execute(package.joinpath("views.sql").read_text(encoding="utf-8"))
    database.execute(_JOINS)
    database.execute(_LOCK)
    return database
