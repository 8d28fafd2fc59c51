"""`gridctl swap`: a node leaves its job; first as a plan, then for real."""

from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console, DryRun, Reason, Yes
from gridctl.cli.follow import carry_out
from gridctl.cli.gate import who
from gridctl.cli.output import Column, Format, say
from gridctl.cli.page import Output, Page, duration, full, local, present, size
from gridctl.model.plans import Plan, Request

app = typer.Typer(no_args_is_help=True, help="Move the ranks of a node to warm spares: plan, then apply.")

MOVES = (
    Column("rank", lambda m: m.rank),
    Column("from", lambda m: m.origin or m.source.node),
    Column("state_from", lambda m: m.source.node),
    Column("to", lambda m: m.target.node),
    Column("gpus", lambda m: m.gpus),
)
STEPS = (
    Column("step", lambda s: s.name),
    Column("calls", lambda s: len(s.calls)),
    Column("undone_by", lambda s: sorted({call.kind for call in s.inverse})),
    Column("deadline_s", lambda s: s.deadline_s, duration),
    Column("text", lambda s: s.text, wraps=True),
)
BLOCKERS = (Column("code", lambda b: b.code), Column("text", lambda b: b.text, wraps=True))


def plan_page(plan: Plan) -> Page:
    """A plan as a person reads it before confirming: what moves, what it costs, what may differ."""
    cost = plan.cost
    pause = f"{cost.steps_lost} steps lost, pause about {duration(cost.pause_s)}"
    preparation = f"{duration(cost.preparation_s)} of preparation beside the training"
    facts = [
        ("plan", plan.id),
        ("runbook", plan.runbook),
        ("incident", plan.incident),
        ("leaves", f"{plan.node} {' '.join(plan.devices)}".strip()),
        ("job", f"{plan.job}, epoch {plan.epoch_from} -> {plan.epoch_to}"),
        ("cost", f"{pause}, {preparation}, {size(cost.state_bytes)} of state"),
        ("in money", "" if cost.usd is None else f"{cost.usd:.2f} USD"),
        ("basis", cost.basis),
        (
            "now or later",
            f"{cost.now_gpu_h:.2g} GPU-h now,"
            f" {cost.deferred_gpu_h:.2g} GPU-h if deferred by {cost.defer_h:g} h",
        ),
        ("forecast", f"P(fault in {cost.defer_h:g} h) {cost.p_fault:.2g}: {cost.p_fault_basis}"),
        *(("", line) for line in cost.comparison),
        ("bit-identical", "yes" if plan.bit_identical else "NO, see below"),
        ("expires", local(plan.expires_unix_s)),
        ("digest", plan.digest),
        *(("note", note) for note in plan.notes),
    ]
    below = [
        Page(data=None, columns=MOVES, items=plan.moves, title="Ranks that move"),
        Page(data=None, columns=BLOCKERS, items=plan.blockers, title="Why it would not be bit-identical"),
    ]
    return Page(data=full(plan), columns=STEPS, items=plan.steps, facts=facts, below=below, title="Steps")


@app.command()
def plan(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="The node to leave.", autocompletion=complete.nodes)],
    to: Annotated[
        str, typer.Option(help="The spare's node; left out, one is chosen.", autocompletion=complete.nodes)
    ] = "",
    job: Annotated[
        str, typer.Option(help="Needed only where several jobs run there.", autocompletion=complete.jobs)
    ] = "",
    device: Annotated[
        list[str] | None,
        typer.Option(help="Move only the ranks on this device, e.g. gpu:1. May be repeated."),
    ] = None,
    incident: Annotated[
        str,
        typer.Option(
            help="Left out, the open one of the node, else a new one.", autocompletion=complete.incidents
        ),
    ] = "",
    assume_dead: Annotated[
        bool,
        typer.Option(
            help="The node does not answer, its job stands, and you know that nothing of the job lives there."
        ),
    ] = False,
    output: Output = Format.table,
) -> None:
    """Plan a hand-over: who moves, what it costs, what may differ.

    Nothing is changed on any node; it opens an incident where none is open. A plan expires after five
    minutes.
    """
    request = Request(
        node=node,
        to=to,
        job=job,
        devices=device or [],
        assume_dead=assume_dead,
        incident=incident,
        who=who(),
    )
    made = Console.of(context).controller.plan(request)
    present(plan_page(made), output)
    say(f"Nothing has been done yet. To do it: gridctl swap apply {made.id}")


@app.command()
def apply(
    context: typer.Context,
    plan: Annotated[str, typer.Argument(help="The plan's id.", autocompletion=complete.plans)],
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    detach: Annotated[bool, typer.Option(help="Do not wait for the end.")] = False,
    output: Output = Format.table,
) -> None:
    """Carry out a plan, and follow it to its end.

    On a terminal it asks for the node's name and a reason. Ctrl-C leaves the run going.
    """
    console = Console.of(context)
    carry_out(console, plan, "hot-swap", plan_page, reason, output, yes=yes, dry_run=dry_run, detach=detach)
