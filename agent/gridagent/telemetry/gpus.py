"""A source that reads all GPUs of a node through their vendor's library, in a child process.

A call into the driver may never return. So each read of a GPU has a deadline; a child that misses it is
killed and left behind (it may be beyond a signal's reach, so nobody waits for it), the GPU counts as silent
and is asked again after pauses that grow, and a new child reads the other GPUs meanwhile. What is told:

* `sample` of `gpu:N`: the recording format's metrics, null where there is no value, and `lost` (1: the GPU
  is lost). All null, `lost` too: the driver does not answer. Every `slow_s` also what firmware keeps, and
  which GPU it is. N is the library's first number for it; it stays with the PCI address.
* `log` of the source's name: "driver unresponsive: ...", a GPU lost or no longer listed, errors of the
  driver; and, from NVML, Xids as the kernel prints them, where the agent reads no kernel log.
* `note`: why the source has nothing to say (no driver, no library); it tries again by itself.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from gridagent.telemetry import Reading
from gridagent.telemetry.gpu_child import Answer, Failed, Identity, Message, Ready, Said, XidEvent
from gridagent.telemetry.gpu_link import Child, ChildGone, Children

#: A silent GPU is not asked again while so many children hang ...
HUNG_MAX = 3
#: ... and no child at all is started while so many do.
CHILDREN_MAX = 8
_ERRORS_CHARS_MAX = 400
_SAID_MAX = 64
_AWAY_POLL_S = 0.1


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """When what is read, and how long an answer may take. Tests choose other values, users do not."""

    interval_s: float = 1.0
    slow_s: float = 10.0  #: between two reads of counters that firmware keeps
    read_s: float = 5.0  #: for one GPU
    start_s: float = 30.0  #: for the library's start: without NVIDIA's persistence mode it wakes every GPU
    lost_s: float = 30.0  #: without an answer on the bus, where the library has no word for a lost GPU
    pause_min_s: float = 1.0
    pause_max_s: float = 60.0
    relist_s: float = 600.0  #: while a GPU is missing; not often: the library's start touches all GPUs


class _Pause:
    """Doubles with every failure in a row."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._length_s = 0.0
        self.until_s = float("-inf")

    def fail(self, now_s: float) -> None:
        longer_s = max(self._length_s * 2, self._timing.pause_min_s)
        self._length_s = min(longer_s, self._timing.pause_max_s)
        self.until_s = now_s + self._length_s

    def succeed(self) -> None:
        self._length_s, self.until_s = 0.0, float("-inf")


class _Gpu:
    """What is known of one GPU, over the lives of children."""

    def __init__(self, number: int, timing: Timing, slow_at_s: float) -> None:
        self.number = number
        self.identity = Identity()
        self.slow_at_s = slow_at_s
        self.metrics: dict[str, None] = {}  #: what it has been asked for
        self.pause = _Pause(timing)
        self.silent = False
        self.lost = False
        self.listed = True
        self.errors = ""

    @property
    def device(self) -> str:
        return f"gpu:{self.number}"

    def __str__(self) -> str:
        return f"{self.device} ({self.identity.pci})" if self.identity.pci else self.device

    def blank(self) -> Reading:
        """A sample without any value: unknown, also whether the GPU is lost."""
        return Reading("sample", {"device": self.device, "v": {**self.metrics, "lost": None}})


