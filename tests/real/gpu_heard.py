"""Listens to a source of GPUs: the real child process under it; only the driver's library is a stub."""

import asyncio
import collections
from collections.abc import Awaitable, Callable
from typing import Any

from gridagent.telemetry import Reading
from gridagent.telemetry.gpus import Gpus, Timing

DEADLINE_S = 120.0
#: What firmware keeps is read once in a test, and nothing is given up on that is only late.
CALM = Timing(interval_s=0.02, slow_s=3600, read_s=60, start_s=60, pause_min_s=0.05, pause_max_s=3600)
#: A call that hangs in the stub hangs for good, so a short deadline finds nothing that is not true.
BRISK = Timing(
    interval_s=0.02, slow_s=3600, read_s=2, start_s=60, pause_min_s=0.05, pause_max_s=0.05, relist_s=0.1
)


class Heard:
    """What a source tells, one after another."""

    def __init__(self, source: Gpus) -> None:
        self.source = source
        self._readings = aiter(source)
        self.all: list[Reading] = []

    async def until(self, wanted: Callable[[Reading], bool]) -> Reading:
        while True:
            reading = await anext(self._readings)
            self.all.append(reading)
            if wanted(reading):
                return reading

    async def sample(self, device: str = "gpu:0", **values: object) -> dict[str, Any]:
        """The next sample of a device with these values."""

        def wanted(reading: Reading) -> bool:
            v = reading.v
            if reading.kind != "sample" or v["device"] != device:
                return False
            return all(name in v["v"] and v["v"][name] == value for name, value in values.items())

        return (await self.until(wanted)).v

    async def says(self, words: str) -> str:
        """The next log line or note that holds these words."""
        reading = await self.until(lambda reading: words in str(reading.v.get("line", reading.v.get("text"))))
        return str(reading.v.get("line", reading.v.get("text")))

    async def end(self) -> None:
        """Ends the source, and waits until none of its processes is left."""
        closing = self._readings
        assert isinstance(closing, collections.abc.AsyncGenerator)
        await closing.aclose()
        while self.source.hanging():
            await asyncio.sleep(0.01)


def listen(make: Callable[[], Gpus], test: Callable[[Heard], Awaitable[None]]) -> None:
    """Runs a test with a source, and ends the source and all its processes."""

    async def run() -> None:
        heard = Heard(make())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test(heard)
        finally:
            async with asyncio.timeout(DEADLINE_S):
                await heard.end()

    asyncio.run(run())
