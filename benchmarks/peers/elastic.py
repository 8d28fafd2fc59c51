"""The demo's job as written for torchrun's elastic restart: DDP over gloo, a checkpoint every ten steps.

Each rank saves all of its state, as carefully as can be: model, AdamW, LR schedule, loader, random states.
Started by swap_pause.py through `python -m torch.distributed.run`.

usage: elastic.py OUT STEPS [--pinned-buckets]
"""

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from gridctl.demo.train import VOCABULARY, ByteModel, Text, rate

CHECKPOINT_STEPS = 10


def save(out: Path, rank: int, step: int, parts: dict[str, Any]) -> None:
    """Writes one rank's checkpoint; rank 0 makes it the newest once all ranks have theirs."""
    state = {name: part.state_dict() for name, part in parts.items()}
    state["rng"] = (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    torch.save(state, out / f"checkpoint-{step}-{rank}.pt")
    dist.barrier()
    if rank == 0:
        (out / "newest.draft").write_text(str(step))
        (out / "newest.draft").rename(out / "newest")


def load(out: Path, rank: int, parts: dict[str, Any]) -> int:
    """Puts the newest checkpoint back; returns the step to go on with."""
    if not (out / "newest").exists():
        return 0
    step = int((out / "newest").read_text())
    state = torch.load(out / f"checkpoint-{step}-{rank}.pt", weights_only=False)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["rng"][0])
    random.setstate(state["rng"][1])
    numpy.random.set_state(state["rng"][2])
    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--pinned-buckets", action="store_true", help="DDP never rebuilds its buckets")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    bare = ByteModel()
    model = nn.parallel.DistributedDataParallel(bare, find_unused_parameters=options.pinned_buckets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    text = Text(7 * 1000 + rank)
    torch.manual_seed(7 * 1000 + rank)
    random.seed(7 * 1000 + rank)
    numpy.random.seed(7 * 1000 + rank)
    parts = {"model": bare, "optimizer": optimizer, "schedule": schedule, "text": text}
    log = (options.out / f"rank-{rank}.jsonl").open("a")
    for step in range(load(options.out, rank, parts), options.steps):
        batch = next(text)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        log.write(json.dumps([step, float(loss.detach()).hex(), time.time(), os.getpid(), rank]) + "\n")
        log.flush()
        if (step + 1) % CHECKPOINT_STEPS == 0:
            save(options.out, rank, step + 1, parts)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
