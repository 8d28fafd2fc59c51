"""`gridctl freeze` and `gridctl thaw`: a stop that the agents themselves honour."""

from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console, DryRun, Reason, Yes, gate
from gridctl.cli.exits import Exit
from gridctl.cli.gate import consent
from gridctl.cli.output import Column, Format, say
from gridctl.cli.page import Output, listing, present
from gridctl.model.fleet import Node, several

FLEET = "fleet"

Scope = Annotated[str, typer.Argument(help="A job; left out, the whole fleet.", autocompletion=complete.jobs)]

REACHED = (Column("node", lambda r: r["node"]), Column("answer", lambda r: r["answer"]))


def freeze(
    context: typer.Context,
    scope: Scope = FLEET,
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """Stop every action on the fleet or a job, at the agents.

    Training goes on, and a hand-over that is under way can still be aborted. Ends with 5 if a node
    was not reached.
    """
    _set(context, scope, True, yes, reason, dry_run, output)


def thaw(
    context: typer.Context,
    scope: Scope = FLEET,
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """End a freeze. Ends with 5 if a node was not reached."""
    _set(context, scope, False, yes, reason, dry_run, output)


def _set(
    context: typer.Context, scope: str, frozen: bool, yes: bool, reason: str, dry_run: bool, form: Format
) -> None:
    console = Console.of(context)
    verb = "freeze" if frozen else "thaw"
    if dry_run:
        nodes = console.controller.view("nodes", Node)
        calls = [{"node": node.name, "answer": f"would POST {node.url}/v1/freeze"} for node in nodes]
        present(listing(calls, REACHED, "the fleet has no nodes"), form)
        return
    console.may_act(verb)
    agreed = consent(scope, yes=yes, reason=reason)
    act = console.controller.freeze if frozen else console.controller.thaw
    answers = act(scope, gate(agreed))
    present(listing(answers, REACHED, "the fleet has no nodes"), form)
    done = f"{scope}: {'frozen' if frozen else 'thawed'}"
    if missed := [answer["node"] for answer in answers if answer["answer"] != "ok"]:
        say(f"{done}, but NOT on {several(missed)}: those that did not answer get it once they do")
        raise typer.Exit(Exit.UNKNOWN)
    say(done)
