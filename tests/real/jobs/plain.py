"""DDP with BatchNorm, dropout, AdamW and clipping, a cosine schedule and a loader that has a position."""

import random
from collections.abc import Iterator

import record
import torch
import torch.distributed as dist
from torch import nn

from gridagent.train import Session

BATCHES = 17  #: in an epoch of the data, so that a run crosses several ends


class Loader:
    """Batches that depend on the rank and the position only."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES:
            self.at += 1
            yield torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * self.rank + self.at))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def main() -> None:
    dist.init_process_group("grid")
    rank = dist.get_rank()
    torch.manual_seed(7)
    layers = [nn.Linear(32, 48), nn.BatchNorm1d(48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 8)]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, record.STEPS)
    loader = Loader(rank)
    session = Session(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
    record.seed(100 + rank)
    while session.step < record.STEPS:
        for batch in session.batches(loader):
            record.before_step(session)
            loss = model(batch).square().mean() * (1 + 0.01 * random.random())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            record.wrote(session, loss)
            session.end_step(loss=loss, grad_norm=norm)
            if session.step >= record.STEPS:
                break
    record.done(session)
    dist.destroy_process_group()


main()
