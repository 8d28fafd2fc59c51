"""`gridctl run`: what was set going."""

from collections.abc import Callable
from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.calls import calls_page
from gridctl.cli.console import Console, DryRun, Reason, Yes, gate
from gridctl.cli.follow import follow, run_page
from gridctl.cli.gate import consent
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Watch, age, duration, listing, present, read
from gridctl.model.plans import Gate
from gridctl.model.runs import Run

app = typer.Typer(no_args_is_help=True, help="Runs: list, show, attach; abort, roll back, resume.")

RUNS = (
    Column("id", lambda r: r.id),
    Column("state", lambda r: r.state),
    Column("node", lambda r: r.node),
    Column("job", lambda r: r.job),
    Column("step", lambda r: next((s.name for s in reversed(r.steps) if s.started_unix_s), "")),
    Column("started_unix_s", lambda r: r.started_unix_s, lambda t: f"{age(t)} ago"),
    Column("took_s", lambda r: _took(r), lambda s: "-" if s is None else duration(s)),
    Column("who", lambda r: r.who),
    Column("why", lambda r: r.text),
)

RunId = Annotated[str, typer.Argument(help="The run's id.", autocompletion=complete.runs)]


def _took(run: Run) -> float | None:
    return run.ended_unix_s - run.started_unix_s if run.ended_unix_s else None


@app.command("list")
def list_(context: typer.Context, output: Output = Format.table, watch: Watch = False) -> None:
    """All runs, the newest last."""
    console = Console.of(context)
    read(
        lambda: console.controller.view("runs", Run),
        lambda runs: listing(runs, RUNS, "no runs yet"),
        output,
        watch,
    )


@app.command()
def show(context: typer.Context, run: RunId, output: Output = Format.table, watch: Watch = False) -> None:
    """One run with its steps."""
    console = Console.of(context)
    read(lambda: console.controller.one("run", run, Run), run_page, output, watch)


@app.command()
def attach(context: typer.Context, run: RunId, output: Output = Format.table) -> None:
    """Follow a run to its end. Ctrl-C leaves it going."""
    console = Console.of(context)
    follow(console, console.controller.one("run", run, Run), output)


@app.command()
def abort(
    context: typer.Context,
    run: RunId,
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """Stop a run before its commit: the old members train on."""
    _act(context, "abort", run, yes, reason, dry_run, output)


@app.command()
def rollback(
    context: typer.Context,
    run: RunId,
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """Undo a run's steps, the newest first."""
    _act(context, "rollback", run, yes, reason, dry_run, output)


@app.command()
def resume(
    context: typer.Context,
    run: RunId,
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """Go on with a held or interrupted run, at its step."""
    _act(context, "resume", run, yes, reason, dry_run, output)


def _act(
    context: typer.Context, verb: str, run: str, yes: bool, reason: str, dry_run: bool, output: Format
) -> None:
    console = Console.of(context)
    if not dry_run:
        console.may_act(f"{verb} a run")
    found = console.controller.one("run", run, Run)
    if dry_run:
        present(calls_page(console.controller.dry_steer(found.id, verb)), output)
        return
    agreed = consent(found.node, yes=yes, reason=reason)
    act: Callable[[str, Gate], Run] = getattr(console.controller, verb)
    follow(console, act(found.id, gate(agreed)), output)
