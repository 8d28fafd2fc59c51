"""`gridctl reset`: a GPU of a node that nobody uses is reset, or the node is rebooted; first as a plan."""

from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console, DryRun, Reason, Yes
from gridctl.cli.follow import carry_out
from gridctl.cli.gate import who
from gridctl.cli.output import Format, say
from gridctl.cli.page import Output, Page, full, local, present
from gridctl.cli.swap import STEPS
from gridctl.model.plans import Plan, Request

app = typer.Typer(
    no_args_is_help=True,
    help="Reset a GPU of a node that nobody uses, or reboot the node: plan, then apply.",
)


def plan_page(plan: Plan) -> Page:
    """A plan as a person reads it before confirming: what it destroys, and whether evidence comes first."""
    facts = [
        ("plan", plan.id),
        ("runbook", plan.runbook),
        ("incident", plan.incident),
        ("does", plan.purpose),
        ("expires", local(plan.expires_unix_s)),
        ("digest", plan.digest),
        *(("note", note) for note in plan.notes),
    ]
    return Page(data=full(plan), columns=STEPS, items=plan.steps, facts=facts, title="Steps")


@app.command()
def plan(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="The node.", autocompletion=complete.nodes)],
    gpu: Annotated[int | None, typer.Option(min=0, help="The GPU to reset, e.g. 1 for gpu:1.")] = None,
    reboot: Annotated[bool, typer.Option("--reboot", help="Reboot the node.")] = False,
    without_evidence: Annotated[
        str, typer.Option(metavar="WHY", help="Do not wait for evidence; the journal keeps why.")
    ] = "",
    incident: Annotated[
        str,
        typer.Option(
            help="Left out, the open one of the node, else a new one.", autocompletion=complete.incidents
        ),
    ] = "",
    output: Output = Format.table,
) -> None:
    """Plan a reset of one GPU, or a reboot.

    Refused while a rank of any job or a parked spare is on the node, and where it does not answer. The
    plan says what is destroyed. Unless evidence of the incident was taken already, that is its first step,
    and nothing is reset without it. There is no way back. Nothing is changed by the plan itself; it opens
    an incident where none is open, and expires after five minutes.
    """
    if reboot == (gpu is not None):
        raise typer.BadParameter("one of --gpu N and --reboot is needed")
    request = Request(
        node=node,
        devices=[] if gpu is None else [f"gpu:{gpu}"],
        incident=incident,
        who=who(),
        runbook="reset",
        waiver=without_evidence.strip(),
    )
    made = Console.of(context).controller.plan(request)
    present(plan_page(made), output)
    say(f"Nothing has been done yet. To do it: gridctl reset apply {made.id}")


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
    """Carry out a plan, and follow it to its end: there is no way back from a reset.

    On a terminal it asks for the node's name and a reason. Ctrl-C leaves the run going. The node stays
    cordoned, `gridctl uncordon` opens it.
    """
    console = Console.of(context)
    carry_out(console, plan, "reset", plan_page, reason, output, yes=yes, dry_run=dry_run, detach=detach)
