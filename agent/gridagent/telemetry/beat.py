"""The heartbeat: one record a second. Its absence is what says that a node is blind."""

import asyncio
from collections.abc import AsyncIterator

from gridagent.telemetry import Reading

INTERVAL_S = 1.0


class Beat:
    """Counts up from 1 at every start of the agent; the boot id tells a reboot from a restart."""

    def __init__(self, boot: str) -> None:
        self._boot = boot

    async def __aiter__(self) -> AsyncIterator[Reading]:
        seq = 0
        while True:
            seq += 1
            yield Reading("beat", {"boot": self._boot, "seq": seq})
            await asyncio.sleep(INTERVAL_S)
