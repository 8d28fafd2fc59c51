"""What the controller owes the fleet's trust: peers checked, lists passed on, its own certificate renewed."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gridctl.model.fleet import Node
from gridctl.ports.agents import AgentRefused, Agents, AgentUnreachable
from gridctl.trust import (
    Authority,
    IdentityError,
    TrustError,
    client_context,
    own_identity,
    peer_of,
    read_acts,
)
from gridctl.trust.acts import FILE as ACTS_FILE

TEND_S = 3600.0

log = logging.getLogger("gridctl.control")


class Trustee:
    """Works without the root key. Raises `IdentityError` where the trust folder is incomplete."""

    def __init__(self, trust: Path) -> None:
        self._trust = trust
        self.context = client_context(trust)
        self.may_only_look = self._may_only_look()  #: why the nodes take no order from here, else empty
        self._tended_s = float("-inf")
        self._acts_bytes = -1  #: of the file of acts when all of it was taken
        self._given: dict[str, str] = {}  #: node -> digest of the list that it has from here

    def check(self, tls: Any, node: str) -> None:
        """Raises `AgentRefused` unless an unrevoked `node` ("": any node) is at the other end."""
        try:
            peer = peer_of(tls, self._trust, node=node)
        except IdentityError as error:
            raise AgentRefused("forbidden", str(error)) from None
        if peer.role != "node":
            raise AgentRefused("forbidden", f"{peer} answered, which is no node")

    def flaw(self) -> str:
        """Why agents may turn this home's own certificate away; they say no word about it. "": nothing."""
        try:
            own, now = own_identity(self._trust), time.time()
        except IdentityError as error:
            return str(error)
        if now > own.not_after_unix_s:
            return f"the certificate in {self._trust} has expired, a new one comes from `gridctl grant`"
        if now < own.not_before_unix_s:
            return f"the certificate in {self._trust} is not valid yet, or the clock is wrong here"
        return ""

    def acts(self) -> Iterator[dict[str, Any]]:
        """What was done with the fleet's trust, as audit records; each has a `key` of its own.

        None while the file is as it was when somebody took them all: this is asked at every turn.
        """
        try:
            size = (self._trust / ACTS_FILE).stat().st_size
        except FileNotFoundError:
            return
        if size == self._acts_bytes:
            return
        for number, act in read_acts(self._trust):
            yield {**msgspec.to_builtins(act), "key": ["trust", number, act.what, act.target, act.t_unix_s]}
        self._acts_bytes = size

    def reload(self) -> None:
        """New connections show the certificate that lies in the folder now."""
        self.context.load_cert_chain(self._trust / "operator.crt", self._trust / "operator.key")
        self.may_only_look = self._may_only_look()

    def _may_only_look(self) -> str:
        own = own_identity(self._trust)
        return "" if own.role == "operator" else f"the certificate in {self._trust} is that of {own}"

    async def turn(self, agents: Agents, nodes: Iterable[Node], *, read_only: bool) -> None:
        """To be called now and then."""
        if time.monotonic() - self._tended_s > TEND_S and (self._trust / "issuer.key").exists():
            self._tended_s = time.monotonic()
            self._tend()
        if not read_only:
            await self._pass_on(agents, nodes)

    def _tend(self) -> None:
        try:
            for line in Authority(self._trust).tend():
                log.info("%s", line)
                self.reload()
        except (TrustError, IdentityError, OSError) as error:
            log.warning("the operator's certificate: %s", error)

    async def _pass_on(self, agents: Agents, nodes: Iterable[Node]) -> None:
        """Every node that answers gets the newest revocation list once."""
        try:
            pem = (self._trust / "crl.pem").read_bytes()
        except OSError:
            return
        digest = hashlib.sha256(pem).hexdigest()
        due = []
        for node in nodes:
            if not node.reachable:
                self._given.pop(node.name, None)
            elif self._given.get(node.name) != digest:
                due.append(self._give(agents, node, pem, digest))
        await asyncio.gather(*due)

    async def _give(self, agents: Agents, node: Node, pem: bytes, digest: str) -> None:
        try:
            await agents.put_crl(node.url, pem)
        except AgentRefused as error:
            log.warning("%s did not take the revocation list: %s", node.name, error.text)
        except AgentUnreachable:
            return  # tried again with the next turn
        self._given[node.name] = digest
