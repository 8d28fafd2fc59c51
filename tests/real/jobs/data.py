"""Where the batches of a test's training come from."""

from collections.abc import Iterator

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
