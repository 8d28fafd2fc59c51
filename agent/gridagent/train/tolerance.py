"""What becomes of a collective whose peer died: it never raises into DDP, it makes the step void.

An exception in the middle of DDP's forward or backward leaves it in a state from which it does not come
back. So while a step is an attempt, the first failure is recorded, the inner groups of all forwarding
groups are dropped at once, and every later collective returns finished work until `reset`.

Dropping closes gloo's sockets, and that is what frees ranks that are no neighbours of the dead one:
they would sit out the time-out (gloo's `abort` wakes nobody). It works only if nothing holds the old
works either, for they hold the sockets; hence `TolerantWork`, which lets go of its own.
"""

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

#: Collectives that fail in the call itself where a peer is gone; the others only enqueue there.
_FAIL_IN_CALL = frozenset(("send", "recv", "recv_anysource", "monitored_barrier"))
#: Collectives whose first argument is nothing but output: what they did not receive is zeros.
_OUTPUT_FIRST = ("allgather", "all_gather", "_allgather", "alltoall", "all_to_all", "gather", "recv",
                 "reduce_scatter", "_reduce_scatter", "scatter")  # fmt: skip
#: A caller below one of these files is torch's own machinery, which no exception may reach.
_INSIDE = ("/torch/nn/parallel/", "/torch/autograd/", "/torch/nn/modules/_functions.py")
_OURS = ("/gridagent/train/group.py", "/gridagent/train/tolerance.py")


class StepAborted(BaseException):
    """The step that runs is void, because a peer is gone; it will be repeated. Let it pass.

    No `Exception`: a script that goes on after those would train on in the middle of a void step.
    """


class Tolerance:
    """Records the first failure of this process's collectives and answers the later ones."""

    def __init__(self, drop: Callable[[], list[Any]]) -> None:
        self._drop = drop  #: takes the inner groups and pending works out of all groups, and returns them
        self._lock = threading.Lock()
        self._works: weakref.WeakSet[TolerantWork] = weakref.WeakSet()
        self._dropping: threading.Thread | None = None
        self._trainer = threading.get_ident()
        self.armed = False  #: a step is an attempt just now
        self.failure = ""  #: the first failure since the last `reset`
        self.failed_s = 0.0  #: when, on the monotonic clock
        self.spoilt = False  #: the training thread was given what no peer sent
        self.buckets_spoilt = False  #: DDP's exchange of its bucket layout was among that

    def guard(self, work: Any, method: str, args: tuple[Any, ...]) -> "TolerantWork":
        """Wraps work that was just started."""
        guarded = TolerantWork(self, work, method, args)
        with self._lock:
            self._works.add(guarded)
        return guarded

    def is_failure(self, method: str, error: Exception) -> bool:
        """Does an error of the call itself mean that a peer is gone? Wrong arguments do not."""
        return bool(self.failure) or isinstance(error, dist.DistError) or method in _FAIL_IN_CALL

    def fail(self, why: str) -> None:
        """Records a failure and drops all inner groups. Returns at once, in any thread."""
        with self._lock:
            if self.failure:
                return
            self.failure, self.failed_s = why, time.monotonic()
            dropped = self._drop()
            for work in list(self._works):
                dropped.append(work.let_go())
            # A group's end waits for its works, and a work's callback may be what runs here.
            self._dropping = threading.Thread(target=dropped.clear, name="gridagent-drop-groups", daemon=True)
            self._dropping.start()

    def finished(self, method: str, args: tuple[Any, ...]) -> Any:
        """Finished work in the place of a collective. Raises `StepAborted` if the script itself called."""
        self.took(method, args, threading.get_ident())
        fill(method, args)
        return None if method == "monitored_barrier" else finished_work(args)

    def took(self, method: str, args: tuple[Any, ...], thread: int) -> None:
        """Somebody is about to be given what no peer sent. Raises `StepAborted` if it is the script."""
        others = {t.ident for t in threading.enumerate()} - {self._trainer}
        if thread not in others:  # the training thread, or autograd's own, which Python does not know
            self.spoilt = True
        frame = sys._getframe(1)
        if method == "broadcast" and is_bucket_layout(frame, args):
            self.buckets_spoilt = True
        if called_by_script(frame):
            raise StepAborted(f"a collective failed: {self.failure}")

    def terminal(self, timeout_s: float) -> bool:
        """Waits until no work of the dropped groups can write any more."""
        if self._dropping is not None:
            self._dropping.join(timeout_s)
            return not self._dropping.is_alive()
        return True

    def reset(self) -> None:
        """New inner groups are in."""
        with self._lock:
            self.failure, self._dropping = "", None
            self.spoilt = self.buckets_spoilt = False


class TolerantWork(dist.Work):
    """Work whose failure is recorded and not raised, unless the script itself waits for it."""

    def __init__(self, tolerance: Tolerance, work: Any, method: str, args: tuple[Any, ...]) -> None:
        super().__init__()
        self._tolerance = tolerance
        self._work = work
        self._method = method
        self._args = args
        self._thread = threading.get_ident()

    def let_go(self) -> Any:
        """Gives the inner work away: from now on this one counts as finished, and failed."""
        work, self._work = self._work, None
        return work

    def wait(self, *args: Any) -> bool:
        try:
            if self._work is not None:
                return bool(self._work.wait(*args))
        except Exception as error:
            self._tolerance.fail(f"{self._method}: {error}")
        self._tolerance.took(self._method, self._args, self._thread)
        return True

    def is_completed(self) -> bool:
        work = self._work
        return work is None or bool(work.is_completed())

    def is_success(self) -> bool:
        work = self._work
        return work is not None and bool(work.is_success())

    def result(self) -> Any:
        return self._args[0]

    def get_future(self) -> Any:
        work = self._work
        if work is None:
            return _future(self._args)
        # The callback may outlive this work by a while and must not hold the inner one.
        tolerance, method, args, thread = self._tolerance, self._method, self._args, self._thread
        del work

        def settle(future: Any) -> Any:
            try:
                return future.value()
            except Exception as error:
                tolerance.fail(f"{method}: {error}")
                tolerance.took(method, args, thread)
                return args[0]

        return self._work.get_future().then(settle)


def _future(args: tuple[Any, ...]) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(args[0] if args else [])
    return future


def finished_work(args: tuple[Any, ...]) -> Any:
    """Work that has completed, with a future that holds the first argument: its tensors."""
    return _create_work_from_future(_future(args))


def fill(method: str, args: tuple[Any, ...]) -> None:
    """Zeros where a collective would have written what peers sent."""
    if args and method.startswith(_OUTPUT_FIRST):
        with torch.no_grad():
            for tensor in _tensors(args[0]):
                tensor.zero_()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def is_bucket_layout(frame: FrameType | None, args: tuple[Any, ...]) -> bool:
    """Is this broadcast DDP's reducer handing out rank 0's order of gradients, as int32 vectors?

    It is called from DDP's own forward, buffers by way of functions that synchronise.
    """
    while frame is not None and frame.f_code.co_filename.endswith(_OURS):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.endswith("/torch/nn/parallel/distributed.py"):
        return False
    tensors = list(_tensors(args[0])) if args else []
    of_buffers = any(word in frame.f_code.co_name for word in ("sync", "broadcast"))
    return not of_buffers and [(t.dtype, t.dim()) for t in tensors] == [(torch.int32, 1)]


def called_by_script(frame: FrameType | None) -> bool:
    """Was this call made by the user's code, and not by DDP or from within a backward pass?"""
    script = False
    while frame is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in _INSIDE):
            return False
        script = script or not path.endswith(_OURS)
        frame = frame.f_back
    return script
