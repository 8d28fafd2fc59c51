"""What is live: fleet, nodes, jobs, spares."""

from operator import itemgetter
from typing import Annotated, Any

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, Watch, age, full, listing, local, read
from gridctl.errors import Refused
from gridctl.model.fleet import Job, Node, Spare, several
from gridctl.model.runs import ENDS, Incident, Run


def _state(node: Node) -> str:
    if not node.asked:
        return "unknown"
    if not node.reachable or node.status is None:
        return "unreachable"
    if node.status.quarantined:
        return "quarantined"
    return "cordoned" if node.status.cordoned else "ready"


def _why(node: Node) -> str:
    if not node.reachable:
        return node.error or "not asked yet"
    return node.status.cordon_reason if node.status else ""


NODES = (
    Column("name", lambda n: n.name),
    Column("state", _state),
    Column("rack", lambda n: n.status.rack if n.status and n.status.rack else n.rack),
    Column("gpus", lambda n: n.status.gpus if n.status else None),
    Column("ranks", lambda n: [f"{r.job}/{r.rank}" for r in n.status.ranks] if n.status else []),
    Column("spares", lambda n: len(n.status.spares) if n.status else None),
    Column("frozen", lambda n: n.status.frozen if n.status else []),
    Column("skew_s", lambda n: round(n.skew_s, 3), lambda skew: f"{skew:+.3f} s"),
    Column("seen_unix_s", lambda n: n.seen_unix_s, lambda t: f"{age(t)} ago" if t else "never"),
    Column("why", _why),
)

RANKS = (
    Column("rank", lambda r: r.rank),
    Column("node", lambda r: r.node),
    Column("state", lambda r: r.state),
    Column("epoch", lambda r: r.epoch),
    Column("step", lambda r: r.step),
    Column("step_s_median", lambda r: r.step_s_median, lambda s: f"{s * 1000:.0f} ms" if s else "-"),
    Column("loss", lambda r: r.loss, lambda loss: "-" if loss is None else f"{loss:.4f}"),
    Column("pid", lambda r: r.pid),
    Column("session", lambda r: r.session),
)

JOBS = (
    Column("name", lambda j: j.name),
    Column("state", lambda j: j.state),
    Column("ranks", lambda j: len(j.ranks)),
    Column("world_size", lambda j: j.world_size),
    Column("epoch", lambda j: j.epoch),
    Column("step", lambda j: j.step),
    Column("nodes", lambda j: sorted({rank.node for rank in j.ranks})),
)

SPARES = (
    Column("node", lambda s: s.node),
    Column("state", lambda s: s.state),
    Column("rack", lambda s: s.rack),
    Column("gpus", lambda s: s.gpus),
    Column("session", lambda s: s.session),
    Column("why", lambda s: s.why),
)


def fleet(context: typer.Context, output: Output = Format.table, watch: Watch = False) -> None:
    """The fleet in one view: who steers, who answers, what runs."""
    console = Console.of(context)

    def fetch() -> dict[str, Any]:
        nodes = console.controller.view("nodes", Node)
        told = [node.status for node in nodes if node.status]
        running = [run for run in console.controller.view("runs", Run) if run.state not in ENDS]
        return {
            **console.controller.health(),
            "nodes": len(nodes),
            "nodes_ready": sum(_state(node) == "ready" for node in nodes),
            "nodes_unreachable": [node.name for node in nodes if not node.reachable],
            "jobs": [job.name for job in console.controller.view("jobs", Job)],
            "spares_parked": sum(
                spare.state == "parked" for spare in console.controller.view("spares", Spare)
            ),
            "incidents_open": [
                i.id for i in console.controller.view("incidents", Incident) if i.state == "open"
            ],
            "runs_not_ended": [run.id for run in running],
            "lease_holders": sorted({status.lease_holder for status in told if status.lease_holder}),
            "frozen": sorted({scope for status in told for scope in status.frozen}),
            "frozen_by": sorted({f"{scope}: {by}" for s in told for scope, by in s.frozen_by.items()}),
        }

    read(fetch, _fleet_page, output, watch)


def _fleet_page(found: dict[str, Any]) -> Page:
    columns = [Column(key, itemgetter(key), local if key.endswith("_unix_s") else None) for key in found]
    shown = [
        Column(column.title, column.value, several) if isinstance(found[column.title], list) else column
        for column in columns
        if column.title != "followed"
    ]
    return Page(data=found, columns=columns, items=[found], upright=True, shown=shown)


def nodes(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Only this node.", autocompletion=complete.nodes)] = "",
    output: Output = Format.table,
    watch: Watch = False,
) -> None:
    """Nodes: do they answer, are they cordoned, what runs there.

    A node that does not answer is unknown, which is not the same as failed.
    """
    console = Console.of(context)

    def fetch() -> list[Node]:
        found = [node for node in console.controller.view("nodes", Node) if name in ("", node.name)]
        if name and not found:
            raise Refused("unknown-node", f"the fleet has no node {name!r}; `gridctl nodes` lists them")
        return found

    read(
        fetch, lambda found: listing(found, NODES, "no nodes: `gridctl enroll NODE` adds one"), output, watch
    )


def jobs(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The ranks of this job.", autocompletion=complete.jobs)] = "",
    output: Output = Format.table,
    watch: Watch = False,
) -> None:
    """Jobs that train; with a name, the ranks of that job."""
    console = Console.of(context)

    def page(found: list[Job]) -> Page:
        if not name:
            return listing(found, JOBS, "no jobs: `gridagent exec --job NAME -- ...` starts a rank of one")
        job = next((job for job in found if job.name == name), None)
        if job is None:
            raise Refused("unknown-job", f"no job {name!r} trains; `gridctl jobs` lists them")
        facts = [("job", job.name), ("state", job.state), ("epoch", job.epoch), ("step", job.step)]
        return Page(data=full(job), columns=RANKS, items=job.ranks, facts=facts)

    read(lambda: console.controller.view("jobs", Job), page, output, watch)


def spares(context: typer.Context, output: Output = Format.table, watch: Watch = False) -> None:
    """Parked processes that can take a rank."""
    console = Console.of(context)
    read(
        lambda: console.controller.view("spares", Spare),
        lambda found: listing(found, SPARES, "no spares: `gridagent park` on a free node parks one"),
        output,
        watch,
    )
