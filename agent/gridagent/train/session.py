"""The training session: what a training script sees of gridctl, about six lines.

    from gridagent.train import Session           # also makes the backend "grid" known to torch
    dist.init_process_group("grid")
    session = Session(model=model, optimizer=optimizer, loader=loader)
    while session.step < STEPS:
        for batch in session.batches(loader):
            ...                                    # forward, backward, optimizer.step(), zero_grad()
            session.end_step(loss=loss)            # the step boundary: here a rank may change its node
    session.close()

Where `with session.attempt():` encloses what each batch causes, a step that a dead peer spoils is not lost:
it is repeated once the rank has a new process (see `gridagent.train.attempt`).

With nothing to do `end_step` costs a few microseconds. Without an agent everything runs as before.
"""

import logging
import os
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from gridagent import wire
from gridagent.names import job_flaw
from gridagent.train.attempt import Attempts
from gridagent.train.context import CONTEXT
from gridagent.train.deputy import objection
from gridagent.train.errors import SessionError
from gridagent.train.feeding import Feeds
from gridagent.train.group import ForwardingGroup
from gridagent.train.handover import Handovers
from gridagent.train.state import CATEGORIES, RankState, StateError, digests, inventory_digest

_log = logging.getLogger("gridagent.train")
_DRAIN_S = 5.0
#: How long the end of a session waits for commands that run, e.g. for a cut that its end aborts.
_SETTLE_S = 2.0
#: Steps by which a warm-up may be prolonged.
_WARMUP_MORE = 3


