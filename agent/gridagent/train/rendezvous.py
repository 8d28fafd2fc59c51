"""The store of the next epoch: the chair hosts it, a nonce proves it, and the roll is called at it."""

import os
import time
from collections.abc import Callable, Iterable

from torch.distributed import Store, TCPStore

from gridagent import wire
from gridagent.train.errors import HandoverError
from gridagent.train.group import node_address

_NONCE = "gridctl/nonce"
_LOOK_S = 0.02


def host_store() -> tuple[TCPStore, wire.ChairOffer]:
    """Hosts a store on a port that the kernel chooses; it ends with its last reference."""
    store = TCPStore(node_address(), 0, is_master=True, wait_for_workers=False)
    nonce = os.urandom(16).hex()
    store.set(_NONCE, nonce)
    return store, wire.ChairOffer(store_host=node_address(), store_port=store.port, nonce=nonce)


def connect_store(offer: wire.ChairOffer) -> TCPStore:
    """Raises `HandoverError` if another server answers there, `RuntimeError` if none does."""
    store = TCPStore(offer.store_host, offer.store_port, is_master=False, wait_for_workers=False)
    if store.get(_NONCE) != offer.nonce.encode():
        raise HandoverError(f"the store at {offer.store_host}:{offer.store_port} is not this hand-over's")
    return store


def call_roll(store: Store, me: str, parties: Iterable[str], trouble: Callable[[], str]) -> None:
    """Waits until all `parties` are here: to build groups, once begun, cannot be called off.

    Raises `HandoverError` as soon as `trouble` returns a reason, `RuntimeError` if the store is gone.
    """
    store.set(f"here/{me}", "")
    await_keys(store, [f"here/{party}" for party in parties], trouble)


def await_keys(store: Store, keys: list[str], trouble: Callable[[], str]) -> None:
    """Waits until all `keys` are set.

    Raises `HandoverError` as soon as `trouble` returns a reason, `RuntimeError` if the store is gone.
    """
    while not store.check(keys):
        if why := trouble():
            raise HandoverError(why)
        time.sleep(_LOOK_S)
