"""`gridctl review`: a week, for the people who look back at it."""

import time
from pathlib import Path
from typing import Annotated

import typer

from gridctl.cli.console import Console
from gridctl.cli.postmortem import Form, deliver, history_of


def review(
    context: typer.Context,
    week: Annotated[str, typer.Option("--week", help="2026-W48, last, or this (UTC, from Monday).")] = "last",
    form: Annotated[Form, typer.Option("--format", "-f", help="Form of the review.")] = Form.md,
    out: Annotated[Path | None, typer.Option("--out", help="A file; left out, stdout.")] = None,
) -> None:
    """Look back at a week: service levels, incidents, risk, spares, repeats, where people decided otherwise.

    Out of the history's files, without a controller.
    """
    from gridctl.control.settings import load_policy
    from gridctl.history.review.document import document
    from gridctl.history.review.levels import levels
    from gridctl.history.review.source import read
    from gridctl.history.review.week import week as parsed

    now_unix_s = time.time()
    try:
        name, from_unix_s, until_unix_s = parsed(week, now_unix_s)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if from_unix_s >= now_unix_s:
        raise typer.BadParameter(f"week {name} has not begun")
    home, history = Console.of(context).home, history_of(context)
    end_unix_s = min(until_unix_s, now_unix_s)
    targets = levels(history, load_policy(home), home.questions, from_unix_s, end_unix_s)
    made = read(history, name, from_unix_s, until_unix_s, now_unix_s, targets)
    deliver(name, made, document(made, None), form, out)
