"""Prechecks and verifications of steps, by the names that plans carry. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gridagent.wire import CutReport, SessionReport
from gridctl.model.fleet import Node, Rank, Sample, ranks_of
from gridctl.model.plans import Plan, Step
from gridctl.model.runs import Incident
from gridctl.runbook.basis import changes, of_report
from gridctl.runbook.events import OpEnded

OWNER = "gridctl"


@dataclass(frozen=True)
class Problem:
    """Why a check does not hold. `final`: it will not hold a moment later either."""

    code: str
    text: str
    final: bool = True


@dataclass(frozen=True)
class Context:
    """What a check may look at."""

    plan: Plan
    step: Step
    values: Sequence[Any]  #: of the step's calls, in their order
    nodes: Mapping[str, Node]  #: those of the plan, asked after the calls
    samples: Mapping[str, Sample] = field(default_factory=dict)  #: of the node's devices, the newest
    incident: Incident | None = None  #: of the plan
    done: Mapping[str, Sequence[Any]] = field(default_factory=dict)  #: earlier steps -> the values of theirs
    failure: OpEnded | None = None  #: of a call that brought no report


Check = Callable[[Context], Problem | None]


def _nothing(context: Context) -> Problem | None:
    return None


def _reports_hold(context: Context) -> Problem | None:
    """The sessions still say what they said when the plan was made."""
    for move, value in zip(context.plan.moves, context.values, strict=True):
        try:
            report = msgspec.convert(value, SessionReport)
        except msgspec.ValidationError as error:
            return Problem("version-skew", f"a session's report is not understood: {error}")
        if report.role != "rank":
            continue
        report = msgspec.structs.replace(report, rank=move.rank)  # a deputy speaks for another rank
        if fatal := [blocker for blocker in report.blockers if blocker.fatal]:
            return Problem("not-possible", f"rank {report.rank}: {fatal[0].text}")
        now = of_report(report)
        if changed := changes({key: context.plan.relied_on.get(key, "") for key in now}, now):
            return Problem("stale-plan", f"changed since the plan was made: {'; '.join(changed)}")
    return None


def _cordoned(context: Context) -> Problem | None:
    status = _status(context, context.plan.node)
    if status is None:
        return _unreachable(context, context.plan.node)
    if status.cordoned:
        return None
    return Problem("step-failed", f"{context.plan.node} took the cordon but does not show it", final=False)


def _warm(context: Context) -> Problem | None:
    """Every spare has become the rank that it was made for."""
    for move, value in zip(context.plan.moves, context.values, strict=True):
        report = msgspec.convert(value, SessionReport)
        if report.rank != move.rank or report.job != context.plan.job:
            return Problem(
                "step-failed",
                f"the spare on {move.target.node} warmed up as rank {report.rank} of {report.job or 'no job'}"
                f" and not as rank {move.rank} of {context.plan.job}",
            )
        if fatal := [blocker for blocker in report.blockers if blocker.fatal]:
            return Problem("not-possible", f"the spare on {move.target.node}: {fatal[0].text}")
        if differ := _script(context.plan, report, move.target.node):
            return Problem("not-possible", differ)
        if differ := _numerics(context.plan, report) or _rehearsed(report):
            return Problem(
                "not-possible",
                f"the spare on {move.target.node} would not go on bit-identically as the plan says: {differ}",
            )
        wanted = context.plan.relied_on.get(f"rank {move.rank} inventory", "")
        if wanted and report.inventory and report.inventory != wanted:
            return Problem(
                "not-possible",
                f"the spare on {move.target.node} built other state tensors than rank {move.rank} has:"
                " the script does not build the same model from the same command line",
            )
    return None


def _script(plan: Plan, report: SessionReport, node: str) -> str:
    """That the spare ran another script than the source runs: it would train something else."""
    here, there = plan.relied_on.get(f"rank {report.rank} fact script", ""), report.facts.get("script", "")
    if not here or not there or here == there:
        return ""
    return (
        f"the script on {node}, or a module that it imports, is another one than rank {report.rank} runs"
        f" (digests {there} and {here}): was it edited since the job was started? Put the job's files there"
    )


def _numerics(plan: Plan, report: SessionReport) -> str:
    """What decides numerics and is different from the source, and was not said in the plan."""
    said = {blocker.code for blocker in plan.blockers}
    here = of_report(report)
    there = {key: value for key, value in plan.relied_on.items() if " fact " in key and key in here}
    return "; ".join(
        line
        for key, value in there.items()
        if f"{key.rpartition(' ')[2]}-differs" not in said
        for line in changes({key: value}, here)
    )


def _rehearsed(report: SessionReport) -> str:
    """What only a spare can try, once it is warm: that its loaders, opened anew, go on alike."""
    return "; ".join(blocker.text for blocker in report.blockers if blocker.code == "loader-reopened")


def _all_training(context: Context) -> Problem | None:
    """Asked right before the pause: nobody is cut into a job that is not whole, or does not wait for it."""
    wanted = "standing" if context.plan.standing else "training"
    for member in context.plan.members:
        if member.role == "target":
            continue
        if _status(context, member.node) is None:
            return _unreachable(context, member.node)
        rank = _find(context, member.session)
        if rank is None or rank.state != wanted:
            state = rank.state if rank else "gone"
            return Problem(
                "rank-silent", f"rank {member.rank} on {member.node} is {state}; nothing was paused"
            )
        if rank.epoch != context.plan.epoch_from:
            return Problem(
                "boundary-past",
                f"rank {member.rank} is in epoch {rank.epoch}, not {context.plan.epoch_from}: another"
                " hand-over took place; make a new plan",
            )
    return None


def _committed(context: Context) -> Problem | None:
    report = msgspec.convert(context.values[0], CutReport)
    if report.outcome == "commit":
        return None
    found = "; ".join(report.found)
    text = report.reason + (f" ({found})" if found else "")
    if report.outcome == "returned":
        return Problem(
            "target-lost", f"{text}; {_after_return(context.plan.standing)} in epoch {report.epoch}"
        )
    if report.outcome == "abort":
        goes_on = "the others still stand" if context.plan.standing else "training went on"
        return Problem("cut-aborted", f"{text}; {goes_on} in epoch {report.epoch}")
    return Problem("job-lost", f"{text}; the job lost a rank it cannot train without and must be requeued")


def _released(context: Context) -> Problem | None:
    """The old processes are gone, or their node is: unknown there, but fenced by their epoch."""
    for move in context.plan.moves:
        rank = _find(context, move.holder) if move.holder else None
        if rank and rank.state in ("training", "frozen"):
            text = f"rank {move.rank}'s old process on {move.origin} is still {rank.state}"
            return Problem("step-failed", text, final=False)
    return None


CHECKS: dict[str, Check] = {
    "": _nothing,
    "reports-hold": _reports_hold,
    "cordoned": _cordoned,
    "warm": _warm,
    "all-training": _all_training,
    "committed": _committed,
    "released": _released,
}


def settled(context: Context, *, final: bool) -> Problem | None:
    """How a cut ended whose report was lost, read off the ranks: a problem of code "committed",
    "target-lost", "cut-aborted" or "job-lost"; None while nobody can say.

    That the old members train in the old epoch proves nothing before every deadline of the cut has
    passed (`final`); that a target trains, that the epoch of a return is reached, or that nobody lives
    any more of those who train, proves it at once.
    """
    plan = context.plan
    sources = [_find(context, move.source.session) for move in plan.moves]
    targets = [_find(context, move.target.session) for move in plan.moves]
    if all(_trains(rank, plan.epoch_to) for rank in targets):
        return Problem("committed", "the new process trains: the cut was committed")
    old = sources + [_find(context, m.session) for m in plan.members if m.role == "survivor"]
    if all(_goes_on(rank, plan.epoch_to + 1, plan.standing) for rank in (old if plan.standing else sources)):
        text = "the new process was lost before its first step"
        return Problem("target-lost", f"{text}; {_after_return(plan.standing)} in epoch {plan.epoch_to + 1}")
    if all(_lost(context, member.session) for member in plan.members if member.role != "target"):
        return Problem("job-lost", "every process that trained has ended: the job must be requeued")
    if final:
        survivors = [_find(context, m.session) for m in plan.members if m.role == "survivor"]
        if any(_trains(rank, plan.epoch_to) for rank in survivors):
            return Problem("committed", "the survivors train in the new epoch: the cut was committed")
        if all(_trains(rank, plan.epoch_from) for rank in sources):
            return Problem("cut-aborted", "the old members train on in the old epoch: the cut was called off")
        if plan.standing and all(rank and rank.state == "standing" for rank in survivors):
            return Problem("cut-aborted", "the others still stand: the cut was called off")
        if all(_status(context, m.node) for m in plan.members) and not any(
            rank.job == plan.job and rank.state in ("training", "standing", "frozen", "unknown")
            for node in context.nodes.values()
            for rank in ranks_of(node)
        ):
            return Problem("job-lost", "no process of the job lives: it must be requeued")
    return None


def _lost(context: Context, session: str) -> bool:
    """Whether its agent, asked just now, is sure that the process has ended."""
    nodes = [node.status for node in context.nodes.values() if node.reachable and node.status]
    return any((r.session, r.state) == (session, "lost") for status in nodes for r in status.ranks)


def _trains(rank: Rank | None, epoch: int) -> bool:
    return rank is not None and rank.epoch == epoch and rank.state in ("training", "finished")


def _goes_on(rank: Rank | None, epoch: int, standing: bool) -> bool:
    """It has returned to the job. Where ranks are without a process it tries the step, and stands again."""
    return _trains(rank, epoch) or (
        standing and rank is not None and rank.epoch == epoch and rank.state == "standing"
    )


def _after_return(standing: bool) -> str:
    return "the others still stand, now" if standing else "the old members train on"


def _status(context: Context, name: str) -> Any:
    node = context.nodes.get(name)
    return node.status if node and node.reachable else None


def _find(context: Context, session: str) -> Rank | None:
    for node in context.nodes.values():
        for rank in ranks_of(node):
            if rank.session == session:
                return rank
    return None


def _unreachable(context: Context, name: str) -> Problem:
    node = context.nodes.get(name)
    why = node.error if node else "not asked"
    return Problem("node-unreachable", f"{name} does not answer ({why}): unknown, not failed", final=False)
