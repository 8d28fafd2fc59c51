"""Who takes part in a swap: ranks, spares and chair, or everything that stands in the way. Pure."""

from collections.abc import Mapping

import msgspec

from gridagent.wire import Blocker, Member, NodeStatus
from gridctl.errors import Refused
from gridctl.model.fleet import GIVEN_UP, Job, Node, Rank, Spare, jobs, ranks_of, several
from gridctl.model.plans import Move, Request
from gridctl.model.policy import Policy
from gridctl.runbook import preflight
from gridctl.runbook.preflight import fatal
from gridctl.runbook.spares import NOBODY, Claims, choose

#: States of a rank whose job goes on, or waits to.
GOING = ("training", "standing")


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Who takes part."""

    request: Request
    job: Job
    moves: list[Move]
    spares: list[Spare]
    members: list[Member]
    chair: Member
    blockers: list[Blocker]
    notes: list[str] = []

    @property
    def standing(self) -> bool:
        """Training stands in a spoilt step: a rank has no process any more, or a connection broke."""
        return self.job.state == "standing"

    @property
    def processes(self) -> list[Member]:
        """The members without those that a deputy speaks for: one for every process that takes part."""
        dead = {move.rank for move in self.moves if move.dead}
        return [member for member in self.members if not (member.role == "source" and member.rank in dead)]

    def deputy(self, move: Move) -> Member:
        """The survivor that speaks for a dead rank, as itself."""
        return next(m for m in self.members if (m.role, m.session) == ("survivor", move.source.session))


def select(request: Request, nodes: Mapping[str, Node], policy: Policy, claims: Claims = NOBODY) -> Selection:
    """Chooses ranks, spares and chair. Raises `Refused` with everything that stands in the way."""
    nodes = _taken_for_dead(request, nodes) if request.assume_dead else nodes
    source = nodes.get(request.node)
    if source is None:
        raise Refused("unknown-node", f"the fleet has no node {request.node}; it has {several(nodes)}")
    if request.to and request.to not in nodes:
        raise Refused("unknown-node", f"the fleet has no node {request.to}; it has {several(nodes)}")
    refuse_if_fatal(list(preflight.of_node(source, request.job, policy)) + _offer(source, nodes))
    job = _job(request, source, nodes)
    leaving = _leaving(request, source, job)
    blockers = list(preflight.of_job(job))
    for name in sorted({rank.node for rank in job.ranks}):
        blockers += preflight.of_node(nodes[name], job.name, policy)
    staying = [rank for rank in job.ranks if rank not in leaving]
    if not staying:
        blockers.append(
            fatal(
                "no-survivor",
                f"all ranks of {job.name} would leave {source.name}: at least one must stay to arbitrate;"
                " evacuate single devices instead",
            )
        )
    chosen, objections = choose(leaving, source, nodes, policy, request.to, claims)
    refuse_if_fatal(blockers + objections)
    for spare in chosen:
        blockers += preflight.of_spare(
            status_of(source), len(leaving[0].gpus), spare, nodes[spare.node], policy
        )
    moves = [
        _move(rank, _speaker(rank, staying), spare, nodes)
        for rank, spare in zip(leaving, chosen, strict=True)
    ]
    blockers += [_unproven(rank, job) for rank in leaving if not _is_known(rank, job)]
    survivors = [_member("survivor", rank.rank, rank, nodes) for rank in staying]
    involved = {member.node for move in moves for member in (move.source, move.target)}
    chair = min(survivors, key=lambda member: (member.node in involved, member.rank))
    members = sorted(survivors + [move.source for move in moves], key=lambda member: member.rank)
    members += [move.target for move in moves]
    return Selection(
        request=request,
        job=job,
        moves=moves,
        spares=chosen,
        members=members,
        chair=chair,
        blockers=blockers,
        notes=claims.notes(chosen, job.name),
    )


def _taken_for_dead(request: Request, nodes: Mapping[str, Node]) -> Mapping[str, Node]:
    """The nodes as they are if nothing lives on the one that is to be left. Raises `Refused`.

    Safe where its job stands: the others have dropped the groups of their epoch, no step of it is done
    without them, and none of the next one with a process that is no member of the hand-over
    (`train/recovery.py`).
    """
    source = nodes.get(request.node)
    if source is None:
        return nodes  # refused by its name
    if source.reachable or source.status is None:
        why = (
            "answers"
            if source.reachable
            else "has told this controller nothing yet: what was on it is unknown"
        )
        raise Refused("bad-request", f"{source.name} {why}; --assume-dead is for a node that fell silent")
    if not _stand_for(source, nodes):
        raise Refused(
            "not-now",
            f"no job stands for want of a rank on {source.name}: as long as the others train, or may, what is"
            " on a silent node is not taken for dead",
        )
    ranks = [msgspec.structs.replace(r, state="lost") for r in (*source.status.ranks, *source.missed)]
    status = msgspec.structs.replace(source.status, ranks=ranks, spares=[])
    dead = msgspec.structs.replace(source, reachable=True, skew_s=0.0, status=status, missed=[])
    return {**nodes, source.name: dead}


def _stand_for(source: Node, nodes: Mapping[str, Node]) -> list[str]:
    """The jobs that stand and have a rank on a node, as far as is known."""
    standing = [job for job in jobs(nodes.values()) if job.state == "standing"]
    return [job.name for job in standing if any(rank.node == source.name for rank in job.ranks)]


def _offer(source: Node, nodes: Mapping[str, Node]) -> list[Blocker]:
    """What else can be done about a silent node for which a job stands."""
    if source.reachable or not (stand := _stand_for(source, nodes)):
        return []
    text = f"{', '.join(stand)} stands meanwhile. Where you know that {source.name} is dead:"
    return [
        fatal("job-stands", f"{text} `gridctl swap plan {source.name} --assume-dead`, which says its risk")
    ]


def _job(request: Request, source: Node, nodes: Mapping[str, Node]) -> Job:
    found = {job.name: job for job in jobs(nodes.values())}
    here = {r.job for r in ranks_of(source) if r.job in found and r.state != "finished"}
    # A job of which nothing is left but the dead is over, whatever else of it is remembered here.
    live = sorted(name for name in here if any(r.state in (*GOING, "unknown") for r in found[name].ranks))
    if request.job and request.job not in live:
        raise Refused(
            "unknown-job",
            f"no rank of job {request.job} is live on {source.name}; there: {', '.join(live) or 'none'}",
        )
    if not request.job and len(live) > 1:
        raise Refused(
            "bad-request",
            f"ranks of several jobs run on {source.name}: choose one (--job {' or '.join(live)})",
        )
    if not live:
        raise Refused("nothing-to-move", f"no live rank runs on {source.name}: there is nothing to swap")
    name = request.job or live[0]
    return found[name]


def _leaving(request: Request, source: Node, job: Job) -> list[Rank]:
    here = [rank for rank in job.ranks if rank.node == source.name]
    if job.state == "standing":
        return _of_standing(source, job)
    if request.devices:
        here = [rank for rank in here if any(f"gpu:{gpu}" in request.devices for gpu in rank.gpus)]
    if not here:
        what = f" on {', '.join(request.devices)}" if request.devices else ""
        raise Refused("nothing-to-move", f"no live rank of {job.name} runs on {source.name}{what}")
    return here


def _of_standing(source: Node, job: Job) -> list[Rank]:
    """All ranks without a process: the job goes on once each of them has a new one.

    Where none has died a connection broke: then whoever is on the node that is to be left.
    """
    dead = [rank for rank in job.ranks if rank.state in GIVEN_UP]
    if dead and not any(rank.node == source.name for rank in dead):
        where = ", ".join(f"rank {rank.rank} on {rank.node}" for rank in dead)
        raise Refused(
            "job-stands",
            f"{job.name} stands in step {job.step} because a process died ({where}): first bring a new one"
            f" in, `gridctl swap plan {dead[0].node}`",
        )
    return dead or [rank for rank in job.ranks if rank.node == source.name]


def _speaker(rank: Rank, staying: list[Rank]) -> Rank:
    """Who gives the rank's state: its process, or the survivor that keeps what is special to it."""
    if rank.state not in GIVEN_UP:
        return rank
    for survivor in staying:
        if survivor.ward == rank.rank:
            return survivor
    raise Refused(
        "state-lost",
        f"rank {rank.rank} of {rank.job} died and no living rank keeps its loader's position, random state"
        " and buffers (its keeper died too, or no step was finished since one of them came): requeue the"
        " job, it starts from its checkpoint",
    )


