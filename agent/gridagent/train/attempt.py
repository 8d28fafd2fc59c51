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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gridagent.train.batch import Mark, Opaque, marks, places
from gridagent.train.context import CONTEXT
from gridagent.train.driver import EXIT_REQUEUE, end_process
from gridagent.train.errors import SessionError
from gridagent.train.fitness import all_fit, unfit
from gridagent.train.memory import Memory, Packed, read_loaders
from gridagent.train.rng import Rng
from gridagent.train.state import StateError
from gridagent.train.tolerance import StepAborted, Tolerance
from gridagent.train.window import Window

if TYPE_CHECKING:
    from gridagent.train.session import Session

_log = logging.getLogger("gridagent.train")
#: How long a rank stands in a void step before it ends, so that the scheduler requeues the job.
_HOLD_S = 600.0
#: Steps of a process that are looked at for what would keep them from being repeated.
_LOOKS = 3


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
        self._positions: dict[str, Packed] = {}  #: where other loaders were as the window began
        self._contents: list[int] = []  #: of a void step: of what is not put back, as it was void
        self._looks = _LOOKS

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

    def spoilt(self) -> str:
        """Why the step that runs cannot be repeated by this process; "" if it can, as far as is known."""
        if not self._open or self._window is None:
            return ""
        return self._unrepeatable() or self._window.spoilt()

    def rewind(self) -> None:
        """Puts everything back to where the window began. The step can only be repeated after that.

        Raises `StateError` if something was changed that cannot be put back.
        """
        if not self._open or self._window is None:
            return
        if why := self._unrepeatable():
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
            if self._micros == 0 and not self._last:
                self._positions = self._beside(loader)
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
            if (read := self.memory.ended) is None:
                self._window.ended()
            else:
                self._window.ended(read.trees, read.attributes)
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
        self._positions = {}

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
        self._look()

    def _look(self) -> None:
        """Says in the first steps what would keep them from being repeated: better now than in need."""
        if self._looks and not self._apply:
            self._looks -= 1
            if why := self.spoilt():
                self._looks = 0
                _log.warning("if a peer dies in a step like this one, the job ends: %s", why)

    # ------------------------------------------------------------------------------- within

    def _active(self) -> bool:
        """Are the steps of this process attempts by now?"""
        session = self._session
        if self._window is not None or self.off or not session.is_owner:
            return self._window is not None and session.is_owner
        self.off = unfit(session)
        if session.epoch == 0 and session.world_size > 1 and not all_fit(session, not self.off):
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
        if self._open and (kwargs.get("closure") or any(args[1:])):
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
            if self._micros == 0:
                self._undo_between()
            rng.put_back()
        elif self._micros == 0 and self._ended_calls >= 0:
            self.calls_before = CONTEXT.registry.calls - self._ended_calls
        if self._micros == 0:
            self._window.begin()
        else:
            self._window.more()

    def _undo_between(self) -> None:
        """The script came here a second time from the end of its void attempt: what lies between that and the
        next batch, a scheduler's step say, it has done once already before this window began."""
        assert self._window is not None
        try:
            self._window.rewind()
        except StateError as error:
            self._requeue(f"step {self._session.step} cannot be repeated, between two attempts: {error}")
        if self._contents != self._window.contents():
            self._requeue(
                "the script changes parameters or the optimizers' state between two attempts, which cannot be"
                " undone: do that within session.attempt()"
            )
        self._contents = []

    def _unrepeatable(self) -> str:
        """Why the window's batches cannot be given out once more; "" if they can, as far as is known."""
        if self._unfed:
            return "its batch did not come through session.batches()"
        batches = (why for batch in self._kept if (why := batch.trouble()))
        return next(batches, "") or self._shared() or self._strayed()

    def _shared(self) -> str:
        """Do two batches of the window lie in the same memory, so that the first is not there any more?"""
        seen: set[int] = set()
        for batch in self._kept:
            if seen & (its := places(batch.marks)):
                return "the loader gives each batch in the memory of the one before"
            seen |= its
        return ""

    def _beside(self, fed: Any) -> dict[str, Packed]:
        """Where the loaders are that do not feed this window, as far as anybody knows. Draws nothing."""
        state = self._session.state
        beside = {name: loader for name, loader in state.loaders.items() if loader is not fed}
        if not beside or len(beside) == len(state.loaders):  # what feeds it is made of registered ones
            return {}
        rng = Rng.read(state.generators)
        try:
            return read_loaders(beside)
        except Exception:  # of the loader's own code; whoever needs its state will say so
            return {}
        finally:
            rng.put_back()

    def _strayed(self) -> str:
        """Has a registered loader moved whose batches nobody could give out once more?"""
        if not self._positions:
            return ""
        loaders, fed = self._session.state.loaders, {batch.loader for batch in self._kept}
        now = self._beside(next(loader for name, loader in loaders.items() if name not in self._positions))
        strayed = [
            name for name in now if id(loaders[name]) not in fed and now[name] != self._positions[name]
        ]
        return f"batches of {', '.join(strayed)} do not come through session.batches()" if strayed else ""

    def _leave(self, tolerance: Tolerance, error: BaseException | None) -> bool:
        if not (tolerance.failure or self._aborted) or _passes(error):
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
        rngs, contents = deque(self._window.rngs), self._contents
        again: dict[int, deque[Any]] = {}
        for batch in self._kept:
            again.setdefault(batch.loader, deque()).append(batch.value)
        self._close()
        self._rngs, self._again, self._contents = rngs, again, contents
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
        if trouble := self.spoilt():
            self._requeue(f"step {session.step} is void ({why}) and cannot be repeated: {trouble}")
        if not tolerance.terminal(hold_s):
            self._requeue(f"collectives of the old groups have not ended within {hold_s:g} s ({why})")
        _log.warning("step %d is void, rank %d stands: %s", session.step, session.rank, why)
        if self._open and self._window is not None:
            self._contents = self._window.contents()
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


def _passes(error: BaseException | None) -> bool:
    """One that a script's end, or a person, has caused, and no failed collective."""
    return error is not None and not isinstance(error, Exception | StepAborted)
