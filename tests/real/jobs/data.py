"""Where the batches of a test's training come from."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

BATCHES = 11  #: in an epoch of the data, so that a run crosses several ends
FEATURES = 32


class Loader:
    """A hand-made loader with a position. Its batches depend on the rank and the position only."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < BATCHES:
            self.at += 1
            seed = 1000 * self.rank + self.at
            yield torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(seed))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def torchdata_loader(rank: int) -> object:
    """torchdata's loader; it shuffles with seeds that it draws from torch's global generator."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = list(torch.randn(44, FEATURES, generator=torch.Generator().manual_seed(rank)))
    return StatefulDataLoader(samples, batch_size=4, shuffle=True, num_workers=0)


class Wrapped:
    """A loader around torch's, as many write it: passes over what was read already. Opening it draws a seed
    from torch's global generator, and that only as the first batch is fetched."""

    def __init__(self, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.inner = torch.utils.data.DataLoader(list(torch.randn(44, FEATURES, generator=generator)), 4)
        self.at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index, batch in enumerate(self.inner):
            if index < self.at:
                continue
            self.at += 1
            yield batch
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader(rank: int, words: Sequence[str]) -> Any:
    """The loader that a job's words ask for."""
    if "torchdata" in words:
        return torchdata_loader(rank)
    return Wrapped(rank) if "wrapped" in words else Loader(rank)
