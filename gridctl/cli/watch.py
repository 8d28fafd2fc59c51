"""`gridctl watch`: the controller itself, in this terminal."""

from typing import Annotated

import typer

from gridctl.cli.console import Console


def watch(
    context: typer.Context,
    listen: Annotated[
        str,
        typer.Option(
            help="Let nodes join and renew here; HOST is the address that they call.", metavar="HOST:PORT"
        ),
    ] = "",
) -> None:
    """Be the controller, in this terminal, until Ctrl-C.

    Other commands find it by themselves, and start one of their own if none runs.
    """
    from gridctl.control import main

    console = Console.of(context)
    main(console.home, read_only=console.read_only, listen=listen)
