"""Process groups whose inside can be exchanged while DDP, FSDP2 and meshes keep the outside.

`dist.init_process_group("grid")`, and every `new_group` and device mesh after it, come out of
`_create` below: each gets a `ForwardingGroup` around an inner group of epoch e. To change the
membership of the job, the groups of epoch e+1 are built beside those of e (`GroupRegistry.build`)
and exchanged in one go (`GroupRegistry.switch`).

Facts this rests on (torch 2.13): a registered backend may return a `ProcessGroup` subclass, which
torch then uses as it is; C++ callers (DDP's reducer, functional collectives) reach Python overrides
under the method names below; `ProcessGroup` itself cannot be asked for its name without a backend,
hence the overridden names.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d as c10d

from gridagent.train.tolerance import StepAborted, Tolerance

#: Every collective of `ProcessGroup` in torch 2.9 to 2.13, forwarded one by one.
COLLECTIVES = (
    "_allgather_base",
    "_end_coalescing",
    "_reduce_scatter_base",
    "_start_coalescing",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)

_FINISH_IN_WAIT = frozenset(name for name in COLLECTIVES if "reduce_scatter" in name)

#: Everything else that `ProcessGroup` has and that is no collective: answered here or by the base.
_NOT_COLLECTIVES = frozenset(  # a list of forty quoted words reads worse
    "BackendType CUSTOM GLOO MPI NCCL UCC UNDEFINED XCCL _backend_id _device_types _enable_collectives_timing"
    " _get_backend _get_backend_name _get_sequence_number_for_group _has_hooks _id _pybind11_conduit_v1_"
    " _register_backend _register_on_completion_hook _set_default_backend _set_group_desc _set_group_name"
    " _set_sequence_number_for_group _wait_for_pending_works abort bound_device_id boxed get_group_store"
    " group_desc group_name merge_remote_group name rank set_timeout shutdown size split_group unbox"
    " use_pg_for_symm_mem_rendezvous".split()
)


class GroupError(RuntimeError):
    """A process group cannot do what was asked of it; the message says what to do."""


def check_torch() -> None:
    """Raises `GroupError` if this torch has a collective that is not forwarded (or lacks gloo)."""
    known = _NOT_COLLECTIVES.union(COLLECTIVES)
    unknown = [name for name in dir(ProcessGroup) if not name.startswith("__") and name not in known]
    if unknown:
        raise GroupError(
            f"torch {torch.__version__} has process group methods that gridagent does not forward: "
            f"{', '.join(unknown)}. Use a tested version (see constraints.txt) or a newer gridctl-agent."
        )
    if not dist.is_gloo_available():
        raise GroupError(f"torch {torch.__version__} was built without gloo, which gridagent needs")


class _WaitedWork(dist.Work):
    """Work that counts as completed once somebody waited for it.

    gloo's reduce-scatters finish inside `wait()` and never report completion by themselves.
    """

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work
        self._waited = False

    def wait(self, *args: Any) -> bool:
        done = bool(self._work.wait(*args))
        self._waited = True
        return done

    def is_completed(self) -> bool:
        return self._waited or bool(self._work.is_completed())

    def get_future(self) -> Any:
        return self._work.get_future()


class ForwardingGroup(ProcessGroup):
    """A process group that hands every collective to `inner`, which can be exchanged.

    `rank` and `size` never change: a hand-over keeps the world size and the order of ranks.
    """

    def __init__(self, registry: "GroupRegistry", name: str, ranks: list[int], rank: int, timeout: timedelta):
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # torch's stub knows one of two
        self.registry = registry
        self.key = name
        self.ranks = ranks
        self.timeout = timeout
        self.inner: Any = None
        self._my_rank = rank
        self._name = name
        self._desc = "undefined"
        self._pending: deque[Any] = deque()

    def forward(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one collective on the inner group and remembers its work until it has completed."""
        registry = self.registry
        registry.calls += 1
        if registry.gate_closed:
            registry.wait_open()
        tolerance = registry.tolerance
        if tolerance is None or not (tolerance.armed or tolerance.failure):
            return self._remember(self._start(method, args, kwargs))
        if tolerance.failure:
            return tolerance.finished(method, args)
        try:
            work = self._start(method, args, kwargs)
        except Exception as error:
            if not tolerance.is_failure(method, error):
                raise
            tolerance.fail(f"{method}: {error}")
            return tolerance.finished(method, args)
        return self._remember(work if work is None else tolerance.guard(work, method, args))

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        work = getattr(self.inner, method)(*args, **kwargs)
        if method in _FINISH_IN_WAIT and work is not None:
            return _WaitedWork(work)
        return work

    def _remember(self, work: Any) -> Any:
        pending = self._pending
        while pending and pending[0].is_completed():
            pending.popleft()
        if work is not None:
            pending.append(work)
        return work

    def in_flight(self) -> int:
        """Collectives that were started and have not completed."""
        self._pending = deque(work for work in self._pending if not work.is_completed())
        return len(self._pending)

    def take_inner(self) -> list[Any]:
        """Takes out the inner group and all pending works, so that whoever drops them closes its sockets."""
        taken = [self.inner, *self._pending]
        self.inner, self._pending = None, deque()
        return taken

    def _live(self) -> Any:
        inner = self.inner
        if inner is None:
            raise StepAborted(f"group {self._name} has no connections: a peer is gone")
        return inner

    # torch asks C++ names of a subclass from C++, and the Python names from Python.
    def rank(self) -> int:
        return self._my_rank

    def size(self) -> int:
        return len(self.ranks)

    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        return "grid"

    _get_backend_name = name = getBackendName

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        return self._desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupDesc = _set_group_desc

    def _get_backend(self, device: torch.device) -> Any:
        return self._live()._get_backend(device)

    def _set_sequence_number_for_group(self) -> None:
        pass  # set on the inner group when it is built

    def _get_sequence_number_for_group(self) -> int:
        return int(self._live()._get_sequence_number_for_group())

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        if self.inner is not None:
            self.inner.set_timeout(timeout)

    def shutdown(self) -> None:
        self.registry.forget(self)
        if self.inner is not None:
            self.inner.shutdown()

    def abort(self) -> None:
        self.registry.forget(self)
        if self.inner is not None:
            self.inner.abort()


