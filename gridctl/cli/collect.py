"""`gridctl collect`: what a node knows of itself, taken before anything destroys it."""

from pathlib import Path
from typing import Annotated

import typer

from gridctl.cli import complete
from gridctl.cli.calls import calls_page
from gridctl.cli.console import Console, DryRun
from gridctl.cli.gate import who
from gridctl.cli.output import Column, Format, say
from gridctl.cli.page import Output, Page, full, local, present, size
from gridctl.errors import Refused
from gridctl.model.evidence import Collected, Wanted
from gridctl.model.fleet import Node
from gridctl.model.plans import DryCall
from gridctl.model.runs import Incident

ITEMS = (
    Column("name", lambda i: i.name),
    Column("bytes", lambda i: i.bytes, size),
    Column("sha256", lambda i: i.sha256, lambda digest: digest[:16] or "-"),
    Column("note", lambda i: i.note, wraps=True),
)


def collect(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(metavar="NODE|INCIDENT", help="Whose.", autocompletion=complete.nodes_or_incidents),
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder for the archive.")] = Path("."),
    dry_run: DryRun = False,
    output: Output = Format.table,
) -> None:
    """Take evidence of a node: kernel log, devices, stacks, flight recorder, vendor's and BMC's logs.

    It disturbs no training and asks for no confirmation. An incident's evidence is taken once and
    fetched again after that; a node's, anew each time. Secrets are taken out by their names. A node
    that does not answer is named (exit code 5), and nobody tries again later.
    """
    console = Console.of(context)
    if dry_run:
        present(calls_page(_calls(console, target)), output)
        return
    console.may_act("collect evidence")
    wanted = Wanted(target=target, folder=str(out.absolute()), who=who())
    found = console.controller.collect(wanted)
    present(_page(found), output)
    lacking = f"; {len(found.lacking)} of {len(found.items)} could not be had" if found.lacking else ""
    say(f"{found.node}: evidence lies in {found.file} ({size(found.bytes)}){lacking}")


def _page(found: Collected) -> Page:
    facts = [
        ("evidence", found.id),
        ("node", found.node),
        ("incident", found.incident),
        ("taken", local(found.taken_unix_s)),
        ("file", found.file),
        ("sha256", found.sha256),
    ]
    return Page(data=full(found), columns=ITEMS, items=found.items, facts=facts)


def _calls(console: Console, target: str) -> list[DryCall]:
    urls = {node.name: node.url for node in console.controller.view("nodes", Node)}
    incidents = {incident.id: incident.node for incident in console.controller.view("incidents", Incident)}
    node = incidents.get(target, target)
    if node not in urls:
        raise Refused("unknown-node", f"there is no node or incident {target!r}; `gridctl nodes` lists nodes")
    return [
        DryCall(step="collect", when="do", method="GET", url=f"{urls[node]}/v1/status"),
        DryCall(
            step="collect", when="do", method="POST", url=f"{urls[node]}/v1/ops", kind="evidence.collect"
        ),
        DryCall(step="fetch", when="do", method="GET", url=f"{urls[node]}/v1/evidence/ID"),
    ]
