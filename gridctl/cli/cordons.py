"""`gridctl uncordon`: a repaired node may take new work again."""

from collections.abc import Sequence
from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.calls import calls_page
from gridctl.cli.console import Console, DryRun, Reason, Yes, gate
from gridctl.cli.gate import consent
from gridctl.cli.output import Format, say
from gridctl.cli.page import Output, present
from gridctl.cli.views import hosted, nodes_page
from gridctl.errors import Refused
from gridctl.model.fleet import Job, Node
from gridctl.model.plans import DryCall
from gridctl.runbook.dry import leases


def uncordon(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="The repaired node.", autocompletion=complete.nodes)],
    yes: Yes = False,
    reason: Reason = "",
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """Lift the cordon that a swap left on a node, after its repair.

    A quarantine is lifted with it. A cordon that somebody else set stays: they lift it.
    """
    console = Console.of(context)
    if dry_run:
        present(calls_page(_calls(console.controller.view("nodes", Node), node)), output)
        return
    console.may_act("lift a cordon")
    agreed = consent(node, yes=yes, reason=reason)
    opened = console.controller.uncordon(node, gate(agreed))
    present(nodes_page(hosted([opened], console.controller.view("jobs", Job))), output)
    say(f"{node}: open for new work")


def _calls(nodes: Sequence[Node], name: str) -> list[DryCall]:
    urls = {node.name: node.url for node in nodes}
    if name not in urls:
        raise Refused("unknown-node", f"the fleet has no node {name!r}; `gridctl nodes` lists them")
    ops = DryCall(step="uncordon", when="do", method="POST", url=f"{urls[name]}/v1/ops", kind="node.uncordon")
    return [*leases(urls), ops]
