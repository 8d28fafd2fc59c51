"""Makes plans: asks the sessions that would leave, then lets the runbook build."""

import secrets
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec

from gridagent.wire import LaunchSpec, OpRequest, SessionReport
from gridctl.control.assessor import Assessor
from gridctl.control.devicelog import DeviceLog
from gridctl.control.lease import FleetLease
from gridctl.control.ledger import Ledger
from gridctl.control.sentinel import Sentinel
from gridctl.errors import Refused
from gridctl.model.fleet import Node
from gridctl.model.plans import Move, Plan, Request
from gridctl.model.policy import Policy
from gridctl.model.runs import Incident
from gridctl.ports.agents import AgentRefused, Agents, AgentUnreachable
from gridctl.runbook import gates, reset
from gridctl.runbook.hot_swap import build
from gridctl.runbook.selection import Selection, select

DESCRIBE_S = 15.0


class World(Protocol):
    """What the planner needs of the controller."""

    agents: Agents
    ledger: Ledger
    lease: FleetLease
    policy: Policy
    assessor: Assessor
    sentinel: Sentinel
    devices: DeviceLog

    async def survey(self, names: set[str]) -> Mapping[str, Node]:
        """All nodes; those that ever answered and `names` were asked just now."""
        ...


async def make_plan(world: World, request: Request) -> Plan:
    """A sealed plan, journaled with its incident. Raises `Refused`; then nothing was written."""
    if request.runbook == "reset":
        return await _plan_reset(world, request)
    if request.runbook != "hot-swap":
        has = "this version has hot-swap and reset"
        raise Refused("bad-request", f"there is no runbook {request.runbook}: {has}")
    if request.incident:
        world.ledger.incident(request.incident)
    nodes = await world.survey({request.node, request.to})
    selection = select(request, nodes, world.policy, world.ledger.claims(time.time()))
    plan_id, handover = f"p-{secrets.token_hex(4)}", f"h-{secrets.token_hex(6)}"
    known = world.ledger.incidents.open_for(request.node, selection.job.name)
    opened = "" if request.incident or known else f"i-{secrets.token_hex(4)}"
    incident = request.incident or (known.id if known else opened)
    try:
        reports = [await _describe(world, plan_id, move) for move in selection.moves]
        launches = [await _launch(world, selection, move) for move in selection.moves]
    except AgentUnreachable as error:
        raise Refused("node-unreachable", f"{error}: unknown, not failed; nothing was changed") from None
    except AgentRefused as error:
        raise Refused(error.code, error.text) from None
    plan = build(
        selection,
        reports,
        launches,
        nodes,
        world.policy,
        ids=(plan_id, handover, incident),
        now_unix_s=time.time(),
        rates=world.ledger.cut_rates(),
        forecasts=world.assessor.forecasts({request.node, selection.moves[0].target.node}),
        warnings=world.sentinel.warnings(selection.job.name),
    )
    if opened:
        what = f"{', '.join(plan.devices)} of {plan.node}" if plan.devices else plan.node
        title = f"{request.who or 'somebody'} wants {plan.job} to leave {what}"
        _open(world, _manual(incident, plan.node, title, plan.job, plan.created_unix_s))
    return _written(world, plan)


async def _plan_reset(world: World, request: Request) -> Plan:
    """Of a GPU or, without one, of the node. Raises `Refused`; then nothing was written."""
    incidents, now_unix_s = world.ledger.incidents, time.time()
    gates.check_alone(request.node, "", world.ledger.all_runs())
    nodes = await world.survey({request.node})
    if request.incident:
        incident = world.ledger.incident(request.incident)
        if incident.node != request.node:
            raise Refused("bad-request", f"incident {incident.id} is of {incident.node or 'several nodes'}")
        if incident.state == "closed":
            text = f"incident {incident.id} is closed, and its evidence is of then: leave --incident out"
            raise Refused("bad-request", text)
    else:
        known = incidents.open_on(request.node) or incidents.open_for(request.node, "")
        what = f"{', '.join(request.devices)} of {request.node} reset" if request.devices else "a reboot"
        title = f"{request.who or 'somebody'} wants {what}"
        incident = known or _manual(f"i-{secrets.token_hex(4)}", request.node, title, "", now_unix_s)
    plan = reset.build(
        request,
        nodes,
        world.devices.of(request.node),
        incident,
        world.policy,
        plan_id=f"p-{secrets.token_hex(4)}",
        now_unix_s=now_unix_s,
    )
    gates.check_nodes(plan, world.ledger.claims(now_unix_s))
    if incidents.get(incident.id) is None:
        _open(world, incident)
    return _written(world, plan)


def _manual(name: str, node: str, title: str, job: str, now_unix_s: float) -> Incident:
    return Incident(
        id=name, kind="manual", state="open", title=title, node=node, job=job, opened_unix_s=now_unix_s
    )


def _open(world: World, incident: Incident) -> None:
    about = {name: getattr(incident, name) for name in ("state", "kind", "node", "job", "title")}
    world.ledger.append("incident", {"incident": incident.id, **about})


def _written(world: World, plan: Plan) -> Plan:
    world.ledger.append("plan", {"incident": plan.incident, "plan": msgspec.to_builtins(plan)})
    return plan


async def _launch(world: World, selection: Selection, move: Move) -> LaunchSpec:
    """How a rank was started; of a dead one whose node does not know any more, how its deputy was.

    Raises `AgentRefused`, `AgentUnreachable`.
    """
    job = selection.job.name
    if not selection.request.assume_dead or move.origin != selection.request.node:
        try:
            return await world.agents.launch(move.origin_url, job, move.rank)
        except AgentRefused as error:
            if error.code != "not-found" or not move.dead:
                raise
    deputy = selection.deputy(move)
    return await world.agents.launch(deputy.url, job, deputy.rank)


async def _describe(world: World, plan_id: str, move: Move) -> SessionReport:
    """What the session of a rank says of itself. Raises `Refused` rank-silent if it says nothing."""
    request = OpRequest(
        id=f"{plan_id}.describe.{move.rank}",
        run=plan_id,
        fence=world.lease.fence,
        holder=world.lease.holder,
        who="planner",
        kind="job.describe",
        args={"session": move.source.session},
        deadline_s=DESCRIBE_S,
    )
    status = await world.agents.operate(move.source.url, request)
    if status.state != "done":
        raise Refused(
            "rank-silent",
            f"rank {move.rank} on {move.source.node} did not say what it is made of: {status.error};"
            " a process that hangs cannot be moved live",
        )
    try:
        return msgspec.convert(status.value, SessionReport)
    except msgspec.ValidationError as error:
        raise Refused("version-skew", f"rank {move.rank} on {move.source.node}: {error}") from None
