"""What is out there: nodes, and the jobs, ranks and spares that their agents report."""

from collections.abc import Iterable
from typing import Any

import msgspec

from gridagent.wire import NodeStatus, RankStatus, SpareStatus


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node as this controller knows it."""

    name: str
    url: str
    rack: str = ""
    reachable: bool = False
    error: str = ""  #: why it does not answer; such a node is unknown, not failed
    seen_unix_s: float = 0.0  #: when `status` was fetched, by the controller's clock
    skew_s: float = 0.0  #: the node's clock minus the controller's, less half of the round trip
    status: NodeStatus | None = None  #: the last answer, kept when the node falls silent
    #: Ranks that it once told of and does not know any more (its agent, or all of it, began anew), as long as
    #: others of their job are in the same epoch: where such a rank was is known from nobody else.
    missed: list[RankStatus] = []

    @property
    def asked(self) -> bool:
        """Whether it was asked at all since the controller knows of it."""
        return self.reachable or bool(self.error)


class Sample(msgspec.Struct, frozen=True):
    """What a device of a node has told of itself last."""

    t_unix_s: float  #: by the node's clock
    values: dict[str, Any]
    about: dict[str, str] = {}  #: which device it is: uuid, pci and so on, as far as that was told


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank of a job, and the process that holds it."""

    job: str
    rank: int
    node: str
    session: str
    pid: int
    epoch: int
    step: int
    state: str  #: training, standing, frozen, finished, lost, unknown (the node does not answer, or not yet)
    ward: int = -1  #: while it stands: the rank that it can speak for
    mark: str = ""  #: of a dead process: what it wrote down last of its small state
    gpus: list[int] = []
    step_s_median: float = 0.0
    t_step_unix_s: float = 0.0
    loss: float | None = None


