"""Times small collectives over gloo, bare and through a forwarding group around the same kind of group.

usage: collectives.py OUT.json, with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from gridagent.train.group import ForwardingGroup, GroupRegistry, inner_group

BLOCKS = 40  #: of each kind, taking turns
CALLS = 100  #: in a block
FLOATS = (1, 1024)


def python_path(group: Any, tensor: torch.Tensor) -> None:
    """As FSDP2 and scripts call: the method of the group, from Python."""
    group.allreduce([tensor]).wait()


def native_path(group: Any, tensor: torch.Tensor) -> None:
    """As DDP's reducer calls: from C++, which finds the override in Python."""
    dist._broadcast_coalesced(group, [tensor], 1 << 20, 0)


def block_us(call: Callable[[Any, torch.Tensor], None], group: Any, tensor: torch.Tensor) -> float:
    begun_s = time.perf_counter()
    for _ in range(CALLS):
        call(group, tensor)
    return (time.perf_counter() - begun_s) / CALLS * 1e6


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    torch.set_num_threads(1)
    store = TCPStore(address, port, world, rank == 0)
    timeout = timedelta(seconds=60)
    bare = inner_group(PrefixStore("bare", store), rank, world, timeout)
    forwarding = ForwardingGroup(GroupRegistry(), "0", list(range(world)), rank, timeout)
    forwarding.inner = inner_group(PrefixStore("inner", store), rank, world, timeout)
    found: list[dict[str, Any]] = []
    for floats in FLOATS:
        for name, call in (("allreduce, Python", python_path), ("broadcast, C++", native_path)):
            tensor = torch.zeros(floats)
            samples: dict[str, list[float]] = {"bare": [], "forwarding": []}
            for group in (bare, forwarding):
                block_us(call, group, tensor)
            for number in range(BLOCKS):
                pair = [("bare", bare), ("forwarding", forwarding)]
                for kind, group in pair if number % 2 else pair[::-1]:
                    samples[kind].append(block_us(call, group, tensor))
            found.append({"call": name, "floats": floats, "world": world, **samples})
    if rank == 0:
        with open(sys.argv[1], "w") as out:
            json.dump(found, out)
    python_path(bare, torch.zeros(1))  # nobody ends before the last has measured


if __name__ == "__main__":
    main()