class Gpus:
    """All GPUs that `LIBRARY` lists; `expected`: how many there ought to be.

    `command` is the module that reads them, with its arguments. Never blocks, never ends by itself.
    """

    NAME: str  #: of the source
    LIBRARY: str  #: as people call it
    LOST: str  #: why a GPU counts as lost

    def __init__(self, command: Sequence[str], expected: int, timing: Timing | None) -> None:
        self._expected = expected
        self._timing = timing or Timing()
        self._children = Children(command)
        self._child: Child | None = None
        self._pause = _Pause(self._timing)
        self._told = ""  #: how it stands with this source, as told last
        self._said: set[str] = set()  #: what children had to say
        self._known: dict[str, _Gpu] = {}  #: by PCI address
        self._at: list[_Gpu | None] = []  #: by the library's index in the child that lives
        self._unasked: list[int] = []  #: indices that this interval still has to ask
        self._tick_s = 0.0
        self._identified = False  #: every GPU of this child has been
        self._relist_s = 0.0
        self._slow_floor_s = 0.0  #: before it, a GPU that is not recognised yet may have been read
        self._wanted_away = 0  #: by so many
        self._away = asyncio.Event()  #: no process of this source has a GPU open

    async def __aiter__(self) -> AsyncIterator[Reading]:
        try:
            while True:
                for reading in await self._turn():
                    yield reading
        finally:
            self._drop_child()

    @contextlib.asynccontextmanager
    async def let_go(self, limit_s: float) -> AsyncIterator[None]:
        """No process of this source has a GPU open within the block: what resets one wants that.

        Raises `TimeoutError`, e.g. where a driver that hangs does not let a process end.
        """
        self._wanted_away += 1
        try:
            try:
                await asyncio.wait_for(self._away.wait(), limit_s)
            except TimeoutError:
                raise TimeoutError(f"{self.NAME} has a GPU open, also after {limit_s:g} s") from None
            yield
        finally:
            self._wanted_away -= 1

    async def _stay_away(self) -> list[Reading]:
        self._drop_child()
        if self._children.reap() == 0:
            self._away.set()
        await asyncio.sleep(_AWAY_POLL_S)
        return []

    def hanging(self) -> int:
        """Processes that were left behind and still exist."""
        return self._children.reap()

    async def _turn(self) -> list[Reading]:
        """One step: start a child, read one GPU, or wait for an event until the next interval."""
        if self._wanted_away:
            return await self._stay_away()
        self._away.clear()
        child, now_s = self._child, _now_s()
        if child is None:
            return await self._start(now_s)
        try:
            if self._unasked:
                return await self._read(child, self._unasked.pop(0), now_s)
            if now_s < self._tick_s:
                message = await child.receive(self._tick_s)
                return [] if message is None else list(self._unasked_for(message))
        except ChildGone as gone:
            return list(self._failed(f"the process that reads {self.LIBRARY} has ended: {gone}", _now_s()))
        if now_s >= self._relist_s and self._is_incomplete():
            self._drop_child()  # only a new child can see a GPU that comes back
            return []
        self._tick_s = max(self._tick_s + self._timing.interval_s, now_s)
        self._unasked = self._due(now_s)
        asked = [self._at[index] for index in self._unasked]
        return [gpu.blank() for gpu in self._known.values() if gpu not in asked]

    async def _start(self, now_s: float) -> list[Reading]:
        if now_s < self._pause.until_s or self._children.reap() >= CHILDREN_MAX:
            await asyncio.sleep(self._timing.interval_s)
            return [gpu.blank() for gpu in self._known.values()]
        limit_s = self._timing.start_s
        until_s = now_s + limit_s
        reads = f"the process that reads {self.LIBRARY}"
        try:
            child = self._child = await self._children.start()
            while not isinstance(message := await child.receive(until_s), Ready):
                if message is None:
                    said = f"driver unresponsive: {self.LIBRARY} has not started within {limit_s:g} s"
                    return [self._log(said), *self._failed(said, _now_s())]
                if isinstance(message, Failed):
                    return list(self._failed(message.text, _now_s()))
        except ChildGone as gone:
            return list(self._failed(f"{reads} has ended: {gone}", _now_s()))
        except OSError as error:
            return list(self._failed(f"{reads} cannot be started: {error}", _now_s()))
        self._identified = False
        self._tick_s = _now_s()
        self._relist_s = self._tick_s + self._timing.relist_s
        if len(self._at) != message.gpus:  # the indices have moved: find out anew which is which
            self._at = [None] * message.gpus
            self._slow_floor_s = max((gpu.slow_at_s for gpu in self._known.values()), default=now_s)
        driver = f", driver {message.driver}" if message.driver else ""
        readings = list(self._tell(f"{message.gpus} GPUs are read{driver}"))
        if readings and message.gpus < self._expected:
            readings.append(
                self._log(f"{message.gpus} GPUs are listed by the driver, {self._expected} expected")
            )
        return readings

    def _tell(self, text: str) -> Iterator[Reading]:
        """How it stands with this source; once, and again after it was otherwise."""
        if text != self._told:
            self._told = text
            yield self._note(text)

    def _is_incomplete(self) -> bool:
        return len(self._at) < max(self._expected, 1) or any(
            gpu.lost or not gpu.listed for gpu in self._known.values()
        )

    def _failed(self, text: str, now_s: float) -> Iterator[Reading]:
        """The child is of no use any more."""
        self._drop_child()
        self._pause.fail(now_s)
        yield from self._tell(text)

    def _drop_child(self) -> None:
        if self._child is not None:
            self._children.abandon(self._child)
        self._child, self._unasked = None, []

    def _due(self, now_s: float) -> list[int]:
        """The indices to ask now, those that were silent last; none of these while too many hang."""
        may_hang = self._children.reap() < HUNG_MAX
        silent = [i for i, gpu in enumerate(self._at) if gpu is not None and gpu.silent]
        again = [i for i in silent if may_hang and now_s >= self._silent_until_s(i)]
        return [i for i in range(len(self._at)) if i not in silent] + again

    def _silent_until_s(self, index: int) -> float:
        gpu = self._at[index]
        return gpu.pause.until_s if gpu is not None else float("-inf")

    async def _read(self, child: Child, index: int, now_s: float) -> list[Reading]:
        gpu = self._at[index] = self._at[index] or self._new(index)
        slow = now_s >= gpu.slow_at_s
        if slow:
            gpu.slow_at_s = now_s + self._timing.slow_s
        child.ask(f"{index} {'slow' if slow else 'fast'}")
        readings: list[Reading] = []
        until_s = now_s + self._timing.read_s
        try:
            while not isinstance(message := await child.receive(until_s), Answer):
                if message is None:
                    said = f"{gpu} did not answer within {self._timing.read_s:g} s"
                    return [*readings, *self._no_answer(gpu, said, _now_s())]
                readings += self._unasked_for(message)
        except ChildGone as gone:  # not of the source: the other GPUs can be read without this one
            said = f"the process that read {gpu} has ended: {gone}"
            return [*readings, *self._no_answer(gpu, said, _now_s())]
        self._pause.succeed()
        gpu = self._at[index] = self._recognised(gpu, message.identity)
        readings += self._taken(gpu, message, slow)
        if not self._identified and None not in self._at:
            self._identified = True
            readings += self._compare_lists()
        return readings

    def _new(self, index: int) -> _Gpu:
        """A GPU of which nothing is known but the library's index."""
        taken = {gpu.number for gpu in [*self._known.values(), *self._at] if gpu is not None}
        number = next(n for n in [index, *range(len(taken) + 1)] if n not in taken)
        return _Gpu(number, self._timing, self._slow_floor_s)

    def _recognised(self, gpu: _Gpu, identity: Identity) -> _Gpu:
        """The GPU at that PCI address: what the library calls 3 may have been 4 before one was lost."""
        pci = identity.pci
        if not pci:
            return gpu
        found = self._known.get(pci)
        if found is None:
            found = gpu if not gpu.identity.pci else self._new(gpu.number)
        found.slow_at_s = max(found.slow_at_s, gpu.slow_at_s)
        found.identity = identity
        self._known[pci] = found
        return found

    def _no_answer(self, gpu: _Gpu, said: str, now_s: float) -> Iterator[Reading]:
        gpu.silent = True
        gpu.pause.fail(now_s)
        self._drop_child()
        yield self._log(f"driver unresponsive: {said}")
        yield gpu.blank()

    def _taken(self, gpu: _Gpu, answer: Answer, slow: bool) -> Iterator[Reading]:
        gpu.metrics.update(dict.fromkeys(answer.v))
        gpu.pause.succeed()
        if answer.lost is not None or any(value is not None for value in answer.v.values()):
            lost = bool(answer.lost)
            if gpu.silent or gpu.lost != lost:
                state = f"is lost: {self.LOST}" if lost else "answers again"
                yield self._log(f"{gpu} {state}")
            gpu.silent, gpu.lost = False, lost
        about = (
            {"device": gpu.device, "pci": gpu.identity.pci} if gpu.identity.pci else {"device": gpu.device}
        )
        if slow:
            about.update(msgspec.to_builtins(gpu.identity))
            errors = "; ".join(f"{name}: {text}" for name, text in answer.errors.items())
            if errors != gpu.errors:
                gpu.errors = errors
                yield self._log(f"{gpu}: {errors[:_ERRORS_CHARS_MAX] or 'no errors any more'}")
        known = None if answer.lost is None else int(answer.lost)
        yield Reading("sample", {**about, "v": {**answer.v, "lost": known}})

    def _compare_lists(self) -> Iterator[Reading]:
        for gpu in self._known.values():
            listed = gpu in self._at
            if gpu.listed and not listed:
                yield self._log(f"{gpu} is no longer listed by the driver")
            gpu.listed = listed

    def _unasked_for(self, message: Message) -> Iterator[Reading]:
        if isinstance(message, XidEvent):
            where = f"PCI:{message.pci.rpartition('.')[0]}{' ' if message.mig else ''}{message.mig}"
            yield self._log(f"NVRM: Xid ({where}): {message.xid}, told by NVML without the kernel's words")
        elif isinstance(message, Said) and message.text not in self._said and len(self._said) < _SAID_MAX:
            self._said.add(message.text)
            yield self._note(message.text)

    def _log(self, line: str) -> Reading:
        return Reading("log", {"source": self.NAME, "line": line})

    def _note(self, text: str) -> Reading:
        return Reading("note", {"text": f"{self.NAME}: {text}"})


def _now_s() -> float:
    return asyncio.get_running_loop().time()