class Session:
    """One rank's membership in the job. Objects given by name are the rank's state.

    Give everything that training changes: model(s), optimizer(s), LR scheduler, grad scaler, EMA,
    loader, generators, and dicts of your own. `loader` is the name for the data loader.
    Raises `SessionError` if the process group is not "grid", `StateError` for an object of no known kind.
    """

    def __init__(self, **objects: Any) -> None:
        if not dist.is_initialized() or not isinstance(dist.group.WORLD, ForwardingGroup):
            raise SessionError('call torch.distributed.init_process_group("grid") before making a Session')
        if CONTEXT.session is not None:
            raise SessionError("this process has a Session already")
        self.state = RankState(objects)
        self._ddp = self.state.replicas
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.job = os.environ.get("GRIDAGENT_JOB", "job")
        spare = CONTEXT.spare
        self.epoch = spare.epoch if spare else 0
        self.step = spare.step if spare else 0  #: steps done; the index of the step that runs now
        self.micro = 0  #: index of the batch within the step, where several fall into one; from 0
        self.is_owner = spare is None  #: does this process hold its rank in the live epoch?
        self.takeovers = 0  #: rises when this process takes a rank over: iterators made before are stale
        self._warmup_left = spare.warmup_steps if spare else 0
        self._warming_up = spare is not None
        self._callbacks: list[Callable[[], None]] = []
        self.feeds = Feeds(self.state)  #: what the script reads through `batches`
        self._taken = 0  #: batches since the last step ended
        self._step_s: deque[float] = deque(maxlen=64)
        self._last_s = time.perf_counter()
        # The training thread's mailbox. `attention` is the one thing that end_step looks at.
        self.attention = False
        self.stop_at = -1
        self.standing = False  #: the training thread waits at the boundary, or in a void step
        self.stores: list[Any] = []  #: the live epoch's store, and its server where we host it
        self.lock = threading.Lock()
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._boundary_jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.handovers = Handovers(self)
        self.attempts = Attempts(self)
        CONTEXT.read_script()
        CONTEXT.session = self  # from here on the link's thread asks it
        flaw = job_flaw(self.job)
        self._link = None if flaw else CONTEXT.connect()
        if flaw:
            _log.warning("GRIDAGENT_JOB: %s. Training runs without hand-over", flaw)
        elif self._link is None:
            _log.warning("no gridagent here (GRIDAGENT_SOCKET is not set): training runs without hand-over")
        else:
            self._link.handlers |= {
                "describe": lambda _args: wire.plain(self.at_boundary(self.report)),
                "digest": lambda _args: self.at_boundary(self._digest),
                **self.handovers.handlers,
            }
            if spare is None:
                self._link.send(self.hello())

    # ----------------------------------------------------------------------- what a script calls

    def on_takeover(self, callback: Callable[[], None]) -> None:
        """`callback` runs when this process has taken its rank over: open logs, writers, trackers there."""
        self._callbacks.append(callback)

    def attempt(self) -> Attempts:
        """Encloses all that one batch causes; `end_step` is the last line within the last batch of a step.

        If a peer dies, the step is void: the block is left, and `batches` gives its batches out once more.
        """
        return self.attempts

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterates over `loader`, and goes on at the right batch after this process took a rank over.

        Gives the batches of a void step out once more.
        """
        feed = self.feeds.open(loader)
        try:
            while True:
                if again := self.attempts.again(loader):
                    (batch,) = again
                else:
                    try:
                        batch = feed.next()
                    except StopIteration:
                        return
                self.attempts.fetched(loader, batch)
                if not self.attempts.used:
                    self.micro, self._taken = self._taken, self._taken + 1
                yield batch
        finally:
            self.feeds.close(feed)

    def end_step(self, loss: Any = None, grad_norm: Any = None) -> None:
        """The boundary after one optimizer step. Call it on every rank, with gradients zeroed.

        `loss` and `grad_norm` (floats or tensors of one element) are reported to the console; a CUDA
        tensor costs a synchronisation, so give None on most steps where that matters.
        """
        if self.attempts.used:
            self.attempts.end_step()
        now_s = time.perf_counter()
        step_s, self._last_s = now_s - self._last_s, now_s
        self.step += 1
        self._taken = 0
        if self.attempts.used:
            self.attempts.ended()
        if self._link is not None:
            self._step_s.append(step_s)
            if self.is_owner:
                self._link.step(
                    self.epoch,
                    wire.StepEntry(self.step - 1, time.time(), step_s, _number(loss), _number(grad_norm)),
                )
        if self._warming_up:
            self._warm_up()
        elif self.attention:
            self._at_boundary()

    def close(self) -> dict[str, str]:
        """Ends the session after the last step. Returns the digests of the final state, by category.

        They also go to the agent, as the proof of what this run ended with. Empty where the state
        holds what cannot be digested.
        """
        self.handovers.refuse("the training has come to its end")
        if self._link is not None:
            self._link.settle(_SETTLE_S)
        try:
            proof = digests(self.state.inventory())
        except StateError as error:
            _log.warning("the final state has no digests: %s", error)
            proof = {}
        if self._link is not None and self.is_owner:
            self._link.close(
                wire.Farewell(reason="finished", step=self.step, epoch=self.epoch, digests=proof)
            )
        self.attempts.memory.close()
        CONTEXT.session = None
        return proof

    # ----------------------------------------------------------------------- the step boundary

    def _at_boundary(self) -> None:
        """Slow path of `end_step`: requests of the agent, and the hand-over's boundary."""
        with self.lock:
            self.standing = 0 <= self.stop_at <= self.step
            self.attention = self.stop_at >= 0
        while not self._boundary_jobs.empty():
            self._boundary_jobs.get()()
        if self.standing:
            self.drain()
            self.handovers.reached(self.step)
            self.obey()
            CONTEXT.registry.open_gate()

    def go_on(self) -> None:
        """Lifts the stop: the training thread leaves the boundary, or never comes to it."""
        with self.lock:
            self.stop_at = -1
            if self.standing or not self.is_owner or self.handovers.frozen:
                self.standing = False
                self.jobs.put(None)

    def stand(self, standing: bool) -> None:
        """The training thread stands in a void step, or goes on from there."""
        with self.lock:
            self.standing = standing
        if self._link is not None:
            self._link.flush()  # first: the agent takes the step from what it hears last
            self._link.send(self.hello())
        while standing and not self._boundary_jobs.empty():
            self._boundary_jobs.get()()

    def leave(self) -> None:
        """Lets the training thread go from where it stands, unless it has been told to already."""
        with self.lock:
            if self.standing:
                self.standing = False
                self.jobs.put(None)

    def drain(self) -> None:
        """Closes the groups to side threads and waits until no collective is in flight."""
        registry = CONTEXT.registry
        registry.close_gate()
        deadline_s = time.monotonic() + _DRAIN_S
        while registry.in_flight():
            if time.monotonic() > deadline_s:
                self.handovers.refuse(
                    f"{registry.in_flight()} collectives are still in flight at the boundary"
                )
                return
            time.sleep(0.0002)

    def obey(self) -> None:
        """The training thread carries out what the hand-over posts, until it is told to go on."""
        while (job := self.jobs.get()) is not None:
            job()

    def at_boundary(self, work: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Runs `work` in the training thread at the next boundary; at once where it stands in a void step."""
        done: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def job() -> None:
            try:
                done.put((True, work()))
            except Exception as error:
                done.put((False, error))

        with self.lock:
            void = self.standing and self.attempts.void
            if void or not self.is_owner or self.handovers.frozen:
                self.jobs.put(job)
            else:
                self._boundary_jobs.put(job)
                self.attention = True
        try:
            ok, value = done.get(timeout=timeout_s)
        except queue.Empty:
            raise SessionError(f"no step boundary came within {timeout_s:.0f} s") from None
        if not ok:
            raise value
        return value

    # ----------------------------------------------------------------------- a spare's life

    def _warm_up(self) -> None:
        self._warmup_left -= 1
        if self._warmup_left > 0:
            return
        told = self.feeds.rehearse()  # in any case, also where the buckets never come
        if self._warmup_left > -_WARMUP_MORE and not (told and self._rebuilt()):
            return
        self._warming_up = False
        self.state.poison()
        CONTEXT.warm.set()
        self.obey()  # returns when this process has taken its rank, else the process ends

    def _rebuilt(self) -> bool:
        """Does DDP tell its rebuilt buckets by now? With a static graph that takes a step more."""
        return CONTEXT.spare is None or self.buckets() == CONTEXT.spare.buckets

    def take_over(self, step: int) -> None:
        """Everything of the rank is in place: from here on this process is the rank."""
        self.step = step
        self.takeovers += 1
        self._last_s = time.perf_counter()

    def own(self, epoch: int) -> None:
        """The new epoch runs and this process is in it."""
        self.epoch = epoch
        if not self.is_owner:
            self.is_owner = True
            if self._link is not None:
                self._link.send(self.hello())
            for callback in self._callbacks:
                self._call_back(callback)

    def _call_back(self, callback: Callable[[], None]) -> None:
        """The rank is this process's by now: what a script's own callback raises must not end the job."""
        try:
            callback()
        except Exception:
            _log.exception("a take-over callback of rank %s failed; training goes on without it", self.rank)

    # ----------------------------------------------------------------------- what it says of itself

    def hello(self) -> wire.Hello:
        """The first frame to the agent, also after a reconnect."""
        return wire.Hello(
            role="rank" if self.is_owner or self.handovers.frozen else "spare",
            session=CONTEXT.session_id,
            pid=os.getpid(),
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            epoch=self.epoch,
            step=self.step,
            facts=CONTEXT.facts(),
            environment=CONTEXT.environment,
            state="frozen" if self.handovers.frozen else "standing" if self.attempts.void else "training",
            ward=self.attempts.memory.ward if self.attempts.void else -1,
        )

    def report(self) -> wire.SessionReport:
        """What the pre-flight compares. Runs in the training thread, at a boundary."""
        blockers: list[wire.Blocker] = []
        sizes = dict.fromkeys(CATEGORIES, 0)
        inventory = ""
        try:
            blockers += [
                wire.Blocker(code=code, text=text, fatal=fatal)
                for code, text, fatal in [*self.state.blockers(), *self.feeds.blockers()]
                if not (self.attempts.void and code == "gradient-at-boundary")  # of the step that is void
            ]
            if strange := CONTEXT.registry.strangers():
                text = f"{strange}: a spare cannot join it. Make it with the backend grid, or with none named"
                blockers.append(wire.Blocker(code="foreign-group", text=text, fatal=True))
            if self.attempts.void and (why := objection(self)):
                blockers.append(wire.Blocker(code="state-lost", text=why, fatal=True))
            entries = self.state.inventory(loaders=self.is_owner)
            inventory = inventory_digest([e for e in entries if e.category in ("parameters", "buffers")])
            for entry in entries:
                sizes[entry.category] += entry.nbytes
        except StateError as error:
            blockers.append(wire.Blocker(code="state-cannot-move", text=str(error), fatal=True))
        except Exception as error:  # of a registered object's own state_dict
            text = f"a registered object cannot say its state: {type(error).__name__}: {error}"
            blockers.append(wire.Blocker(code="state-cannot-move", text=text, fatal=True))
        return wire.SessionReport(
            role="rank" if self.is_owner else "spare",
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            epoch=self.epoch,
            step=self.step,
            pid=os.getpid(),
            state_bytes=sizes,
            groups=CONTEXT.registry.describe(),
            buckets=self.buckets(),
            inventory=inventory,
            facts=CONTEXT.facts() | self.state.values(),
            environment=CONTEXT.environment,
            blockers=blockers,
            step_s_median=statistics.median(self._step_s) if self._step_s else 0.0,
        )

    def buckets(self) -> str:
        """DDP's bucket layout after its rebuild: "5 4,3 2 1 0", one part a bucket; several DDPs by ";"."""
        layouts = []
        for module in self._ddp:
            data = module._get_ddp_logging_data()
            layouts.append(str(data.get("rebuilt_per_bucket_param_indices", "")))
        return ";".join(layouts)

    def _digest(self) -> dict[str, Any]:
        return {"step": self.step, "epoch": self.epoch, "digests": digests(self.state.inventory())}


def _number(value: Any) -> float | None:
    if value is None:
        return None
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
