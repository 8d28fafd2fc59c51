"""What a spare trains against before it has a rank: groups and a store that answer locally.

A spare runs the user's script for the rank that it will take: model, optimizer, DDP or FSDP2, and a
few whole iterations, so that buckets, allocator, kernels and optimizer state exist before the pause.
The stand-in reports the real rank and size and completes every collective at once, as if each peer
had sent what we sent. The values are of no account: the restored state overwrites them all.
"""

import importlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed import Store


def _done(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return _create_work_from_future(future)


class StandInGroup:
    """The inner group of a spare. Outputs have the right shapes; nothing leaves the process."""

    def __init__(self, rank: int, size: int, buckets: list[list[int]] | None = None) -> None:
        self._rank = rank
        self._size = size
        self._buckets = buckets
        self._sequence = 0

    # Replaying the job's bucket layout: DDP's reducer rebuilds its buckets after the first backward
    # and takes rank 0's order from two broadcasts of int32 tensors: the flattened indices followed
    # by the number of buckets, then the bucket sizes.
    def broadcast(self, tensors: list[Tensor], *_: Any, **__: Any) -> Any:
        if self._buckets and len(tensors) == 1 and tensors[0].dtype == torch.int32 and tensors[0].dim() == 1:
            flat = [index for bucket in self._buckets for index in bucket]
            if tensors[0].numel() == len(flat) + 1:
                tensors[0].copy_(torch.tensor([*flat, len(self._buckets)], dtype=torch.int32))
            elif tensors[0].numel() == len(self._buckets):
                tensors[0].copy_(torch.tensor([len(bucket) for bucket in self._buckets], dtype=torch.int32))
        return _done(tensors)

    def allreduce(self, tensors: list[Tensor], *_: Any, **__: Any) -> Any:
        return _done(tensors)

    allreduce_coalesced = reduce = allreduce

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any, **__: Any) -> Any:
        for gathered, own in zip(outputs, inputs, strict=True):
            for output in gathered:
                output.copy_(own)
        return _done(outputs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any, **__: Any
    ) -> Any:
        for gathered in outputs:
            for output, own in zip(gathered, inputs, strict=True):
                output.copy_(own)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, *_: Any, **__: Any) -> Any:
        output.view(self._size, -1).copy_(
            own.reshape(1, -1).clone()
        )  # FSDP2 gathers in place: own lies in output
        return _done([output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], *_: Any, **__: Any
    ) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any, **__: Any) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self._rank])
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, own: Tensor, *_: Any, **__: Any) -> Any:
        output.copy_(own.view(self._size, -1)[self._rank].view(output.shape).clone())
        return _done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], *_: Any, **__: Any
    ) -> Any:
        for output, own in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, own)
        return _done(outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(self, output: Tensor, own: Tensor, *_: Any, **__: Any) -> Any:
        _copy_what_fits(output, own)
        return _done([output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any, **__: Any) -> Any:
        for output in outputs:
            _copy_what_fits(output, inputs[self._rank])
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: Any, **__: Any) -> Any:
        for gathered in outputs:  # empty unless we are the root
            for output in gathered:
                output.copy_(inputs[0])
        return _done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], *_: Any, **__: Any) -> Any:
        for output, parts in zip(outputs, inputs, strict=False):  # empty unless we are the root
            output.copy_(parts[self._rank])
        return _done(outputs)

    def send(self, tensors: list[Tensor], *_: Any, **__: Any) -> Any:
        return _done(tensors)

    recv = recv_anysource = send

    def barrier(self, *_: Any, **__: Any) -> Any:
        return _done([])

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        return None

    def _start_coalescing(self, _device: torch.device) -> None:
        return None

    def _end_coalescing(self, _device: torch.device) -> Any:
        return _done([])

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _get_backend(self, _device: torch.device) -> Any:
        return self

    def set_timeout(self, _timeout: timedelta) -> None:
        return None

    def shutdown(self) -> None:
        return None

    abort = shutdown


def _copy_what_fits(output: Tensor, own: Tensor) -> None:
    count = min(output.numel(), own.numel())
    output.zero_()
    output.view(-1)[:count].copy_(own.reshape(-1)[:count])


class StandInStore(Store):
    """A store in which every rank has already arrived: barriers in `new_group` pass at once."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._world_size = world_size
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        if "barrier" in key:
            return self._world_size
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        if key not in self._values:
            raise dist.DistStoreError(f"a warming spare has no value for {key!r}")
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        return None

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        return None


def install_rendezvous(world_size: int, rank: int) -> None:
    """From now on `init_process_group("grid")` in this process finds a stand-in store, not MASTER_ADDR."""
    rendezvous: Any = importlib.import_module(
        "torch.distributed.rendezvous"
    )  # the package has a function of that name

    def handler(_url: str, timeout: timedelta | None = None, **_: Any) -> Any:
        yield StandInStore(world_size), rank, world_size

    # torch offers no way to replace a handler; "env" is what a script without init_method asks for.
    for scheme in ("env", "tcp"):
        rendezvous._rendezvous_handlers[scheme] = handler
