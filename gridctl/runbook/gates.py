"""What must be true before a plan is run: it is the one that was shown, it is fresh, somebody means it."""

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from gridctl.errors import Refused
from gridctl.model.fleet import Node, several
from gridctl.model.plans import Gate, Plan
from gridctl.model.runs import Run
from gridctl.runbook import basis
from gridctl.runbook.spares import Claims

#: A time service may set a clock back by so much while a plan is looked at.
CLOCK_SLACK_S = 5.0
#: What a site has accepted by its policy (`require_same_driver = false`), also where nobody looks.
ACCEPTED = ("driver-differs",)

_canonical = msgspec.json.Encoder(order="deterministic").encode


def digest(plan: Plan) -> str:
    """SHA-256 over the plan's JSON without its digest, keys in order."""
    return hashlib.sha256(_canonical(msgspec.structs.replace(plan, digest=""))).hexdigest()


def seal(plan: Plan) -> Plan:
    """The plan with its digest."""
    return msgspec.structs.replace(plan, digest=digest(plan))


def check_gate(plan: Plan, gate: Gate) -> None:
    """Raises `Refused` unless this very plan was confirmed, with a reason."""
    if digest(plan) != plan.digest or gate.digest != plan.digest:
        raise Refused(
            "wrong-digest",
            f"plan {plan.id} has digest {plan.digest[:12]}, confirmed was {gate.digest[:12] or 'none'}:"
            " look at the plan again",
        )
    check_meant(plan.node, gate)


def for_a_person(plan: Plan) -> list[str]:
    """Why nobody but a person may apply this plan: what keeps it from being proven bit-identical.

    A live swap may go on where the site has accepted the difference; a dead rank's state is not to be had
    a second time.
    """
    accepted = () if plan.standing else ACCEPTED
    return [blocker.text for blocker in plan.blockers if blocker.code not in accepted]


def check_meant(name: str, gate: Gate) -> None:
    """Raises `Refused` unless `name` was typed, or --yes given, and a reason with either."""
    if not gate.reason.strip():
        raise Refused("not-confirmed", "a reason is needed (--reason): it stands in the journal")
    if not gate.yes and gate.typed != name:
        raise Refused("not-confirmed", f"this is confirmed by typing {name}, or with --yes and --reason")


def check_fresh(plan: Plan, now_unix_s: float, nodes: Mapping[str, Node]) -> None:
    """Raises `Refused`: expired-plan, or stale-plan with every fact that is another one now."""
    if now_unix_s < plan.created_unix_s - CLOCK_SLACK_S:
        raise Refused(
            "expired-plan",
            f"plan {plan.id} was made {plan.created_unix_s - now_unix_s:.0f} s from now: the clock was set"
            f" back and its age is not known. Make a new one (`{plan.command}`)",
        )
    if now_unix_s >= plan.expires_unix_s:
        raise Refused(
            "expired-plan",
            f"plan {plan.id} expired {now_unix_s - plan.expires_unix_s:.0f} s ago: make a new one"
            f" (`{plan.command}`)",
        )
    now = basis.of_nodes(plan.members, nodes) if plan.members else basis.of_node(plan.node, nodes)
    before = {key: value for key, value in plan.relied_on.items() if key in now}
    if changed := basis.changes(before, now):
        raise Refused(
            "stale-plan",
            f"since plan {plan.id} was made: {'; '.join(changed)}. Make a new one (`{plan.command}`)",
        )


def check_silent(plan: Plan, nodes: Mapping[str, Node]) -> None:
    """Raises `Refused` stale-plan if a node that was taken for dead answers again."""
    if plan.assume_dead and nodes[plan.node].reachable:
        raise Refused(
            "stale-plan",
            f"{plan.node} answers again, and says itself what lives there: make a new plan without"
            f" --assume-dead (`{plan.command}`)",
        )


def check_unsteered(holder: str, nodes: Iterable[Node]) -> None:
    """Raises `Refused` while another controller than `holder` steers one of these nodes.

    The lease would say so too, but later: what the other one changes makes a plan stale first.
    """
    for node in nodes:
        status = node.status
        if status and status.lease_left_s > 0 and status.lease_holder not in ("", holder):
            raise Refused(
                "fenced",
                f"{status.lease_holder} acts on {node.name} with fence {status.fence} and holds the lease for"
                f" {status.lease_left_s:.0f} s more, or as long as it renews it: wait for the end of its run,"
                " or act there",
            )


def check_alone(node: str, job: str, runs: Iterable[Run]) -> None:
    """Raises `Refused` while another run touches the same node or job."""
    for run in runs:
        same = run.node == node or (job and run.job == job)
        if same and run.state in ("running", "interrupted", "held"):
            what = f"node {node}" if run.node == node else f"job {job}"
            raise Refused(
                "busy",
                f"run {run.id} on {what} is {run.state}: wait for its end, or end it"
                f" (`gridctl run resume|rollback {run.id}`)",
            )


def check_nodes(plan: Plan, claims: Claims) -> None:
    """Raises `Refused` while an unended run uses a spare of this plan, or another of its nodes: an agent
    serves one run at a time."""
    wanted = {plan.node, *plan.nodes}
    for run, other in claims.runs.items():
        taken = {other.node, *other.nodes}
        if not (both := sorted(wanted & taken)):
            continue
        spares = {move.target.session: move.target.node for move in other.moves}
        shared = [spares[move.target.session] for move in plan.moves if move.target.session in spares]
        why = f"has {several(both)}, and a node serves one run at a time: wait for its end"
        if shared:
            why = (
                f"has the spare on {shared[0]}: wait for its end, or make a new plan (`{plan.command}`),"
                " which takes another spare where there is one"
            )
        raise Refused("busy", f"run {run} ({other.purpose}) {why}")