def _forwarder(method: str) -> Callable[..., Any]:
    def call(self: ForwardingGroup, *args: Any, **kwargs: Any) -> Any:
        return self.forward(method, args, kwargs)

    call.__name__ = method
    return call


for _method in COLLECTIVES:
    setattr(ForwardingGroup, _method, _forwarder(_method))


class GroupRegistry:
    """All live groups of this process, in creation order, and the factory that torch calls."""

    def __init__(self) -> None:
        self._groups: dict[str, weakref.ref[ForwardingGroup]] = {}
        self.calls = 0  #: rises with every collective
        self.created = 0  #: rises with every group that is made or destroyed
        self.gate_closed = False
        self._gate = threading.Condition()
        self.standin: Callable[[int, int], Any] | None = None  #: makes inner groups in a spare
        self.tolerance: Tolerance | None = None  #: what becomes of failures, where steps are attempts

    def tolerate(self) -> Tolerance:
        """From now on failures are recorded, in steps that are attempts. Called by the training thread."""
        if self.tolerance is None:
            self.tolerance = Tolerance(
                lambda: [part for group in self.groups() for part in group.take_inner()]
            )
        return self.tolerance

    def create(self, options: Any, _backend_options: Any = None) -> ForwardingGroup:
        """torch's factory call for one group (extended API)."""
        if self.tolerance is not None and self.tolerance.failure:
            raise StepAborted("no group can be made now: a peer is gone")
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        name = str(options.group_id)
        group = ForwardingGroup(self, name, ranks, options.group_rank, options.timeout)
        if self.standin is not None:
            group.inner = self.standin(options.group_rank, options.group_size)
        else:
            group.inner = inner_group(options.store, options.group_rank, options.group_size, options.timeout)
        self._groups[name] = weakref.ref(group)
        self.created += 1
        return group

    def forget(self, group: ForwardingGroup) -> None:
        if self._groups.pop(group.key, None) is not None:
            self.created += 1

    def groups(self) -> list[ForwardingGroup]:
        """Live groups in creation order."""
        return [group for ref in self._groups.values() if (group := ref()) is not None]

    def describe(self) -> list[str]:
        """One "name:rank,rank" for each group; equal on a source and its target."""
        return [f"{group.group_name}:{','.join(map(str, group.ranks))}" for group in self.groups()]

    def strangers(self) -> str:
        """A group of this process that is none of ours, in words; "" if there is none."""
        groups = dist.distributed_c10d._world.pg_map
        names = [group.name() for group in groups if not isinstance(group, ForwardingGroup)]
        return f"a process group of the backend {names[0]}" if names else ""

    def in_flight(self) -> int:
        return sum(group.in_flight() for group in self.groups())

    def build(self, store: Store, timeout: timedelta) -> dict[str, Any]:
        """Builds an inner group of the next epoch for every live group. Blocks until all members came.

        Runs beside training. Every process builds in creation order, so that no two wait crosswise.
        """
        return {
            group.key: inner_group(
                PrefixStore(f"group/{group.group_name}", store), group.rank(), group.size(), timeout
            )
            for group in self.groups()
        }

    def switch(self, inners: dict[str, Any], store: Store) -> tuple[dict[str, Any], Store]:
        """Exchanges the inside of every group at once; returns what was inside, and the store, before.

        Also puts `store` in the place of the default store, for groups that are made later: the old
        one is hosted by a process that may have left. A spare becomes a member here: its later groups
        are real. Groups that were dropped because a peer is gone are not returned: no way leads back.
        """
        self.standin = None
        before = {group.key: group.inner for group in self.groups() if group.inner is not None}
        for group in self.groups():
            group.inner = inners[group.key]
            group._pending.clear()
        world = c10d._get_default_group()
        backend, store_before = c10d._world.pg_map[world]
        c10d._world.pg_map[world] = (backend, store)
        if self.tolerance is not None:
            self.tolerance.reset()
        return before, store_before

    def close_gate(self) -> None:
        """From now on every new collective waits (a side thread's, during a switch)."""
        self.gate_closed = True

    def open_gate(self) -> None:
        with self._gate:
            self.gate_closed = False
            self._gate.notify_all()

    def wait_open(self) -> None:
        with self._gate:
            if not self._gate.wait_for(lambda: not self.gate_closed, timeout=120.0):
                raise GroupError("a hand-over kept the process groups closed for 120 s")