def _is_known(rank: Rank, job: Job) -> bool:
    """Can what a deputy gives for a dead rank be compared with what that rank had?"""
    return rank.state not in GIVEN_UP or rank.mark.partition(" ")[0] == str(job.step)


def _unproven(rank: Rank, job: Job) -> Blocker:
    known = rank.mark.partition(" ")[0]
    why = (
        f"the last that it wrote down is of step {known}" if known else "nothing that it wrote down is known"
    )
    return Blocker(
        code="not-proven",
        text=f"rank {rank.rank} died before it wrote down what its state was at the start of step {job.step}"
        f" ({why}): it is put together from its last vote, and what the script changed after that on this"
        " rank alone, for the first time, is not in it",
        fatal=False,
    )


def _move(rank: Rank, speaker: Rank, spare: Spare, nodes: Mapping[str, Node]) -> Move:
    return Move(
        rank=rank.rank,
        source=_member("source", rank.rank, speaker, nodes, "" if speaker is rank else rank.mark),
        target=_member("target", rank.rank, spare, nodes),
        origin=rank.node,
        origin_url=nodes[rank.node].url,
        holder="" if rank.state == "lost" else rank.session,
        dead=speaker is not rank,
        gpus=rank.gpus,
    )


def _member(role: str, rank: int, holder: Rank | Spare, nodes: Mapping[str, Node], mark: str = "") -> Member:
    url = nodes[holder.node].url
    return Member(role=role, rank=rank, node=holder.node, url=url, session=holder.session, mark=mark)


def status_of(node: Node) -> NodeStatus:
    """The status of a node that the pre-flight has found reachable."""
    assert node.status is not None
    return node.status


def refuse_if_fatal(blockers: list[Blocker]) -> None:
    """Raises `Refused` with the first fatal blocker's code and all blockers."""
    for blocker in blockers:
        if blocker.fatal:
            raise Refused(blocker.code, blocker.text, tuple(blockers))
