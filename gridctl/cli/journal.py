"""`gridctl journal`: the record of everything, checked without the controller."""

import typer

from gridctl.cli.console import Console
from gridctl.cli.exits import Exit
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, full, present
from gridctl.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="The append-only, hash-chained journal.")

VERIFICATION = (
    Column("ok", lambda v: v.ok),
    Column("records", lambda v: v.records),
    Column("first_bad", lambda v: v.first_bad),
    Column("what", lambda v: v.what),
    Column("head", lambda v: v.head),
    Column("torn_bytes", lambda v: v.torn_bytes),
    Column("clock_back", lambda v: v.clock_back),
)


@app.command()
def verify(context: typer.Context, output: Output = Format.table) -> None:
    """Check every byte of it: each hash, the chain, the order.

    Ends with 7 where it does not hold.

    Lost newest records leave no trace in the chain: compare `head` with a copy kept elsewhere.
    """
    from gridagent.journal import verify as check

    folder = Console.of(context).home.journal
    if not folder.is_dir():
        raise ConfigError(f"there is no journal in {folder}: has a controller run in this home?")
    found = check(folder)
    present(Page(data=full(found), columns=VERIFICATION, items=[found], upright=True), output)
    if not found.ok:
        raise typer.Exit(Exit.NOT_VERIFIED)
