"""`gridctl uncordon`: a repaired node may take new work again."""

from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console, Reason, Yes, gate
from gridctl.cli.gate import consent
from gridctl.cli.output import Format, say
from gridctl.cli.page import Output, listing, present
from gridctl.cli.views import NODES


def uncordon(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="The repaired node.", autocompletion=complete.nodes)],
    yes: Yes = False,
    reason: Reason = "",
    output: Output = Format.table,
) -> None:
    """Lift the cordon that a swap left on a node, after its repair.

    A quarantine is lifted with it. A cordon that somebody else set stays: they lift it.
    """
    console = Console.of(context)
    console.may_act("lift a cordon")
    agreed = consent(node, yes=yes, reason=reason)
    opened = console.controller.uncordon(node, gate(agreed))
    present(listing([opened], NODES, ""), output)
    say(f"{node}: open for new work")
