"""The streams of the nodes: one that tells much does not keep the rest of the controller waiting."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from runbook_world import node, status

from gridagent.wire import StreamRecord
from gridctl.control.followers import Followers

RECORDS = 200


class Agents:
    """One agent, all of whose records are there at once."""

    async def stream(self, url: str, after: int) -> AsyncIterator[StreamRecord]:
        for seq in range(after + 1, RECORDS + 1):
            yield StreamRecord(seq=seq, boot="b", t_unix_s=0.0, node="other", kind="beat", v={})


def test_a_node_that_tells_much_leaves_others_their_turn() -> None:
    slow_disk, fed, turns = threading.Event(), [], []

    def feed(record: StreamRecord) -> None:
        slow_disk.wait(0.002)
        fed.append((record.node, record.seq))

    async def others() -> None:
        while len(fed) < RECORDS:
            turns.append(len(fed))
            await asyncio.sleep(0)

    async def follow() -> None:
        agents: Any = Agents()
        followers = Followers(agents, feed)
        followers.keep({"n1": node(status("n1", stream_seq=0))})
        await others()
        await followers.close()
        assert followers.seqs == {"n1": RECORDS}

    asyncio.run(follow())
    assert fed == [("n1", seq) for seq in range(1, RECORDS + 1)]
    assert len({count for count in turns if 0 < count < RECORDS}) > 2
