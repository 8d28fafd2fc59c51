"""Keeps what the nodes tell for the history: spools it as it comes, and has it compacted every hour.

Neither may hold the loop up or take room from the journal: the disk is written in a thread, what it cannot
take in time is lost and counted, and compaction is a process of its own that yields to everything else.
"""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable

from gridctl.control.taps import TOO_SLOW, Taps
from gridctl.history.spool import Spool
from gridctl.home import Home

COMPACT_S = 3600.0
#: Soon after the start, since a controller on a laptop may never be an hour old.
FIRST_S = 120.0
BATCH_S = 1.0
#: As many at once come after a restart: then nothing is waited for.
BUSY = 5000

log = logging.getLogger("gridctl.control")


class Keeper:
    """One for each controller. Never raises for a disk that is full."""

    def __init__(self, home: Home, taps: Taps, clock: Callable[[], float] = time.monotonic) -> None:
        self._home = home
        self._taps = taps
        self._clock = clock
        self._spool = Spool(home.spool)
        self._tasks: list[asyncio.Task[None]] = []
        self.child: asyncio.subprocess.Process | None = None  #: the compaction in hand
        self._due_s = clock() + FIRST_S
        self._said = ""

    def start(self) -> None:
        """Begins to spool."""
        self._tasks.append(asyncio.create_task(self._keep()))

    async def turn(self) -> None:
        """To be called now and then: starts a compaction that is due, and tells how the last one ended."""
        if self.child is not None:
            if self.child.returncode is None:
                return
            if self.child.returncode:
                log.warning("compacting the history ended with %s; the journal has everything", self.child)
            self.child = None
        if self._clock() < self._due_s:
            return
        self._due_s = self._clock() + COMPACT_S
        home = (os.fspath(self._home.config), os.fspath(self._home.state))
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gridctl.control.compaction", *home
        )

    async def close(self) -> None:
        """Writes what has come, and ends a compaction: the next one goes on where it was."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._spool.close()
        if self.child is not None and self.child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.child.terminate()
            await self.child.wait()

    async def _keep(self) -> None:
        with self._taps.open(frozenset(), {}) as tap:
            while True:
                records = await tap.batch(BATCH_S)
                if records:
                    await asyncio.to_thread(self._spool.write, records, time.time())
                for record in records:
                    if record.kind == "gap" and record.v.get("text") == TOO_SLOW:
                        self._spool.lose(record.v["records"], TOO_SLOW)
                self._tell()
                if len(records) < BUSY:  # many records cost one write
                    await asyncio.sleep(BATCH_S)

    def _tell(self) -> None:
        """Says once that telemetry is lost, and once that it is no longer."""
        why = self._spool.why
        if bool(why) != bool(self._said):
            if why:
                log.warning("telemetry is lost, nothing else: %s", why)
            else:
                log.warning("telemetry is kept again; %s lines were lost so far", self._spool.lost)
        self._said = why