def inner_group(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """A full `ProcessGroup` with gloo behind CPU tensors and, where CUDA is, nccl behind CUDA ones.

    nccl is written on this seam and has never run with more than one rank. GRIDAGENT_CUDA_INNER=gloo
    takes gloo for CUDA tensors too.
    """
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [ProcessGroupGloo.create_device(hostname=node_address())]
    gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available():
        if os.environ.get("GRIDAGENT_CUDA_INNER", "nccl") == "gloo":
            group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.GLOO, gloo)
        else:
            _add_nccl(group, store, rank, size, timeout)
    group._set_group_name(f"inner-{rank}-{size}")  # type: ignore[arg-type]
    return group


def _add_nccl(group: ProcessGroup, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Experimental: never run with more than one rank (nccl refuses two ranks on one GPU)."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
    nccl._set_sequence_number_for_group()
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)


def node_address() -> str:
    """The address of this node that peers reach, where every listener binds."""
    return os.environ.get("GRIDAGENT_ADDR") or "127.0.0.1"


def register(registry: GroupRegistry) -> None:
    """Makes "grid" known to torch. Raises `GroupError` on a torch that is not fully forwarded."""
    check_torch()
    dist.Backend.register_backend("grid", registry.create, extended_api=True, devices=["cpu", "cuda"])
