"""`gridctl ask` and `gridctl sql`: questions about what was, answered without the controller."""

import enum
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gridctl.cli.console import Console
from gridctl.cli.output import Column, Format, clean, emit, flat, say
from gridctl.cli.page import Output, Page, duration, full, listing, local, present
from gridctl.cli.postmortem import history_of
from gridctl.errors import UsageError

if TYPE_CHECKING:
    from gridctl.history import History
    from gridctl.history.ask import Asked, Question

#: More rows than this are asked for, not printed by accident.
ROWS = 1000

QUESTIONS = (
    Column("question", lambda q: q.name),
    Column("title", lambda q: q.title),
    Column("from", lambda q: q.source),
    Column("meaning", lambda q: q.meaning, wraps=True),
)
SCHEMA = (
    Column("view", lambda c: c.view),
    Column("column", lambda c: c.column),
    Column("type", lambda c: c.type),
    Column("meaning", lambda c: c.meaning, wraps=True),
)


class By(enum.StrEnum):
    """What answers are asked by."""

    node_class = "node_class"
    rack = "rack"
    driver = "driver"
    node = "node"


def ask(
    context: typer.Context,
    question: Annotated[str, typer.Argument(help="Its name; without one all are listed.")] = "",
    since: Annotated[str, typer.Option(help="From then on: 7d, 12h, or a date (UTC unless it says).")] = "",
    until: Annotated[str, typer.Option(help="Until then, likewise.")] = "",
    where: Annotated[
        str, typer.Option(metavar="EXPR", help="Only rows for which this holds, like \"rack = 'r1'\".")
    ] = "",
    by: Annotated[By | None, typer.Option(help="One answer for each.")] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what it means and its SQL; ask nothing.")
    ] = False,
    output: Output = Format.table,
) -> None:
    """Answer a saved question about what was; what is not known is null, and a note says why.

    A site's own questions are *.sql in the folder `questions` of its home, with a header like the others.
    """
    from gridctl.control.settings import load_policy
    from gridctl.history.ask import asked_about, compose, questions

    console = Console.of(context)
    known = questions(console.home.questions)
    if not question:
        present(listing(known.values(), QUESTIONS, ""), output)
        return
    if question not in known:
        raise UsageError(f"there is no question {question!a}: `gridctl ask` lists them")
    found, asked = known[question], asked_about(since, until, where, by.value if by else "")
    history = history_of(context)
    sql = compose(history, found, asked, load_policy(console.home))
    if explain:
        _explain(found, sql, output)
    else:
        present(_answer(found, asked, *_query(history, sql, None)), output)


def sql(
    context: typer.Context,
    query: Annotated[
        str, typer.Argument(metavar="SELECT", help="One SELECT over the views; - or nothing: from stdin.")
    ] = "-",
    limit: Annotated[int, typer.Option(min=0, help="Rows at most; 0: all.")] = ROWS,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the views, or the one that is named: columns and units.")
    ] = False,
    output: Output = Format.table,
) -> None:
    """Ask the history one SELECT: it can read the views and nothing else, and changes nothing."""
    history = history_of(context)
    if schema:
        present(_schema(history, query), output)
        return
    if query == "-":
        if sys.stdin.isatty():
            raise UsageError("there is no SELECT, neither as an argument nor on stdin")
        query = sys.stdin.read()
    columns, rows = _query(history, query, limit + 1 if limit else None)
    more = bool(limit) and len(rows) > limit
    present(_table(columns, rows[:limit] if more else rows), output)
    if more:
        say(f"these are the first {limit} rows and there are more: --limit 0 prints all")


def _query(history: "History", sql: str, rows_max: int | None) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns, each with a name of its own, and rows. Raises `HistoryError` that shows where in the SQL."""
    from gridctl.history import HistoryError

    try:
        names, rows = history.query(sql, rows_max)
    except HistoryError as error:
        said, _, where = str(error).partition("\n")
        shown = HistoryError(said)
        shown.add_note(where.strip("\n"))
        raise shown from None
    columns: list[str] = []
    for name in names:
        number = 2
        unique = name
        while unique in columns:
            unique, number = f"{name}_{number}", number + 1
        columns.append(unique)
    return columns, rows


def _table(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> Page:
    items = [dict(zip(names, map(_plain, row), strict=True)) for row in rows]
    return Page(data=items, columns=[_column(name) for name in names], items=items, empty="no rows")


def _answer(question: "Question", asked: "Asked", names: list[str], rows: list[tuple[Any, ...]]) -> Page:
    page = _table(names, rows)
    data = {"question": question.name, **full(question), **full(asked), "rows": page.data}
    del data["name"], data["sql"], data["view"], data["at"]
    began = local(asked.since_unix_s) if asked.since_unix_s else "the beginning"
    facts = [("question", question.title), ("about", f"{began} to {local(asked.until_unix_s)}")]
    facts += [("where", asked.where), ("not known", question.unknown)]
    shown = [_column(name, _show(name)) for name in names]
    return Page(
        data=data, columns=page.columns, items=page.items, facts=facts, shown=shown, empty="nothing to count"
    )


def _column(name: str, show: Callable[[Any], str] | None = None) -> Column:
    return Column(name, lambda row: row[name], show, wraps=name == "note")


def _show(name: str) -> Callable[[Any], str] | None:
    """How a person is shown a figure of an answer; a length of time in a table is not read as seconds."""
    if name.endswith("_unix_s"):
        return lambda value: "" if value is None else local(value)
    if name.endswith("_s"):
        return lambda value: "" if value is None else duration(value)
    return lambda value: f"{value:.4g}" if isinstance(value, float) else str(flat(value))


def _plain(value: Any) -> Any:
    """A value of DuckDB's in what JSON and YAML have; a number that is none (nan, inf) is text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.hex() if isinstance(value, bytes) else str(value)


def _explain(question: "Question", sql: str, output: Format) -> None:
    data = {**full(question), "sql": sql}
    if output is not Format.table:
        present(Page(data=data, columns=[_column("sql")], items=[{"sql": sql}]), output)
        return
    texts = [question.title, *(f"{word}: {data[word]}" for word in ("meaning", "computed", "unknown"))]
    texts += [f"  {name}: {meaning}" for name, meaning in question.columns.items()]
    emit(
        "".join(f"-- {clean(text)}\n" for text in texts)
        + "".join(f"{clean(line)}\n" for line in sql.splitlines())
    )


def _schema(history: "History", view: str) -> Page:
    from gridctl.history.schema import schema

    found = schema(history)
    chosen = [column for column in found if view in ("-", column.view)]
    if not chosen:
        raise UsageError(f"there is no view {view!a}: {', '.join(sorted({c.view for c in found}))}")
    return listing(chosen, SCHEMA, "")
