"""`gridctl watch`: the controller itself, in this terminal."""

import typer

from gridctl.cli.console import Console


def watch(context: typer.Context) -> None:
    """Be the controller, in this terminal, until Ctrl-C.

    Other commands find it by themselves, and start one of their own if none runs.
    """
    from gridctl.control import main

    console = Console.of(context)
    main(console.home, read_only=console.read_only)
