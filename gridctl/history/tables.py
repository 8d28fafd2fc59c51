"""The tables below the views, as SQL: where their rows come from, sealed or not yet.

`records` is the journal, a row a record. Each file `rows/NAME.sql` is one SELECT over it, row by row, and
makes the table `row_NAME`. `samples` and `progress` are what the nodes' streams told.
"""

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import duckdb

#: The columns of `records`, as they stand in a segment and in Parquet.
RECORD = {
    "seq": "BIGINT",
    "t_unix_s": "DOUBLE",
    "kind": "VARCHAR",
    "actor": "VARCHAR",
    "data": "JSON",
    "prev": "VARCHAR",
    "hash": "VARCHAR",
}
SAMPLE = {
    "t_unix_s": "DOUBLE",
    "span_s": "INTEGER",
    "node": "VARCHAR",
    "device": "VARCHAR",
    "metric": "VARCHAR",
    "value": "DOUBLE",
    "low": "DOUBLE",
    "high": "DOUBLE",
    "last": "DOUBLE",
    "n": "BIGINT",
}
PROGRESS = {
    "t_unix_s": "DOUBLE",
    "node": "VARCHAR",
    "job": "VARCHAR",
    "rank": "INTEGER",
    "epoch": "INTEGER",
    "step": "BIGINT",
    "step_s": "DOUBLE",
    "loss": "DOUBLE",
    "grad_norm": "DOUBLE",
}
#: A line of the spool: a sample, or a step of a rank.
_SPOOLED = {**PROGRESS, "device": "VARCHAR", "v": "MAP(VARCHAR, DOUBLE)"}
_LINE_BYTES_MAX = 64 << 20
#: Of what does not name the file that it is about.
_PARQUET_SAYS = ("parquet", "zstd", "tprotocolexception", "don't know what type")
_CREATED = re.compile(r"^CREATE (?:VIEW|MACRO) (\w+)", re.MULTILINE)
#: Words of questions about what there is.
_ABOUT_ALL = ("duckdb_", "information_schema", "pg_", "show", "sqlite_")
_WORD = re.compile(r"\w+")
_IS_RECORD = "seq IS NOT NULL AND kind IS NOT NULL"
_DATA = r',"data":(.*),"prev":"[0-9a-f]{64}","hash":"[0-9a-f]{64}"\}$'


@cache
def rows() -> dict[str, str]:
    """Row table -> the SELECT over `records` that makes it."""
    found = files(__package__) / "rows"
    texts = {file.name.removesuffix(".sql"): file.read_text(encoding="utf-8") for file in found.iterdir()}
    return {name: texts[name].rstrip().rstrip(";") for name in sorted(texts)}


def views() -> str:
    """The statements that make the public views, over all tables."""
    return (files(__package__) / "views.sql").read_text(encoding="utf-8")


def needed(sql: str, known: dict[str, str]) -> dict[str, str]:
    """Name -> statement, of what a question may use of what is `known` and of all below that, in order."""
    words = set(_WORD.findall(sql.lower()))
    if any(word.startswith(_ABOUT_ALL) for word in words):
        return known
    taken = set()
    for name in reversed(known):  # a view rests on those before it only
        if name in words:
            taken.add(name)
            words |= set(_WORD.findall(known[name].lower()))
    return {name: text for name, text in known.items() if name in taken}


@cache
def each_view() -> dict[str, str]:
    """Public view -> the statement that makes it, over all tables; in order."""
    import duckdb

    made = {}
    for statement in duckdb.extract_statements(views()):
        found = _CREATED.search(statement.query)
        assert found is not None, "views.sql makes views and macros"
        made[found[1].lower()] = statement.query
    return made


def digest(name: str) -> str:
    """Changes with the SELECT of a row table: files that another one has made are made anew."""
    return hashlib.sha256(rows()[name].encode()).hexdigest()[:16]


