"""`gridctl version` and `gridctl help`."""

import platform
from operator import itemgetter

import typer

import gridctl
from gridagent.wire import WIRE_VERSION
from gridctl.cli.exits import MEANINGS
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, present

app = typer.Typer(no_args_is_help=True, help="Topics that are no command.")

EXITS = (Column("code", lambda pair: int(pair[0])), Column("meaning", lambda pair: pair[1]))


def version(output: Output = Format.table) -> None:
    """The versions of gridctl, of its messages and of Python."""
    found = {"gridctl": gridctl.__version__, "wire": WIRE_VERSION, "python": platform.python_version()}
    columns = [Column(name, itemgetter(name)) for name in found]
    present(Page(data=found, columns=columns, items=[found], upright=True), output)


@app.command("exit-codes")
def exit_codes(output: Output = Format.table) -> None:
    """What each exit code means; scripts may rely on it."""
    data = [{"code": int(code), "meaning": meaning} for code, meaning in MEANINGS.items()]
    present(Page(data=data, columns=EXITS, items=list(MEANINGS.items())), output)
