"""What is live: fleet, nodes, jobs, spares."""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import typer

from gridctl.cli import complete
from gridctl.cli.console import Console
from gridctl.cli.output import Column, Format
from gridctl.cli.page import Output, Page, Watch, age, full, listing, local, read
from gridctl.errors import Refused
from gridctl.model.fleet import Job, Node, Rank, Spare, outlived, ranks_of, several
from gridctl.model.runs import ENDS, Incident, Run


def _state(node: Node) -> str:
    if not node.asked:
        return "unknown"
    if not node.reachable or node.status is None:
        return "unreachable"
    if node.status.quarantined:
        return "quarantined"
    return "cordoned" if node.status.cordoned else "ready"


class Hosted(NamedTuple):
    """A node, the ranks whose processes died there in jobs that stand, and those whose rank is elsewhere."""

    node: Node
    dead: list[Rank]
    old: list[tuple[Rank, Rank]]


def hosted(nodes: Iterable[Node], jobs: Iterable[Job]) -> list[Hosted]:
    """Nodes with what is to be said of their ranks."""
    jobs = list(jobs)
    dead = [rank for job in jobs if job.state == "standing" for rank in job.ranks if rank.state == "lost"]
    return [
        Hosted(node, [rank for rank in dead if rank.node == node.name], outlived(node, jobs))
        for node in nodes
    ]


def nodes_page(found: Sequence[Hosted]) -> Page:
    """Nodes as a page."""
    empty = "no nodes: `gridctl enroll NODE` adds one"
    return Page(data=[full(its.node) for its in found], columns=NODES, items=found, empty=empty)


def _why(its: Hosted) -> str:
    node = its.node
    said = [f"rank {rank.rank} of {rank.job} died; the job stands" for rank in its.dead]
    said += [
        f"rank {now.rank} of {now.job} is on {now.node} since epoch {now.epoch}; process {old.pid} here, of"
        f" epoch {old.epoch}, is what is left of it"
        for old, now in its.old
    ]
    if not node.reachable:
        said.insert(0, node.error or "not asked yet")
    elif node.status and node.status.cordon_reason:
        said.append(node.status.cordon_reason)
    return "; ".join(said)


def _ranks(its: Hosted) -> list[str]:
    """Those that are at work, or hold something: what ended here, or went elsewhere, is no rank of it."""
    marks = {rank.session: "died" for rank in its.dead} | {old.session: "old" for old, _ in its.old}
    here = [rank for rank in ranks_of(its.node) if rank.state in _HERE or rank.session in marks]
    return [f"{r.job}/{r.rank}" + (f":{marks[r.session]}" if r.session in marks else "") for r in here]


#: States of a rank that its node has; "unknown" where that node does not answer and had it last.
_HERE = ("training", "standing", "frozen", "unknown")


NODES = (
    Column("name", lambda h: h.node.name),
    Column("state", lambda h: _state(h.node)),
    Column("rack", lambda h: h.node.status.rack if h.node.status and h.node.status.rack else h.node.rack),
    Column("gpus", lambda h: h.node.status.gpus if h.node.status else None),
    Column("ranks", _ranks),
    Column("spares", lambda h: len(h.node.status.spares) if h.node.status else None),
    Column("frozen", lambda h: h.node.status.frozen if h.node.status else []),
    Column("skew_s", lambda h: round(h.node.skew_s, 3), lambda skew: f"{skew:+.3f} s"),
    Column("seen_unix_s", lambda h: h.node.seen_unix_s, lambda t: f"{age(t)} ago" if t else "never"),
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
            "incidents_open": [i.id for i in console.controller.view("open-incidents", Incident)],
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

    def fetch() -> list[Hosted]:
        found = [node for node in console.controller.view("nodes", Node) if name in ("", node.name)]
        if name and not found:
            raise Refused("unknown-node", f"the fleet has no node {name!r}; `gridctl nodes` lists them")
        return hosted(found, console.controller.view("jobs", Job))

    read(fetch, nodes_page, output, watch)


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
