"""Signs the journal's chain every hour, where the operator's audit key is in the keyring."""

import asyncio
import logging
import time
from typing import Protocol

import msgspec

from gridctl.control.ledger import Ledger
from gridctl.home import Home
from gridctl.trust import TrustError
from gridctl.trust.checkpoints import AuditKey, account, append

EVERY_S = 3600.0
#: A keyring that asks somebody for a password is not waited for.
PATIENCE_S = 10.0

log = logging.getLogger("gridctl.control")


class World(Protocol):
    """What this needs of the controller."""

    home: Home
    ledger: Ledger


class Notary:
    """One for each controller. Without the key nothing is signed; `gridctl audit checkpoint` makes it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._due_s = time.monotonic() + EVERY_S
        self._seq = 0  #: of the last checkpoint
        self.problem = ""

    async def turn(self) -> None:
        """Signs if it is time, and if anything was written since. Raises `Refused` for the journal."""
        if time.monotonic() < self._due_s or self._world.ledger.seq <= self._seq:
            return
        self._due_s = time.monotonic() + EVERY_S
        home, ledger = self._world.home, self._world.ledger
        try:
            name = account(home.trust, home.journal)
            key = await asyncio.wait_for(asyncio.to_thread(AuditKey.of, name, make=False), PATIENCE_S)
        except (TrustError, TimeoutError) as error:
            self._complain(str(error) or "the keyring does not answer")
            return
        if key is None:
            self._complain("there is no audit key yet: `gridctl audit checkpoint` makes one")
            return
        self.problem = ""
        checkpoint = key.sign(ledger.seq, ledger.head, time.time())
        append(home.checkpoints, checkpoint)
        text = f"checkpoint of record {checkpoint.seq}, signed with {key.id}"
        record = ledger.append(
            "audit", {"what": "checkpoint", "text": text, **msgspec.to_builtins(checkpoint)}
        )
        self._seq = record.seq

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("the journal is not signed: %s", problem)
        self.problem = problem