_AT_WORK = ("training", "standing")
#: A rank's process in such a state does not train in its job's epoch any more.
GIVEN_UP = ("lost", "frozen")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training job. `ranks` has the present holder of every rank that somebody reports."""

    name: str
    world_size: int
    epoch: int
    step: int
    ranks: list[Rank]
    #: training, finished, standing (a rank's process died, or its node with it; the others hold the step and
    #: wait for a new one), incomplete (a rank is missing, lost or unknown)
    state: str


#: States of a spare that waits: with the last two it takes no rank until its node is open again.
WAITING = ("parked", "cordoned", "quarantined")


class Spare(msgspec.Struct, frozen=True, kw_only=True):
    """A parked process that can take a rank."""

    node: str
    session: str
    state: str  #: one of `WAITING`, specialising, warm, taken, lost, unknown
    why: str = ""  #: who cordoned its node and why, or why it is unknown
    rack: str = ""
    gpus: list[int] = []
    facts: dict[str, str] = {}
    environment: dict[str, str] | None = None  #: variable -> digest; None: unknown


NAMED_MAX = 6


def several(names: Iterable[str]) -> str:
    """Names for a sentence: all of a few, the first of many and how many more."""
    found = sorted(names)
    named = ", ".join(found[:NAMED_MAX])
    return f"{named} and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else named


def ranks_of(node: Node) -> list[Rank]:
    """The rank processes of a node, frozen, finished and missed ones included."""
    if node.status is None:
        return []
    # A new agent that waits for no session any more is sure that there is no such process.
    gone = "lost" if node.reachable and node.status.complete else "unknown"
    told = [_rank(node, rank) for rank in node.status.ranks]
    return told + [msgspec.structs.replace(_rank(node, rank), state=gone) for rank in node.missed]


def missed(before: Node, now: Node, nodes: Iterable[Node]) -> list[RankStatus]:
    """What `Node.missed` is once a node has given another answer. `nodes`: all, as they were last."""
    if before.status is None or now.status is None:
        return before.missed
    known = {rank.session for rank in now.status.ranks}
    had = [rank for rank in before.status.ranks if rank.state in (*_AT_WORK, "lost")]
    gone = [rank for rank in (*before.missed, *had) if rank.session not in known]
    if not gone:
        return []
    others = [now, *(node for node in nodes if node.name != now.name)]
    live = {
        (rank.job, rank.epoch)
        for node in others
        if node.status
        for rank in node.status.ranks
        if rank.state in _AT_WORK
    }
    marks = now.status.marks  # what a process wrote down outlives the agent that knew it
    return [
        msgspec.structs.replace(rank, mark=marks.get(rank.session, rank.mark))
        for rank in gone
        if (rank.job, rank.epoch) in live
    ]


def jobs(nodes: Iterable[Node]) -> list[Job]:
    """All jobs. Where two processes claim a rank the one that trains in the newest epoch holds it."""
    holders: dict[str, dict[int, Rank]] = {}
    sizes: dict[str, int] = {}
    for node in nodes:
        for reported in node.status.ranks if node.status else []:
            sizes[reported.job] = max(sizes.get(reported.job, 0), reported.world_size)
        for rank in ranks_of(node):
            held = holders.setdefault(rank.job, {})
            if rank.rank not in held or _claim(rank) > _claim(held[rank.rank]):
                held[rank.rank] = rank
    return [_job(name, sizes[name], held) for name, held in sorted(holders.items()) if name in sizes]


def outlived(node: Node, jobs: Iterable[Job]) -> list[tuple[Rank, Rank]]:
    """Processes on a node whose rank another one holds by now, each with that holder.

    A source that waits to be released, or one that was taken for dead and is back: it trains no further.
    """
    holders = {(rank.job, rank.rank): rank for job in jobs for rank in job.ranks}
    found = [(rank, holders.get((rank.job, rank.rank), rank)) for rank in ranks_of(node)]
    gone = ("finished", "lost")
    return [(old, now) for old, now in found if old.session != now.session and old.state not in gone]


def spares(nodes: Iterable[Node]) -> list[Spare]:
    """All spare processes, by node."""
    return [_spare(node, spare) for node in nodes if node.status for spare in node.status.spares]


def _claim(rank: Rank) -> tuple[bool, int, bool, int]:
    alive = rank.state in ("training", "standing", "finished")
    return (alive, rank.epoch, rank.state in ("training", "standing"), rank.step)


def _rank(node: Node, rank: RankStatus) -> Rank:
    state = rank.state if rank.connected or rank.state not in ("training", "standing") else "lost"
    return Rank(
        job=rank.job,
        rank=rank.rank,
        node=node.name,
        session=rank.session,
        pid=rank.pid,
        epoch=rank.epoch,
        step=rank.step,
        state=state if node.reachable else "unknown",
        ward=rank.ward,
        mark=rank.mark,
        gpus=rank.gpus,
        step_s_median=rank.step_s_median,
        t_step_unix_s=rank.t_step_unix_s,
        loss=rank.loss,
    )


def _job(name: str, world_size: int, held: dict[int, Rank]) -> Job:
    ranks = [held[rank] for rank in sorted(held)]
    states = {rank.state for rank in ranks}
    if len(ranks) == world_size and states == {"finished"}:
        state = "finished"
    elif len(ranks) == world_size and states <= {"training", "finished"}:
        state = "training"
    elif len(ranks) == world_size and "standing" in states and states <= {"standing", "unknown", *GIVEN_UP}:
        state = "standing"
    else:
        state = "incomplete"
    return Job(
        name=name,
        world_size=world_size,
        epoch=max(rank.epoch for rank in ranks),
        step=max(rank.step for rank in ranks),
        ranks=ranks,
        state=state,
    )


def _spare(node: Node, spare: SpareStatus) -> Spare:
    state, why = spare.state if spare.connected else "lost", ""
    if not node.reachable:
        state, why = "unknown", f"{node.name} does not answer"
    elif state == "parked" and node.status and (node.status.quarantined or node.status.cordoned):
        state = "quarantined" if node.status.quarantined else "cordoned"
        why = f"by {node.status.cordon_owner or 'somebody'}: {node.status.cordon_reason or 'no reason given'}"
    return Spare(
        node=node.name,
        session=spare.session,
        state=state,
        why=why,
        rack=node.status.rack if node.status else node.rack,
        gpus=spare.gpus,
        facts=spare.facts,
        environment=spare.environment,
    )
