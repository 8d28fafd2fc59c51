"""Applying a plan, following its run: steps are told on stderr, its end is the output and the exit code."""

import sys
import time
from collections.abc import Callable

import typer

from gridctl.cli.calls import calls_page
from gridctl.cli.console import Console, gate
from gridctl.cli.exits import Exit
from gridctl.cli.gate import consent
from gridctl.cli.output import Column, Format, say
from gridctl.cli.page import Page, duration, full, local, present, tell
from gridctl.errors import Refused, Unanswered
from gridctl.model.plans import Plan
from gridctl.model.runs import ENDS, Run, StepRun

POLL_S = 0.2

STEPS = (
    Column("step", lambda s: s.name),
    Column("state", lambda s: s.state),
    Column("took_s", lambda s: _took_s(s), lambda s: "-" if s is None else duration(s)),
    Column("code", lambda s: s.code),
    Column("text", lambda s: s.error or s.text, wraps=True),
)


def _took_s(step: StepRun) -> float | None:
    return step.ended_unix_s - step.started_unix_s if step.ended_unix_s else None


def run_page(run: Run) -> Page:
    """A run with its steps."""
    facts = [
        ("run", run.id),
        ("state", run.state),
        ("why", run.text if run.text.startswith(run.code) else f"{run.code}: {run.text}"),
        ("plan", run.plan),
        ("incident", run.incident),
        ("node", run.node),
        ("job", run.job),
        ("who", run.who),
        ("started", local(run.started_unix_s)),
        ("ended", local(run.ended_unix_s) if run.ended_unix_s else ""),
    ]
    return Page(data=full(run), columns=STEPS, items=run.steps, facts=facts)


def carry_out(
    console: Console,
    plan_id: str,
    runbook: str,
    page: Callable[[Plan], Page],
    reason: str,
    form: Format,
    *,
    yes: bool,
    dry_run: bool,
    detach: bool,
) -> None:
    """Applies a plan of this runbook, once `page` has shown it and somebody has agreed; follows its run."""
    if not dry_run:
        console.may_act("apply a plan")
    found = console.controller.one("plan", plan_id, Plan)
    if found.runbook != runbook:
        word = "reset" if found.runbook == "reset" else "swap"
        raise Refused("bad-request", f"{found.purpose} by plan {found.id}: `gridctl {word} apply {found.id}`")
    if dry_run:
        present(calls_page(console.controller.dry_run(found.id)), form)
        return
    if not yes and sys.stdin.isatty():
        tell(page(found))
    agreed = consent(found.node, yes=yes, reason=reason)
    run = console.controller.apply(found.id, gate(agreed, found.digest))
    follow(console, run, form, detach=detach)


def follow(console: Console, run: Run, form: Format, *, detach: bool = False) -> None:
    """Waits for the end of a run, or for the moment when it needs a person.

    Raises `typer.Exit`, and `Unanswered` where the controller falls silent meanwhile.
    """
    if detach:
        present(run_page(run), form)
        say(f"The run goes on. To follow it: gridctl run attach {run.id}")
        return
    told: dict[str, str] = {}
    try:
        while True:
            for step in run.steps:
                if step.state != "planned" and told.get(step.name) != step.state:
                    told[step.name] = step.state
                    say(f"{step.name}: {step.state}" + (f" ({step.error})" if step.error else ""))
            if run.state in ENDS or run.state in ("held", "interrupted"):
                break
            time.sleep(POLL_S)
            run = console.controller.one("run", run.id, Run)
    except KeyboardInterrupt:
        say(f"The run goes on. To follow it again: gridctl run attach {run.id}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    except Unanswered:
        say(f"How run {run.id} goes is unknown now. To look again: gridctl run show {run.id}")
        raise
    present(run_page(run), form)
    if run.state == "done":
        return
    if run.state not in ENDS:
        say(f"It is {run.state}: gridctl run resume {run.id}, or gridctl run rollback {run.id}")
    raise typer.Exit(Exit.RUN_ABORTED)
