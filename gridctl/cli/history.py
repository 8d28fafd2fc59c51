"""`gridctl history`: the store of what was. Works on the home's files, beside a controller or without one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gridctl.cli.console import Console, DryRun
from gridctl.cli.exits import Exit
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, full, listing, present, size

if TYPE_CHECKING:
    from gridctl.history.compact import Place
    from gridctl.model.policy import Kept

app = typer.Typer(no_args_is_help=True, help="What was: the journal and telemetry as files.")

COMPACTED = (
    Column("records", lambda c: c.records),
    Column("sealed_seq", lambda c: c.sealed_seq),
    Column("samples", lambda c: c.samples),
    Column("files", lambda c: c.files),
    Column("bytes", lambda c: c.bytes, size),
    Column("problem", lambda c: c.problem),
    Column("damaged", lambda c: list(c.damaged)),
)
TABLES = (
    Column("table", lambda t: t.table),
    Column("span_s", lambda t: t.span_s, lambda s: str(s) if s else ""),
    Column("rows", lambda t: t.rows),
    Column("bytes", lambda t: t.bytes, size),
    Column("bytes_per_row", lambda t: t.bytes_per_row, lambda b: "-" if b is None else f"{b:.2f}"),
    Column("files", lambda t: t.files),
    Column("first", lambda t: t.first),
    Column("last", lambda t: t.last),
)
DUE = (
    Column("path", lambda d: d[0].path),
    Column("rows", lambda d: d[0].rows),
    Column("bytes", lambda d: d[0].bytes, size),
    Column("span_s", lambda d: d[0].span_s),
    Column("becomes_s", lambda d: d[1]),
)
EXPORTED = (
    Column("file", lambda e: e.file),
    Column("bytes", lambda e: e.bytes, size),
    Column("records", lambda e: e.records),
    Column("samples", lambda e: e.samples),
    Column("head", lambda e: e.head),
)


def _place(context: typer.Context) -> "tuple[Place, Kept]":
    from gridctl.control.settings import load_policy
    from gridctl.history.compact import Place

    home = Console.of(context).home
    kept = load_policy(home).history
    return Place.of(home, kept), kept


@app.command()
def stats(context: typer.Context, output: Output = Format.table) -> None:
    """What there is: where, how many rows and bytes in each table and tier, how far it is sealed."""
    from gridctl.history.stats import stats as look

    place, kept = _place(context)
    found = look(place, kept)
    facts = [
        ("journal", found.journal_dir),
        ("segments", f"{found.journal_segments}, {size(found.journal_bytes)}"),
        ("store", found.store),
        ("sealed", f"up to record {found.sealed_seq} of {found.journal_seq}"),
        ("spool", f"{found.spool_dir}: {found.spool_files} files, {size(found.spool_bytes)}"),
        ("sample", "" if found.bytes_per_sample is None else f"{found.bytes_per_sample:.2f} bytes"),
        ("problem", found.problem),
    ]
    present(Page(data=full(found), columns=TABLES, items=found.tables, facts=facts), output)


@app.command()
def compact(
    context: typer.Context,
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild", help="Make all of the journal anew, leave out what is damaged."),
    ] = False,
    output: Output = Format.table,
) -> None:
    """Seal the journal as Parquet, take telemetry in, thin it. The controller does so every hour.

    Ends with 7 where the journal or a file is damaged. Nothing of the journal is ever deleted.
    """
    from gridctl.history.compact import compact as work

    Console.of(context).may_act("compact the history")
    found = work(*_place(context), rebuild=rebuild)
    present(Page(data=full(found), columns=COMPACTED, items=[found], upright=True), output)
    if found.problem or found.damaged:
        raise typer.Exit(Exit.NOT_VERIFIED)


@app.command()
def retain(context: typer.Context, dry_run: DryRun = False, output: Output = Format.table) -> None:
    """Put telemetry into the tier of its age: seconds, minutes, hours, as [history] of policy.toml says."""
    import time

    from gridctl.history.compact import retain as work
    from gridctl.history.telemetry import due

    place, kept = _place(context)
    if dry_run:
        found = due(place.store.catalog(), kept, time.time())
    else:
        Console.of(context).may_act("thin telemetry")
        found = work(place, kept)
    present(listing(found, DUE, "everything is in its tier"), output)


@app.command()
def export(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The .duckdb file to be made.")],
    output: Output = Format.table,
) -> None:
    """Write everything into one file that DuckDB 1.2 and newer, harlequin and others open."""
    from gridctl.history.export import export as work

    place, _ = _place(context)
    found = work(place, file)
    present(Page(data=full(found), columns=EXPORTED, items=[found], upright=True), output)


@app.command("import")
def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="What `gridctl history export` wrote.", exists=True)],
    output: Output = Format.table,
) -> None:
    """Take an export into a home without a history: its journal, byte by byte, and its telemetry."""
    from gridctl.history.export import take_in

    console = Console.of(context)
    console.may_act("import a history")
    place, kept = _place(context)
    console.home.make_state()
    found = take_in(place, kept, file)
    present(Page(data=full(found), columns=EXPORTED, items=[found], upright=True), output)
