"""`gridctl incident report|compare|record`: out of the journal's files, without a controller."""

import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.acts import Id
from gridctl.cli.console import Console
from gridctl.cli.output import Column, Format, as_json, emit, say
from gridctl.cli.page import Output, Page, full, present
from gridctl.errors import ConfigError

if TYPE_CHECKING:
    from gridagent.wire import StreamRecord
    from gridctl.history import History
    from gridctl.history.report.document import Document
    from gridctl.history.report.facts import Report
    from gridctl.history.report.source import Source

Other = Annotated[str, typer.Argument(metavar="OTHER", help="Another.", autocompletion=complete.incidents)]


class Form(enum.StrEnum):
    """Forms of a report."""

    md = "md"
    html = "html"
    json = "json"


def report(
    context: typer.Context,
    incident: Id,
    form: Annotated[Form, typer.Option("--format", "-f", help="Form of the report.")] = Form.md,
    out: Annotated[Path | None, typer.Option("--out", help="A file; left out, stdout.")] = None,
) -> None:
    """Write a postmortem: what was seen, decided, rejected, done, what it cost, what is left to do.

    Times are UTC and this machine's. Plots are in the HTML form, which is one file and opens offline;
    where no telemetry of that time is kept it says so. Nothing is taken out of what nodes have printed.
    """
    from gridctl.history.report.document import document

    made = _report(history_of(context), incident)
    deliver(incident, made, document(made, None), form, out)


def compare(context: typer.Context, incident: Id, other: Other, output: Output = Format.table) -> None:
    """Put two incidents side by side."""
    from gridctl.history.report.compare import Row
    from gridctl.history.report.compare import compare as rows

    history = history_of(context)
    found = rows(_report(history, incident), _report(history, other))
    columns = (
        Column("what", lambda row: row.what),
        Column(incident, lambda row: row.a, _shown),
        Column(other, lambda row: row.b, _shown),
    )
    data = [dict(zip(Row._fields, row, strict=True)) for row in found]
    present(Page(data=data, columns=columns, items=found), output)


def record(
    context: typer.Context,
    incident: Id,
    out: Annotated[Path, typer.Option("--out", help="A new file: .jsonl or .jsonl.gz.")],
) -> None:
    """Cut a recording out of an incident: what is kept of its nodes around it, for `gridctl replay`.

    It is made of the lines that findings quote, of samples and steps that are kept, and of the spool in
    the incident's archive of evidence, if that lies where the journal says. Says what is not in it.
    """
    from gridctl.history.report.excerpt import excerpt
    from gridctl.history.report.source import read
    from gridctl.ports.recorder import Recorder, check_name

    check_name(out)
    history = history_of(context)
    source = read(history, incident)
    spooled, unread = _spooled(source)
    made = excerpt(history, source, spooled)
    with Recorder(out, made.header, made.start_unix_s) as recorder:
        for its in made.records:
            recorder.write(its)
    for lack in (*unread, *made.lacking):
        say(f"not in it: {lack}")
    say(f"{recorder.records} records: {out}; gridctl replay {out}")


def _spooled(source: "Source") -> tuple[list["StreamRecord"], list[str]]:
    """What the newest archive of the incident has; and why others could not be read."""
    from gridctl.ports.archive import NotAsTold, spooled

    unread: list[str] = []
    nodes = {r.data.get("node") for r in source.records if r.kind == "incident"}
    taken = [
        r.data for r in source.records if r.data.get("state") == "collected" and r.data.get("node") in nodes
    ]
    for audit in reversed(taken):
        try:
            if found := spooled(Path(audit["file"]), audit["sha256"]):
                return found, unread
        except (OSError, NotAsTold, KeyError) as error:
            unread.append(f"the archive of evidence: {error}")
    return [], unread


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def deliver(name: str, facts: object, document: "Document", form: Form, out: Path | None) -> None:
    """Prints what was made out of the history, or writes it into a file. `facts`: what JSON has."""
    from gridctl.history.report import markdown, page

    if form is Form.json:
        text = as_json(full(facts))
    else:
        text = (markdown if form is Form.md else page).write(document)
    if out is None:
        emit(text)
        return
    _write(out, text)
    say(f"{name}: {out}")


def history_of(context: typer.Context) -> "History":
    """This home's history. Raises `ConfigError` where no controller has ever run."""
    from gridctl.control.settings import load_policy
    from gridctl.history import History

    home = Console.of(context).home
    folder = home.journal
    if not folder.is_dir():
        raise ConfigError(f"there is no journal in {folder}: has a controller run in this home?")
    return History.of(home, load_policy(home).history)


def _report(history: "History", incident: str) -> "Report":
    from gridctl.history.report.derive import report
    from gridctl.history.report.source import read

    return report(read(history, incident))


def _write(path: Path, text: str) -> None:
    """Whole or not at all; what nodes have printed is for its owner to show around."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


VERBS = (report, compare, record)
