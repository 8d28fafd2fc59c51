"""Times the demo's training step over gloo, over "grid", or over both in turns within the same processes.

"both" trains two copies of the job, one over each, one step of each in turn: whatever else the machine does
meets both.

usage: steps.py OUT.json gloo|grid|both STEPS [--fsdp], with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gridagent.train import Session  # noqa: F401  # makes the backend "grid" known
from gridagent.train.group import ForwardingGroup
from gridctl.demo.train import VOCABULARY, ByteModel, Text

WARM_STEPS = 5
calls = 0


def count_forwarded() -> None:
    """Counts every collective of every forwarding group from now on."""
    forward = ForwardingGroup.forward

    def counted(self: ForwardingGroup, *args: Any) -> Any:
        global calls
        calls += 1
        return forward(self, *args)

    ForwardingGroup.forward = counted  # type: ignore[method-assign]


def make_step(group: Any, fsdp: bool, text: Text) -> Callable[[], None]:
    """A job over `group` (None: the default one); returns its step."""
    torch.manual_seed(7)
    model: Any = ByteModel()
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group or dist.group.WORLD, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        batch = next(text)
        logits = model(batch[:, :-1])
        nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    out, backend, steps, fsdp = sys.argv[1], sys.argv[2], int(sys.argv[3]), "--fsdp" in sys.argv
    torch.set_num_threads(1)
    dist.init_process_group("grid" if backend == "both" else backend)
    text = Text(7000 + dist.get_rank())
    jobs = {backend: make_step(None, fsdp, text)}
    if backend == "both":
        jobs = {
            "grid": make_step(None, fsdp, text),
            "gloo": make_step(dist.new_group(backend="gloo"), fsdp, text),
        }
    aside = dist.new_group(backend="gloo")
    times: dict[str, list[float]] = {name: [] for name in jobs}
    counted = 0
    for number in range(-WARM_STEPS, steps):
        if number == steps - 1:
            count_forwarded()  # in the last step only, which is not timed
        for name in list(jobs) if number % 2 else list(jobs)[::-1]:
            dist.barrier(aside)
            before = calls
            begun_s = time.perf_counter()
            jobs[name]()
            if 0 <= number < steps - 1:
                times[name].append(time.perf_counter() - begun_s)
            if name == "grid":
                counted = calls - before
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            json.dump({"times_s": times, "collectives": counted}, file)
    dist.barrier(aside)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
