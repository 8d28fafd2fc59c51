"""What every node last said: those that answer are asked every two seconds, silent ones ever more rarely."""

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping

import msgspec

from gridctl.control.settings import FleetNode
from gridctl.model.fleet import Node, missed
from gridctl.ports.agents import AgentError, Agents

POLL_S = 2.0
PAUSE_S_MAX = 30.0
#: So much of a pause is left to chance: nodes that fell silent together are not asked together for ever.
SPREAD = 0.25
#: Each holds a socket until its time is over. Those that answer hold theirs for milliseconds: no bound.
SILENT_ASKED_MAX = 256
#: A start waits for the first answers until for so long no node has answered.
FIRST_S = 2.0

log = logging.getLogger("gridctl.control")


def pause_s(silences: int, chance: float) -> float:
    """How long a node is left alone that gave no answer so many times in a row (0, 1, 2 ...): 2, 2, 4, 8,
    16, then 30 s. `chance` in [0, 1) takes up to a quarter of it away.
    """
    whole = POLL_S * 2.0 ** min(max(silences - 1, 0), 8)
    return min(whole, PAUSE_S_MAX) * (1 - SPREAD * chance)


class Poll:
    """Every node has a task that asks it: a silent one costs a socket now and then, and nobody's time."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._members: dict[str, FleetNode] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(SILENT_ASKED_MAX)
        self._unasked: set[str] = set()
        self._news = asyncio.Event()  #: one more node has answered, or all were asked
        self.nodes: dict[str, Node] = {}  #: every node of the fleet, also one that was not asked yet

    def keep(self, members: Iterable[FleetNode]) -> None:
        """Asks these nodes from now on and no others; new ones, and those with another address, at once."""
        before, self._members = self._members, {member.name: member for member in members}
        for name in before.keys() - self._members.keys():
            self._tasks.pop(name).cancel()
            del self.nodes[name]
        self._unasked = {name for name in self._members if name not in self.nodes or name in self._unasked}
        for name, member in self._members.items():
            self.nodes.setdefault(name, Node(name=name, url=member.url, rack=member.rack))
            if before.get(name) != member or self._tasks[name].done():
                self._begin(member)

    async def first(self) -> None:
        """Returns once every node was asked, or none has answered for `FIRST_S`."""
        while self._unasked:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), FIRST_S)
            except TimeoutError:
                return

    async def look(self, names: set[str]) -> Mapping[str, Node]:
        """These nodes as they are now: asked at once, however silent they were."""
        before = dict(self.nodes)
        wanted = [member for name, member in self._members.items() if name in names]
        found = await asyncio.gather(*(self._ask(member) for member in wanted))
        for member, node in zip(wanted, found, strict=True):
            if node.reachable and not before[node.name].reachable and node.name in self._members:
                self._begin(member)  # its pause is over
        return {node.name: node for node in found}

    async def survey(self, names: set[str]) -> Mapping[str, Node]:
        """All nodes. Those that ever answered and `names` are asked now; the others are as they were."""
        await self.look(names | {name for name, node in self.nodes.items() if node.status})
        return dict(self.nodes)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _begin(self, member: FleetNode) -> None:
        if before := self._tasks.get(member.name):
            before.cancel()
        self._tasks[member.name] = asyncio.create_task(self._keep_asking(member))

    async def _keep_asking(self, member: FleetNode) -> None:
        silences = 0
        while True:
            if self.nodes[member.name].reachable:
                node = await self._ask(member)
            else:
                async with self._room:
                    node = await self._ask(member)
            silences = 0 if node.reachable else silences + 1
            await asyncio.sleep(pause_s(silences, random.random()))

    async def _ask(self, member: FleetNode) -> Node:
        """Never raises: a node that cannot be asked is unknown, and says why."""
        try:
            node = await self._status(member)
        except AgentError as error:
            node = self._silent(member, str(error))
        except Exception as error:
            known, node = self.nodes.get(member.name), self._silent(member, f"it cannot be asked: {error!r}")
            if known and known.error != node.error:  # else the log has it
                log.exception("%s at %s cannot be asked", member.name, member.url)
        if node.reachable and (before := self.nodes.get(member.name)):
            node = msgspec.structs.replace(node, missed=missed(before, node, self.nodes.values()))
        if self._members.get(member.name) == member:
            self.nodes[member.name] = node
            if member.name in self._unasked:
                self._unasked.discard(member.name)
                if node.reachable or not self._unasked:
                    self._news.set()
        return node

    async def _status(self, member: FleetNode) -> Node:
        name, url = member.name, member.url
        asked_unix_s = time.time()
        status = await self._agents.status(url)
        seen_unix_s = time.time()
        # What the agent says of its rack counts before what the operator wrote at its enrolment.
        status = msgspec.structs.replace(status, rack=status.rack or member.rack)
        if status.node != name:
            error = f"{url} is the agent of {status.node}, not of {name}: correct fleet.toml"
            return Node(name=name, url=url, rack=member.rack, error=error)
        return Node(
            name=name,
            url=url,
            rack=status.rack,
            reachable=True,
            seen_unix_s=seen_unix_s,
            skew_s=status.now_unix_s - (asked_unix_s + seen_unix_s) / 2,
            status=status,
        )

    def _silent(self, member: FleetNode, error: str) -> Node:
        """What was known of a node is kept when it falls silent."""
        known = self.nodes.get(member.name) or Node(name=member.name, url=member.url)
        return msgspec.structs.replace(
            known, reachable=False, url=member.url, rack=known.rack or member.rack, error=error
        )
