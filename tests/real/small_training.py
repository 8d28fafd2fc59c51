"""A small training job for tests: DDP, dropout, AdamW. usage: small_training.py FOLDER

Every rank appends "STEP LOSS_HEX" to FOLDER/rank-R.txt and ends when FOLDER/stop exists.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gridagent.train import Session


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("grid")
    rank = dist.get_rank()
    torch.manual_seed(7)
    layers = [nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    data = torch.Generator().manual_seed(200 + rank)
    session = Session(model=model, optimizer=optimizer, data=data)
    stop = torch.zeros(1)
    while not stop.item():
        batch = torch.randn(16, 32, generator=data)
        loss = nn.functional.mse_loss(model(batch), batch.roll(1, dims=1))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stop.fill_(float((folder / "stop").exists()))
        dist.all_reduce(stop)
        if session.is_owner:
            with (folder / f"rank-{rank}.txt").open("a") as file:
                print(session.step, float.hex(loss.item()), file=file)
        session.end_step(loss=loss.item(), grad_norm=norm.item())
        time.sleep(float(os.environ.get("OMP_STEP_S", "0.03")))
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
