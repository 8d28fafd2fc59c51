"""Asks a probe again and again, in a thread and with a deadline: nothing that hangs reaches the event loop.

The thread is a daemon's: a read that never returns holds up neither the other sources nor the agent's end.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from gridagent.telemetry import Reading
from gridagent.telemetry.tree import Tree, note

DEADLINE_S = 5.0
#: How long the end of a source waits for the probe to keep where it stands.
CLOSE_S = 1.0
_ERRORS_MAX = 20


class Probe:
    """One kind of files. `read` runs in a thread and may block; a probe has one caller at a time."""

    INTERVAL_S = 5.0  #: between two reads, if agent.toml says nothing else
    INTERVAL_MIN_S = 0.1  #: and never more often than this
    KEEPS_PLACE = False  #: `taken` is to be called
    more = False  #: after a read: there is more to be had at once

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        self.tree, self.clock = tree, clock

    def read(self) -> list[Reading]:
        """What there is now; nothing where the node has no such hardware. May raise `OSError`."""
        raise NotImplementedError

    def taken(self) -> list[Reading]:
        """What the last read gave is in the spool. Runs in the thread, as `read` does."""
        return []

    def close(self) -> None:
        """The end: keep what the next start needs."""


class Polled:
    """The source of a probe. Raises nothing that a file, or its absence, can cause."""

    def __init__(self, probe: Probe, interval_s: float | None = None, deadline_s: float = DEADLINE_S) -> None:
        self.probe, self._source = probe, probe.tree.source
        self.interval_s = max(interval_s or probe.INTERVAL_S, probe.INTERVAL_MIN_S)
        self.deadline_s = deadline_s
        #: Returns once what was told cannot be lost any more.
        self.stored: Callable[[], Awaitable[None]] = _at_once
        self._told = False  #: what the last read gave, and nobody has been told that it is kept
        self._metrics: dict[str, dict[str, None]] = {}  #: device -> the metrics that were told of it
        self._errors: set[str] = set()

    async def __aiter__(self) -> AsyncIterator[Reading]:
        clock = asyncio.get_running_loop().time
        thread = _Thread(self._source)
        call: asyncio.Future[list[Reading]] | None = None
        try:
            while True:
                start_s = clock()
                call = thread.call(self.probe.read)
                await asyncio.wait([call], timeout=self.deadline_s)
                late = not call.done()
                if late:
                    for reading in self._hang():
                        yield reading
                    await asyncio.wait([call])  # meanwhile it is not asked again
                    yield note(self._source, "answers", f"answers again after {clock() - start_s:.0f} s")
                for reading in self._result(call, late):
                    yield reading
                self._told = self.probe.KEEPS_PLACE
                if self._told:
                    await self.stored()
                    call = thread.call(self.probe.taken)
                    await asyncio.wait([call])
                    self._told = False
                    for reading in call.result():
                        yield reading
                await asyncio.sleep(0 if self.probe.more else max(start_s + self.interval_s - clock(), 0.0))
        finally:
            if call is not None and (call.done() or self._told):
                await self._end(thread)
            thread.stop()

    async def _end(self, thread: "_Thread") -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._told:
                    await self.stored()
                    await asyncio.wait([thread.call(self.probe.taken)])
        await asyncio.wait([thread.call(self._close)], timeout=CLOSE_S)

    def _close(self) -> list[Reading]:
        self.probe.close()
        return []

    def _hang(self) -> Iterator[Reading]:
        path = f"/{self.probe.tree.reading}"
        what = f"reading {path} has not returned after {self.deadline_s:g} s; all its values are unknown"
        yield note(self._source, "hang", what, path=path, deadline_s=self.deadline_s)
        yield from self._gone(set(self._metrics))

    def _result(self, call: asyncio.Future[list[Reading]], late: bool) -> Iterator[Reading]:
        """What a read gave. After a hang its samples are left out: nobody knows how old they are."""
        error = call.exception()
        if error is not None:
            if not isinstance(error, OSError | ValueError | ArithmeticError | LookupError):
                raise error
            if (text := repr(error)) not in self._errors and len(self._errors) < _ERRORS_MAX:
                self._errors.add(text)
                yield note(self._source, "failed", f"a read failed, its values are unknown: {text}")
            yield from self._gone(set(self._metrics))
            return
        seen = set()
        for reading in call.result():
            if reading.kind == "sample":
                if late:
                    continue
                device = reading.v["device"]
                seen.add(device)
                self._metrics.setdefault(device, {}).update(dict.fromkeys(reading.v["v"]))
            yield reading
        yield from self._gone(self._metrics.keys() - seen)
        yield from self.probe.tree.troubles()

    def _gone(self, devices: set[str]) -> Iterator[Reading]:
        """Once null for everything that a device had: a value that nobody can confirm is none."""
        for device in sorted(devices):
            yield Reading("sample", {"device": device, "v": dict(self._metrics.pop(device))})


async def _at_once() -> None:
    """Where nothing is kept nothing is waited for."""


class _Thread:
    """Carries out calls one after the other. Needs a running loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[
            tuple[Callable[[], list[Reading]], asyncio.Future[list[Reading]]] | None
        ]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"source-{name}", daemon=True).start()

    def call(self, function: Callable[[], list[Reading]]) -> asyncio.Future[list[Reading]]:
        """Starts a call; nobody can stop it."""
        future = self._loop.create_future()
        self._calls.put((function, future))
        return future

    def stop(self) -> None:
        """Ends the thread after what it is doing now."""
        self._calls.put(None)

    def _run(self) -> None:
        while (job := self._calls.get()) is not None:
            function, future = job
            result: list[Reading] | Exception
            try:
                result = function()
            except Exception as error:
                result = error
            try:
                self._loop.call_soon_threadsafe(_settle, future, result)
            except RuntimeError:  # the loop has ended while this call hung
                return


def _settle(future: asyncio.Future[list[Reading]], result: list[Reading] | Exception) -> None:
    if future.cancelled():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
