"""Lifts the cordon that a hand-over leaves on a node, once a person says that the node is repaired."""

import secrets
from typing import Protocol

from gridagent.wire import OpRequest
from gridctl.control.driver import World as Steering
from gridctl.errors import Refused
from gridctl.model.fleet import Node
from gridctl.model.plans import Gate
from gridctl.ports.agents import AgentRefused, AgentUnreachable
from gridctl.runbook import gates

DEADLINE_S = 15.0


class World(Steering, Protocol):
    """What this needs of the controller."""

    async def take_lease(self, user: str) -> None:
        """Raises `Refused` where another controller steers."""
        ...


async def uncordon(world: World, name: str, gate: Gate) -> Node:
    """The node, open for new work and out of quarantine. Raises `Refused`.

    Only gridctl's own cordon is lifted: the agent refuses (not-owner) for anybody else's.
    """
    gates.check_meant(name, gate)
    node = await _cordoned(world, name)
    gates.check_alone(name, "", world.ledger.all_runs())
    user = f"u-{secrets.token_hex(4)}"
    await world.take_lease(user)
    try:
        world.ledger.append(
            "audit", {"what": "uncordon", "node": name, "who": gate.who, "reason": gate.reason}
        )
        request = OpRequest(
            id=f"{user}.uncordon",
            run=user,
            fence=world.lease.fence,
            holder=world.lease.holder,
            who=gate.who,
            kind="node.uncordon",
            deadline_s=DEADLINE_S,
        )
        status = await world.agents.operate(node.url, request)
    except AgentRefused as error:
        raise Refused(error.code, f"{name}: {error.text}") from None
    except AgentUnreachable as error:
        raise Refused("outcome-unknown", f"{error}: look at `gridctl nodes {name}`, then try again") from None
    finally:
        await world.lease.drop(user)
    if status.state != "done":
        raise Refused("step-failed", f"{name} is still cordoned: {status.error}")
    return (await world.look({name}))[name]


async def _cordoned(world: World, name: str) -> Node:
    node = (await world.look({name})).get(name)
    if node is None:
        raise Refused("unknown-node", f"the fleet has no node {name!r}; `gridctl nodes` lists them")
    if not node.reachable or node.status is None:
        raise Refused("node-unreachable", f"{name} does not answer ({node.error}): unknown, not failed")
    if not node.status.cordoned:
        raise Refused("not-now", f"{name} is not cordoned: there is nothing to lift")
    return node
