"""A training step that can be repeated: `with session.attempt():` around all that one batch causes.

If a peer dies, the step is void for all: each rank stands until its process groups have been made anew,
then either repeats the step from the start of its window or, where some rank had already applied it,
applies it too. What decides is a vote, once a step, before anything is applied: who has entered it says
that his gradients are complete.

The window begins with the first batch after `end_step`; several batches may fall into one step.
"""

import functools
import logging
import os
import queue
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from gridagent.train.batch import Mark, Opaque, marks
from gridagent.train.context import CONTEXT
from gridagent.train.driver import EXIT_REQUEUE, end_process
from gridagent.train.errors import SessionError
from gridagent.train.memory import Memory
from gridagent.train.rng import Rng
from gridagent.train.state import StateError
from gridagent.train.tolerance import StepAborted, Tolerance
from gridagent.train.window import Buffers, Window

if TYPE_CHECKING:
    from gridagent.train.session import Session

_log = logging.getLogger("gridagent.train")
#: How long a rank stands in a void step before it ends, so that the scheduler requeues the job.
_HOLD_S = 600.0
#: So long the ranks may come one after the other to the first attempt before that is told.
_MEET_S = 20.0
#: Buffers are compared in every step; more than this in large ones would be felt.
_LARGE_BUFFERS_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch of the window."""

    loader: int
    value: Any
    marks: list[Mark]  #: as it was given out
    opaque: str  #: what in it cannot be watched; "" if all can

    @classmethod
    def of(cls, loader: int, value: Any) -> "_Batch":
        try:
            return cls(loader, value, marks(value), "")
        except Opaque as error:
            return cls(loader, value, [], str(error))

    def trouble(self) -> str:
        """Why it cannot be given out once more."""
        if self.opaque:
            return f"nobody can say whether the script changed the batch: it holds {self.opaque}"
        try:
            same = marks(self.value) == self.marks
        except Opaque:
            same = False
        return "" if same else "the script changed a batch in place"


class Attempts:
    """The steps of one session as attempts. It is also the context manager that `attempt` gives.

    `void`: the training thread stands in a spoilt step, which is `session.step`. `entered`: it had
    entered that step's vote. `apply()`: the step is to be applied, not repeated.
    """

    def __init__(self, session: "Session") -> None:
        self.void = False
        self.entered = False
        self.used = False  #: the script calls `attempt`
        self.off = ""  #: why steps are no attempts although the script asks for it
        self.memory = Memory(session)
        self._session = session
        self._window: Window | None = None
        self._tolerance: Tolerance | None = None
        self._inside = False
        self._open = False  #: a window is open, in which the script has begun its attempt
        self._voted = False
        self._apply = False
        self._aborted = False  #: the vote has raised, after it stood
        self._rewound = False
        self._micros = 0
        self._fetched = False
        self._unfed = False  #: a batch of the window did not come through `batches`
        self._ended_calls = -1  #: collectives up to the end of the last step
        self.calls_before = 0  #: collectives between that and the first batch of the window
        self._last: dict[int, _Batch] = {}  #: loader -> batch that no attempt was begun with yet
        self._kept: list[_Batch] = []  #: the window's batches
        self._again: dict[int, deque[Any]] = {}  #: loader -> batches to be given out once more
        self._rngs: deque[Rng] = deque()  #: random states to be set with them

    # -------------------------------------------------------------------- what is asked of it

    @property
    def window(self) -> Window:
        """What was kept of the step that runs. Raises `StateError` before there is anything."""
        if self._window is None:
            raise StateError(f"the steps of this rank are no attempts: {self.off or 'none has begun'}")
        return self._window

    def apply(self) -> None:
        """Some rank has applied this step: this one goes on and applies it too, as far as the step's end.

        Whether there are new groups by then is of no account: after the vote there are no collectives.
        """
        if not self.void or not self.entered or self._rewound:
            raise SessionError("this rank does not stand in a vote whose step could still be applied")
        self._apply = True
        self._session.leave()

    def rewind(self) -> None:
        """Puts everything back to where the window began. The step can only be repeated after that.

        Raises `StateError` if something was changed that cannot be put back.
        """
        if not self._open or self._window is None:
            return
        if why := self._trouble():
            raise StateError(why)
        self._window.rewind()
        self._rewound = True

    # ---------------------------------------------------------------------- what a script causes

    def __enter__(self) -> "Attempts":
        if self._inside:
            raise SessionError("session.attempt() inside session.attempt(): one for each batch")
        self.used = self._inside = True
        self._session.micro = self._micros
        if self._active():
            assert self._tolerance is not None
            self._tolerance.armed = True
            if self._tolerance.failure and self._micros == 0:
                self._stand()
            if not self._fetched:
                self._unfed = self._ended_calls >= 0  # the first batch of all came before anybody could see
                self._begin()
            self._kept += self._last.values()
            self._last.clear()
            self._open, self._fetched = True, False
        self._micros += 1
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> bool:
        self._inside = False
        tolerance = self._tolerance
        if tolerance is None or not tolerance.armed:
            return False
        try:
            return self._leave(tolerance, error)
        finally:
            tolerance.armed = False

    def again(self, loader: Any) -> list[Any]:
        """The batch of `loader` that has to be given out once more, if there is one."""
        waiting = self._again.get(id(loader))
        return [waiting.popleft()] if waiting else []

    def fetched(self, loader: Any, batch: Any) -> None:
        """`batch` is about to be given out: here a window begins, or one more of its batches."""
        if self.used and self._active():
            self._begin()
            self._last[id(loader)] = _Batch.of(id(loader), batch)
            self._fetched = True

    def end_step(self) -> None:
        """Before a step is counted: the vote, where it has not been, and what the step left behind."""
        if not self._inside:
            raise SessionError(
                "session.end_step() outside of session.attempt(): call it as the last line within"
            )
        if self._tolerance is not None and self._tolerance.armed:
            if not self._open:
                raise SessionError("session.end_step() twice in one session.attempt()")
            self.vote()
            if self._tolerance.spoilt:
                self._requeue(
                    f"a collective failed after step {self._session.step} was applied"
                    f" ({self._tolerance.failure}), which cannot be repeated"
                )
            self.memory.check_tail(loaders=not self._kept)

    def ended(self) -> None:
        """The step is counted; the next batch begins a new window."""
        if self._open and self._window is not None:
            self._window.ended(self.memory.ended_trees)
            self._ended_calls = CONTEXT.registry.calls
        self._close()

    def _close(self) -> None:
        self._open = self._voted = self._apply = self._aborted = self._rewound = self.entered = False
        self._unfed = False
        self._micros = 0
        self._kept.clear()
        self._last.clear()
        self._again.clear()
        self._rngs.clear()

    def vote(self) -> None:
        """Called before anything is applied. Returns if the step is to be applied, else raises."""
        if not self._open or self._voted:
            return
        if self._aborted:
            raise StepAborted("this step is void and will be repeated")
        assert self._tolerance is not None
        if not self._tolerance.failure:
            self.entered = True
            if why := self._failed_vote():  # by now nothing holds the works that failed
                self._tolerance.fail(why)
        if self._tolerance.failure:
            self._stand()
            if not self._apply:
                self._aborted = True
                raise StepAborted("this step is void and will be repeated")
        self._voted = True
        self.memory.applied(self._session.step)

    # ------------------------------------------------------------------------------- within

    def _active(self) -> bool:
        """Are the steps of this process attempts by now?"""
        session = self._session
        if self._window is not None or self.off or not session.is_owner:
            return self._window is not None and session.is_owner
        self.off = unfit(session)
        if session.epoch == 0 and session.world_size > 1 and not _all_fit(session, not self.off):
            self.off = self.off or "another rank says that its steps cannot be attempts"
        if self.off:
            if CONTEXT.link is not None:
                _log.warning("a step that a dead peer spoils is lost with the job: %s", self.off)
            return False
        self._tolerance = CONTEXT.registry.tolerate()
        self._window = Window(session.state)
        for optimizer in session.state.optimizers.values():
            optimizer.register_step_pre_hook(self._before_optimizer)
        for tree in session.state.trees.values():
            if isinstance(tree, torch.amp.GradScaler):
                for name in ("step", "update"):
                    setattr(tree, name, self._after_vote(getattr(tree, name)))
        return True

    def _before_optimizer(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._open and (kwargs.get("closure") or args[1:]):
            raise SessionError(
                f"{type(optimizer).__name__}.step() with a closure within session.attempt(): the gradients"
                " must be complete before the optimizer's step"
            )
        self.vote()

    def _after_vote(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.vote()
            return function(*args, **kwargs)

        return call

    def _begin(self) -> None:
        assert self._window is not None
        if self._rngs:
            rng = self._rngs.popleft()
            if self._micros == 0 and not rng.same(Rng.read(self._session.state.generators)):
                self._requeue("the script draws random numbers before it takes a batch, each time other ones")
            rng.put_back()
        elif self._micros == 0 and self._ended_calls >= 0:
            self.calls_before = CONTEXT.registry.calls - self._ended_calls
        if self._micros == 0:
            self._window.begin()
        else:
            self._window.more()

    def _trouble(self) -> str:
        """Why the step that runs cannot be repeated by this process; "" if it can, as far as is known."""
        if self._unfed:
            return "its batch did not come through session.batches()"
        return next((why for batch in self._kept if (why := batch.trouble())), "")

    def _leave(self, tolerance: Tolerance, error: BaseException | None) -> bool:
        if not (tolerance.failure or self._aborted) or (error and not isinstance(error, Exception)):
            return False
        if not self._open and error is None:
            return False  # the step has ended; the next one will not get far
        if not self._open or self._voted:
            self._requeue(
                f"a collective failed after step {self._session.step} was applied ({tolerance.failure}),"
                " which cannot be repeated"
            )
        if error is not None and not isinstance(error, StepAborted):
            _log.warning("taken for a consequence of the failed collective: %r", error)
        if not self._aborted:
            self._stand()
        try:
            self.rewind()
        except StateError as cause:
            self._requeue(f"step {self._session.step} cannot be repeated: {cause}")
        assert self._window is not None
        rngs = deque(self._window.rngs)
        again: dict[int, deque[Any]] = {}
        for batch in self._kept:
            again.setdefault(batch.loader, deque()).append(batch.value)
        self._close()
        self._rngs, self._again = rngs, again
        return True

    def _failed_vote(self) -> str:
        """Sends the memory on and votes. Returns what failed.

        The vote is a barrier: whoever comes out knows that all have gone in, with their ward's letter.
        """
        try:
            self.memory.exchange(self._session.step)
            world: Any = dist.group.WORLD
            world.inner.barrier().wait()
            self.memory.sent()
        except (RuntimeError, AttributeError) as error:  # AttributeError: another thread saw it first
            self.memory.let_go()
            return f"the vote on step {self._session.step}: {error}"
        return ""

    # ------------------------------------------------------------------------------ standing

    def _stand(self) -> None:
        """Waits in a void step, and does what the recovery posts, until the groups are made anew."""
        session, tolerance = self._session, self._tolerance
        assert tolerance is not None
        hold_s = float(os.environ.get("GRIDAGENT_HOLD_S") or _HOLD_S)
        until_s = time.monotonic() + hold_s
        why = tolerance.failure
        if tolerance.buckets_spoilt:
            self._requeue(f"DDP's exchange of its bucket layout failed ({why}), which cannot be repeated")
        if self._open and (trouble := self._trouble()):
            self._requeue(f"step {session.step} is void ({why}) and cannot be repeated: {trouble}")
        if not tolerance.terminal(hold_s):
            self._requeue(f"collectives of the old groups have not ended within {hold_s:g} s ({why})")
        _log.warning("step %d is void, rank %d stands: %s", session.step, session.rank, why)
        self.void = True
        session.stand(True)
        while True:
            try:
                job = session.jobs.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                if session.handovers.frozen:  # its rank is given away, and whoever releases it is late
                    until_s = time.monotonic() + hold_s
                    continue
                self._requeue(f"nobody made the groups anew within {hold_s:g} s ({why})")
            if job is not None:
                job()
            elif self._apply or not tolerance.failure:
                break
            else:  # meant for a hand-over that was under way: nobody can go on without groups
                session.stand(True)
        self.void = False
        session.stand(False)

    def _requeue(self, why: str) -> None:
        session = self._session
        print(
            f"gridagent: rank {session.rank}, step {session.step}: {why};"
            " ending so that the scheduler can requeue the job",
            file=sys.stderr,
        )
        end_process(session, "failed", EXIT_REQUEUE)


def _all_fit(session: "Session", fit: bool) -> bool:
    """Are all ranks fit? One that votes alone would wait for ever.

    Asked over the store and not by a collective: a rank whose script does not call `attempt` would meet that
    with a collective of its own. Raises `SessionError` if a rank does not come within the group's time-out.
    """
    store, world = c10d._get_default_store(), cast(Any, dist.group.WORLD)
    keys = {rank: f"gridagent/attempt/{rank}" for rank in range(session.world_size)}
    store.set(keys[session.rank], str(int(fit)))
    begun_s, told = time.monotonic(), False
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        waited_s = time.monotonic() - begun_s
        late = f"after {waited_s:.0f} s rank {', '.join(map(str, missing))} did not come to session.attempt()"
        if waited_s > world.timeout.total_seconds():
            raise SessionError(f"{late}: it must enclose the step on every rank")
        if waited_s > _MEET_S and not told:
            told = True
            _log.warning("%s: is it slow, or does the script not call it on every rank?", late)
        time.sleep(0.005)
    return all(store.get(key) == b"1" for key in keys.values())


def unfit(session: "Session") -> str:
    """Why a step of this session cannot be repeated; "" if it can."""
    if CONTEXT.link is None:
        return "there is no agent here"
    if session.world_size < 2:
        return "there is only one rank"
    if not session.feeds:
        return "no batch comes through session.batches(): a repeated step would get another one"
    for name, module in session.state.modules.items():
        if any(hasattr(parameter, "_local_tensor") for parameter in module.parameters()) or any(
            type(child).__name__ == "FullyShardedDataParallel" for child in module.modules()
        ):
            return f"{name} is sharded: only replicas can stand in for each other"
    for name, optimizer in session.state.optimizers.items():
        if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
            return f"{name} is sharded: only replicas can stand in for each other"
    ddp = [m for m in session.state.modules.values() if isinstance(m, nn.parallel.DistributedDataParallel)]
    if not ddp:
        return "no DistributedDataParallel is registered"
    if any(module.process_group.size() != session.world_size for module in ddp):
        return "a DistributedDataParallel does not span all ranks"
    try:
        session.state.inventory(loaders=False)
    except StateError as error:
        return str(error)
    large_bytes = Buffers(session.state).large_bytes
    if large_bytes > _LARGE_BUFFERS_BYTES_MAX:
        return f"{large_bytes >> 20} MiB of large buffers are too much to compare in each step"
    return ""
