"""`gridctl risk`: how likely faults are, what each number rests on, and what ought to be done."""

from typing import Annotated, Any

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console
from gridctl.cli.incidents import alternatives, choice_facts
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, Watch, duration, full, listing, read
from gridctl.errors import ConfigError

CHANCE = "{:.2g}".format

NODES = (
    Column("node", lambda r: r.node),
    Column("index", lambda r: r.indices[0].index),
    Column("verdict", lambda r: r.verdict),
    Column("p_1h", lambda r: r.forecast.p_1h, CHANCE),
    Column("p_6h", lambda r: r.forecast.p_6h, CHANCE),
    Column("p_24h", lambda r: r.forecast.p_24h, CHANCE),
    Column("remaining_h", lambda r: r.forecast.remaining_h, lambda hours: duration(hours * 3600)),
    Column("action", lambda r: r.choice.action),
    Column("basis", lambda r: r.forecast.basis, wraps=True),
)
CLASSES = (
    Column("class", lambda c: c.name),
    Column("p_1h", lambda c: c.p_1h, CHANCE),
    Column("p_6h", lambda c: c.p_6h, CHANCE),
    Column("p_24h", lambda c: c.p_24h, CHANCE),
    Column("base_24h", lambda c: c.base_24h, CHANCE),
    Column("basis", lambda c: c.basis, wraps=True),
)
PARTS = (
    Column("device", lambda p: p[0].device),
    Column("index", lambda p: p[0].index),
    Column("takes", lambda p: p[1].weight, lambda weight: f"{weight:.0%}"),
    Column("what", lambda p: p[1].what),
    Column("rule", lambda p: p[1].rule, wraps=True),
)
SKILL = (
    Column("class", lambda s: s.name),
    Column("forecasts", lambda s: s.forecasts),
    Column("events", lambda s: s.events),
    Column("brier", lambda s: s.brier, "{:.3g}".format),
    Column("brier_base", lambda s: s.brier_base, "{:.3g}".format),
    Column("skill", lambda s: s.skill, lambda skill: "" if skill is None else f"{skill:.2f}"),
    Column("verdict", lambda s: s.verdict, wraps=True),
)


def risk(
    context: typer.Context,
    node: Annotated[str, typer.Argument(help="One node, in full.", autocompletion=complete.nodes)] = "",
    skill: Annotated[
        bool, typer.Option("--skill", help="How good the forecasts were: each class against its base rate.")
    ] = False,
    output: Output = Format.table,
    watch: Watch = False,
) -> None:
    """How likely each node is to fail within 1, 6 and 24 hours, and what ought to be done about it.

    "base rate" means that nothing better is known: no signal comes before most faults.
    """
    from gridctl.assess.outlook import NodeRisk

    console = Console.of(context)
    if skill:
        if node:
            raise typer.BadParameter("--skill is of the whole fleet", param_hint="node")
        read(
            lambda: _skills(console), lambda found: listing(found, SKILL, "no day is over yet"), output, watch
        )
        return

    if node:
        read(lambda: console.controller.one("risk", node, NodeRisk), _page, output, watch)
        return

    def fetch() -> list[NodeRisk]:
        found = console.controller.view("risk", NodeRisk)
        return sorted(found, key=lambda its: (-its.indices[0].index, -its.forecast.p_24h, its.node))

    read(fetch, lambda found: listing(found, NODES, "no nodes"), output, watch)


def _page(found: Any) -> Page:
    choice = full(found.choice)
    facts = [
        ("node", found.node),
        ("verdict", found.verdict),
        ("risk index", f"{found.indices[0].index} of 100"),
        ("P(fault)", _chances(found.forecast)),
        ("useful hours", f"{found.forecast.remaining_h:.0f} expected, if what is seen stays as it is"),
        *choice_facts(choice, found.forecast.p_24h, found.forecast.basis),
    ]
    parts = [(index, part) for index in found.indices for part in index.parts]
    below = [
        Page(
            data=None, columns=PARTS, items=parts, title="What makes the index, of the node and each device"
        ),
        alternatives(choice["alternatives"]),
    ]
    classes = found.forecast.classes
    return Page(data=full(found), columns=CLASSES, items=classes, facts=facts, below=below, title="By class")


def _chances(found: Any) -> str:
    low, high = found.p_24h_range
    chances = f"1 h {found.p_1h:.2g}, 6 h {found.p_6h:.2g}, 24 h {found.p_24h:.2g}"
    return f"{chances} (90 % range {low:.2g} to {high:.2g}; base rate {found.base_24h:.2g})"


def _skills(console: Console) -> list[Any]:
    """Out of the journal itself: that of a long year takes a while, and holds up no controller."""
    from gridagent.journal import read as records
    from gridctl.assess.rates import tables
    from gridctl.assess.record import Entry, hindcast
    from gridctl.assess.skill import skills
    from gridctl.model.fleet import Node

    folder = console.home.journal
    if not folder.is_dir():
        raise ConfigError(f"there is no journal in {folder}: has a controller run in this home?")
    gpus = {n.name: n.status.gpus for n in console.controller.view("nodes", Node) if n.status}
    entries = [Entry(t_unix_s=r.t_unix_s, kind=r.kind, data=r.data) for r in records(folder)]
    return skills(hindcast(entries, tables(), gpus))
