"""The streams of the nodes that answer, each read for as long as its connection lasts."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import msgspec

from gridagent.wire import StreamRecord
from gridctl.errors import Refused
from gridctl.model.fleet import Node
from gridctl.ports.agents import AgentError, Agents

#: After a restart so many records of each node are read again: detection gets its memory back, and what
#: was journaled before is not journaled again.
REREAD_RECORDS = 20_000

#: A node that tells much at once, on a disk that is slow to take findings, keeps nobody else waiting longer.
TURN_S = 0.05

log = logging.getLogger("gridctl.control")


class Followers:
    """`feed` takes every record once; it may raise `Refused` where the journal cannot be written."""

    def __init__(self, agents: Agents, feed: Callable[[StreamRecord], None]) -> None:
        self._agents = agents
        self._feed = feed
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}  #: (node, where it is read)
        self.seqs: dict[str, int] = {}  #: node -> seq of the last record of its stream that was taken

    def keep(self, nodes: Mapping[str, Node]) -> None:
        """To be called now and then: goes on where a stream ended. A silent node is left to the poll."""
        wanted = {(node.name, node.url): node for node in nodes.values()}
        for key in self._tasks.keys() - wanted.keys():
            self._tasks.pop(key).cancel()
            self.seqs.pop(key[0], None)
        for key, node in wanted.items():
            task = self._tasks.get(key)
            if node.reachable and node.status and (task is None or task.done()):
                after = self.seqs.get(node.name, max(0, node.status.stream_seq - REREAD_RECORDS))
                self._tasks[key] = asyncio.create_task(self._follow(*key, after))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, name: str, url: str, after: int) -> None:
        loop = asyncio.get_running_loop()
        turn_s = loop.time()
        with contextlib.suppress(AgentError):
            async for record in self._agents.stream(url, after):
                if loop.time() - turn_s > TURN_S:
                    await asyncio.sleep(0)
                    turn_s = loop.time()
                try:
                    # The connection says who speaks, not the record.
                    self._feed(msgspec.structs.replace(record, node=name))
                except Refused as error:
                    log.warning("what %s tells is not written down: %s", name, error)
                except Exception:
                    log.exception("a record of %s was not understood", name)
                self.seqs[name] = record.seq