def over(source: str, select: str) -> str:
    """The SELECT of a row table, over the records of another relation."""
    return f"SELECT * FROM (WITH records AS (FROM {source}) SELECT * FROM (\n{select}\n))"


def quoted(text: str) -> str:
    """A string literal."""
    return "'" + text.replace("'", "''") + "'"


def parquet(urls: Sequence[str]) -> str:
    """A relation: all rows of these files, which have the same columns."""
    return f"read_parquet([{', '.join(map(quoted, urls))}])"


def empty(columns: dict[str, str], error: str = "") -> str:
    """A SELECT of no rows; one that fails, and says why: `error`."""
    nulls = ", ".join(f"NULL::{kind} AS {name}" for name, kind in columns.items())
    return f"SELECT {nulls} WHERE {f'error({quoted(error)}) IS NOT NULL' if error else 'false'}"


def about_files(error: "duckdb.Error") -> bool:
    """May it come from a file that is not there, or is not what it says?"""
    import duckdb

    if isinstance(error, (duckdb.IOException, duckdb.SerializationException, duckdb.InternalException)):
        return True
    return any(word in str(error).lower() for word in _PARQUET_SAYS)


def lines(paths: Sequence[Path], *, exact: bool = False) -> str:
    """A SELECT of the records in segments; what is torn or damaged is left out.

    `exact`: with the very bytes of their data, else DuckDB writes escapes its own way; three times slower.
    """
    full = [str(path) for path in paths if path.stat().st_size]
    if not full:
        return empty(RECORD)
    if not exact:
        return f"SELECT {', '.join(RECORD)} FROM {_json(full, RECORD)} WHERE {_IS_RECORD}"
    kinds = ", ".join(f'"{name}": "{kind}"' for name, kind in RECORD.items() if name != "data")
    # No string before the data can have these bytes: within one they are escaped.
    data = f"TRY_CAST(regexp_extract(line, {quoted(_DATA)}, 1, 's') AS JSON) AS data"
    return (
        f"SELECT {', '.join(data if name == 'data' else f'its.{name}' for name in RECORD)} FROM ("
        f"SELECT json AS line, json_transform(json, {quoted(f'{{{kinds}}}')}) AS its "
        f"FROM read_json_objects([{', '.join(map(quoted, full))}], format = 'newline_delimited', "
        f"ignore_errors = true, maximum_object_size = {_LINE_BYTES_MAX})) "
        "WHERE its.seq IS NOT NULL AND its.kind IS NOT NULL"
    )


def spooled_samples(paths: Sequence[Path]) -> str:
    """A SELECT of `samples` from the spool, a row a second."""
    if not paths:
        return empty(SAMPLE)
    return (
        "SELECT floor(t)::DOUBLE AS t_unix_s, 1::INTEGER AS span_s, node, device, metric, avg(x) AS value, "
        "min(x) AS low, max(x) AS high, arg_max(x, t) AS last, count(*) AS n FROM ("
        "SELECT t_unix_s AS t, node, device, unnest(map_keys(v)) AS metric, unnest(map_values(v)) AS x "
        f"FROM {_json([str(path) for path in paths], _SPOOLED)} WHERE device IS NOT NULL) "
        "WHERE x IS NOT NULL GROUP BY ALL"
    )


def spooled_progress(paths: Sequence[Path]) -> str:
    """A SELECT of `progress` from the spool."""
    if not paths:
        return empty(PROGRESS)
    spool = _json([str(path) for path in paths], _SPOOLED)
    return f"SELECT {', '.join(PROGRESS)} FROM {spool} WHERE job IS NOT NULL"


def _json(paths: Sequence[str], columns: dict[str, str]) -> str:
    kinds = ", ".join(f"{name}: {quoted(kind)}" for name, kind in columns.items())
    return (
        f"read_json([{', '.join(map(quoted, paths))}], format = 'newline_delimited', ignore_errors = true, "
        f"maximum_object_size = {_LINE_BYTES_MAX}, columns = {{{kinds}}})"
    )
