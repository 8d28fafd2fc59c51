"""`gridctl demo`: a fleet on this machine, a node that fails, and the proof that the job did not notice."""

import enum
import sys
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from gridctl.cli.console import Reason, Yes, gate
from gridctl.cli.exits import Exit
from gridctl.cli.gate import consent, refuse_unaskable
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, present, size, tell
from gridctl.cli.swap import plan_page
from gridctl.errors import GridctlError
from gridctl.model.plans import Gate, Plan


class Sabotage(enum.StrEnum):
    """How the transfer is spoilt on purpose."""

    bit = "bit"
    moment = "moment"
    rng = "rng"
    buffer = "buffer"
    nan = "nan"


RANKS = (
    Column("rank", lambda r: r["rank"]),
    Column("steps", lambda r: len(r["losses_hex"])),
    Column("identical", lambda r: r["identical"]),
    Column("first_difference", lambda r: r["first_difference"]),
    Column("last_loss", lambda r: r["losses_hex"][-1] if r["losses_hex"] else ""),
)
DIGESTS = (
    Column("state", lambda pair: pair[0]),
    Column("identical", lambda pair: pair[1]["identical"]),
    Column("swap", lambda pair: pair[1]["swap"]),
    Column("control", lambda pair: pair[1]["control"]),
)


def demo(
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Train with FSDP2 in place of DDP.")] = False,
    ranks_per_node: Annotated[
        int, typer.Option(min=1, max=4, help="A node with several ranks moves at one boundary, all or none.")
    ] = 1,
    evacuate: Annotated[
        str, typer.Option(help="Only this device of the node is left, e.g. gpu:1.", metavar="DEVICE")
    ] = "",
    sabotage: Annotated[
        Sabotage | None, typer.Option(help="Spoil the transfer: it must be found, and training must go on.")
    ] = None,
    yes: Yes = False,
    reason: Reason = "",
    output: Output = Format.table,
) -> None:
    """A node of a live job fails, and the job does not notice.

    Four agents, a job of three ranks and a warm spare, all on this machine; the second node's memory
    fails. The same job then runs undisturbed, and every loss of both runs is compared. Ends with 7 where they
    differ.
    """
    from gridctl.demo import Options, run

    refuse_unaskable(yes=yes, reason=reason)
    devices = [f"gpu:{number}" for number in range(ranks_per_node)]
    if evacuate and (evacuate not in devices or ranks_per_node == 1):
        raise typer.BadParameter(
            f"--evacuate {evacuate}: with --ranks-per-node {ranks_per_node} there is no such device beside"
            " others"
        )
    if find_spec("torch") is None:
        raise GridctlError(
            f"the demo trains for real, and {sys.executable} has no torch: install gridctl[demo]"
        )

    def confirm(plan: Plan) -> Gate:
        if not yes:
            tell(plan_page(plan))
        return gate(consent(plan.node, yes=yes, reason=reason), plan.digest)

    options = Options(
        fsdp=fsdp,
        ranks_per_node=ranks_per_node,
        evacuate=evacuate,
        sabotage=sabotage.value if sabotage else "",
    )
    report = run(options, confirm)
    present(_page(report), output)
    if not _identical(report):
        raise typer.Exit(Exit.NOT_VERIFIED)


def _identical(report: dict[str, Any]) -> bool:
    ranks = all(rank["identical"] for rank in report["ranks"])
    digests = all(digest["identical"] for digest in report["digests"].values())
    return ranks and digests and report["steps"] == {"lost": 0, "repeated": 0}


def _page(report: dict[str, Any]) -> Page:
    pause, steps = report["pause"], report["steps"]
    parts = ", ".join(f"{name} {ms:.0f} ms" for name, ms in pause["parts_ms"].items())
    facts = [
        ("hand-over", report["outcome"]),
        *(("found", line) for line in report["found"]),
        ("losses and state", "bit-identical" if _identical(report) else "NOT identical"),
        ("steps", f"{steps['lost']} lost, {steps['repeated']} repeated"),
        ("longest pause", f"{pause['worst_excess_ms']:.0f} ms more than the median step takes"),
        ("the cut", f"{pause['cut_ms']:.0f} ms ({parts}; the rest: rounds of messages, two durable records)"),
        ("preparation's worst step", f"{pause['prepare_excess_ms']:.0f} ms more than the median"),
        ("moved", size(report["bytes"])),
        ("incident", report["incident"].get("id", "")),
    ]
    below = [Page(data=None, columns=DIGESTS, items=list(report["digests"].items()), title="Final state")]
    return Page(
        data=report,
        columns=RANKS,
        items=report["ranks"],
        facts=facts,
        below=below,
        title="Losses, every step",
    )
