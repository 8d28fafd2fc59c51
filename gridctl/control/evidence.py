"""Evidence of a node: asked for, fetched, checked, and written down with who, when and digest."""

import asyncio
import errno
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from gridagent.wire import Evidence, OpRequest, OpStatus
from gridctl.control.ledger import Ledger
from gridctl.errors import Refused
from gridctl.model.evidence import Collected, Wanted
from gridctl.model.fleet import Node
from gridctl.ports.agents import AgentRefused, Agents, AgentUnreachable
from gridctl.ports.archive import ArchiveFile, NotAsTold

#: For the node's part of the work; vendors' tools are slow.
DEADLINE_S = 300.0


class World(Protocol):
    """What this needs of the controller."""

    agents: Agents
    ledger: Ledger

    @property
    def read_only(self) -> str:
        """Why nothing may be changed, else empty."""
        ...

    @property
    def urls(self) -> Mapping[str, str]:
        """Where each node of the fleet serves."""
        ...

    async def look(self, names: set[str]) -> Mapping[str, Node]:
        """The nodes of these names, asked just now."""
        ...


async def collect(world: World, wanted: Wanted) -> Collected:
    """Raises `Refused`. An incident's evidence is taken once: later it is fetched again, as it was taken.

    A node that does not answer is named, and not asked again later.
    """
    if why := world.read_only:
        raise Refused("read-only", f"this controller collects nothing: {why}")
    incident = world.ledger.incidents.get(wanted.target)
    node = incident.node if incident else wanted.target
    if node not in world.urls:
        what = f"{wanted.target}, on {node!a}, is of" if incident else f"{node!a} is"
        raise Refused("unknown-node", f"{what} no node of this fleet; `gridctl nodes` lists them")
    about = incident or world.ledger.incidents.open_on(node)
    known = [found["id"] for found in incident.evidence if found["node"] == node] if incident else []
    for name in (*known[-1:], f"ev-{secrets.token_hex(6)}"):
        try:
            return await _take(world, wanted, node, name, about.id if about else "")
        except Refused as refused:
            if refused.code != "evidence-failed" or name not in known:
                raise
    raise AssertionError("unreachable")


async def _take(world: World, wanted: Wanted, node: str, name: str, incident: str) -> Collected:
    """One collection, written down before it is asked for and after it has ended. Raises `Refused`."""
    said = {"what": "evidence", "incident": incident, "node": node, "id": name, "who": wanted.who}
    text = f"{wanted.who} asks {node} for evidence"
    world.ledger.append("audit", {**said, "state": "asked", "text": text})
    file = Path(wanted.folder) / f"{node}-{name}.tar.gz"
    try:
        told = await _asked(world, node, name, incident, wanted.who)
        await _fetch(world, node, told, file)
    except Refused as refused:
        text = f"no evidence of {node}: {refused.text}"
        world.ledger.append("audit", {**said, "state": "failed", "code": refused.code, "text": text})
        raise
    found = Collected(
        id=name,
        node=node,
        incident=incident,
        who=wanted.who,
        file=str(file),
        bytes=told.bytes,
        sha256=told.sha256,
        taken_unix_s=told.t_unix_s,
        items=told.items,
    )
    facts = {name: getattr(found, name) for name in ("file", "bytes", "sha256", "taken_unix_s")}
    text = f"{wanted.who} took evidence of {node}: {file}, SHA-256 {told.sha256}"
    world.ledger.append("audit", {**said, **facts, "state": "collected", "text": text})
    return found


async def _asked(world: World, node: str, name: str, incident: str, who: str) -> Evidence:
    """What the node has collected. Raises `Refused`."""
    found = (await world.look({node}))[node]
    if not found.reachable:
        raise Refused(
            "node-unreachable",
            f"{node} does not answer ({found.error}): nothing was collected, and nobody tries again later;"
            f" `gridctl collect {node}` once it answers",
        )
    request = OpRequest(
        id=name,
        run=name,
        fence=0,
        holder="",
        who=who,
        kind="evidence.collect",
        args={"incident": incident},
        deadline_s=DEADLINE_S,
    )
    try:
        return _told(node, await world.agents.operate(world.urls[node], request))
    except AgentRefused as error:
        if error.code == "unknown-op":
            raise Refused(
                "version-skew", f"{node}'s agent is too old to collect evidence: upgrade it"
            ) from None
        raise Refused(error.code, f"{node}: {error.text}") from None
    except AgentUnreachable as error:
        text = f"{error}: it may have collected all the same; the same command asks again"
        raise Refused("outcome-unknown", text) from None


def _told(node: str, status: OpStatus) -> Evidence:
    if status.state != "done":
        raise Refused("evidence-failed", f"{node} could not collect: {status.error or status.state}")
    try:
        return msgspec.convert(status.value, Evidence)
    except msgspec.ValidationError as error:
        raise Refused("version-skew", f"{node} says something else of its evidence: {error}") from None


async def _fetch(world: World, node: str, told: Evidence, file: Path) -> None:
    """Raises `Refused`; then there is no such file."""
    try:
        archive = ArchiveFile(file, told)
        try:
            while part := await world.agents.evidence(world.urls[node], told.id, archive.size):
                await asyncio.to_thread(archive.write, part)
            await asyncio.to_thread(archive.keep)
        finally:
            archive.drop()
    except NotAsTold as error:
        text = f"the evidence of {node} is not what it said: {error}. Nothing was kept; ask again"
        raise Refused("evidence-failed", text) from None
    except AgentRefused as error:
        raise Refused("evidence-failed", f"{node} does not give its evidence: {error.text}") from None
    except AgentUnreachable as error:
        text = f"the evidence of {node} was not fetched: {error}; the same command for the incident goes on"
        raise Refused("outcome-unknown", text) from None
    except OSError as error:
        code = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "bad-request"
        text = f"{file} cannot be written ({error.strerror}): choose another --out; {node} keeps its archive"
        raise Refused(code, text) from None
