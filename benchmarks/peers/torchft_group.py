"""The demo's job as written for torchft: one replica group, three of which train and one is the spare.

Batches and dropout are drawn anew for every (step, rank), so that whoever has a rank draws what that rank
would have drawn. One group leaves at a step, as politely as torchft allows: it shuts
its manager down and ends.
Started by swap_pause.py with the Python of a throw-away environment that has torchft.

usage: torchft_group.py OUT STEPS GROUP GROUPS LEAVES_AT (-1: never)
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from gridctl.demo.train import VOCABULARY, ByteModel, Text, rate

ACTIVE = 3
SPARE_RANK = 1_000  #: what a spare draws its batches for; its gradients count as zero


def meet(out: Path, group: int, groups: int) -> None:
    """All groups come to the first quorum together: a late one would make the first steps differ."""
    (out / f"ready-{group}").touch()
    while len(list(out.glob("ready-*"))) < groups:
        time.sleep(0.02)


def main() -> None:
    out, steps, group, groups, leaves_at = Path(sys.argv[1]), *(int(word) for word in sys.argv[2:6])
    torch.manual_seed(7)
    bare = ByteModel()
    text = Text(7)
    inner = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, rate)
    parts = {"model": bare, "optimizer": inner, "schedule": schedule}

    def read() -> dict[str, Any]:
        return {name: part.state_dict() for name, part in parts.items()}

    def write(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meet(out, group, groups)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=write,
        state_dict=read,
        min_replica_size=ACTIVE,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"g{group}",
        init_sync=False,
    )
    model, optimizer = DistributedDataParallel(manager, bare), Optimizer(manager, inner)
    log = (out / f"rank-{group}.jsonl").open("a")
    while (step := manager.current_step()) < steps:
        if step == leaves_at:
            break
        optimizer.zero_grad()  # asks for the quorum
        rank = manager.participating_rank()
        drawn_for = step * 10_000 + (SPARE_RANK if rank is None else rank)
        text.generator.manual_seed(drawn_for)
        torch.manual_seed(drawn_for)
        batch = next(text)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        optimizer.step()
        if manager.current_step() == step:
            continue  # not committed: the step is done again
        schedule.step()
        log.write(json.dumps([step, float(loss.detach()).hex(), time.time(), os.getpid(), rank]) + "\n")
        log.flush()
    manager.shutdown(wait=False)
    log.close()
    os._exit(0)


if __name__ == "__main__":
    main()
