"""The groups and the store of the next epoch, beside those of the present one, in one process."""

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from gridagent import wire
from gridagent.train.context import CONTEXT
from gridagent.train.rendezvous import call_roll, connect_store, host_store

#: Bound for building the groups once all members are there.
_BUILD_S = 30.0


class NextEpoch:
    """What a hand-over prepares beside training, and what it may turn back to."""

    def __init__(self) -> None:
        self._store: Any = None
        self._server: TCPStore | None = None
        self._inners: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._old_store: Any = None

    def host(self) -> wire.ChairOffer:
        """Hosts the store: the chair's part."""
        self._server, offer = host_store()
        self._store = self._server
        return offer

    def reach(self, offer: wire.ChairOffer) -> None:
        """Connects to the chair's store. Raises `HandoverError`, `RuntimeError`."""
        self._store = connect_store(offer)

    def store(self, epoch: int) -> Store:
        """The part of the store that belongs to an epoch."""
        return PrefixStore(f"epoch/{epoch}", self._store)

    def build(self, epoch: int, me: str, parties: Iterable[str], trouble: Callable[[], str]) -> None:
        """Waits until all `parties` are here, and builds the groups with them. Runs beside training."""
        registry, store = CONTEXT.registry, self.store(epoch)
        call_roll(store, me, parties, trouble)
        self._inners = registry.build(store, timedelta(seconds=_BUILD_S))
        for group in registry.groups():
            self._inners[group.key].set_timeout(group.timeout)

    def gather(self, epoch: int, boundary: int, timeout_s: float) -> str:
        """Switches to the new groups and proves that all members stand at the same (epoch, S).

        Returns why that failed, "" if it did not. Runs in the training thread.
        """
        registry = CONTEXT.registry
        self._before, self._old_store = registry.switch(self._inners, self._store)
        world = registry.groups()[0]
        mine = torch.tensor([epoch, boundary], dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(world.size())]
        try:
            work = world.inner.allgather([gathered], [mine])
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            return f"gather over epoch {epoch}: {error}"
        if any(not torch.equal(other, mine) for other in gathered):
            return f"gather over epoch {epoch}: members stand at different steps"
        return ""

    def enter(self) -> list[Any]:
        """The new epoch runs: its store is the job's from now on, the old groups go.

        Returns what must be kept for as long as the epoch lasts: the store, and its server where we host it.
        """
        kept = [self._store, self._server]
        os.environ.update(MASTER_ADDR=str(self._store.host), MASTER_PORT=str(int(self._store.port)))
        self.forget()
        return kept

    def turn_back(self) -> None:
        """The old groups are the live ones again."""
        if self._before:
            CONTEXT.registry.switch(self._before, self._old_store)
        self.forget()

    def forget(self) -> None:
        """Gives back the groups and stores that no epoch uses: they end with their last reference."""
        self._inners, self._before = {}, {}
        self._store = self._server = self._old_store = None
