"""The sealed channels of one process in one hand-over: the star to the chair, and source to target.

The chair listens, every other member calls it; a target listens, its source calls it. Keys come from
a meeting that the two nodes' agents carry over mutual TLS.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gridagent import wire
from gridagent.train.errors import HandoverError
from gridagent.train.group import node_address
from gridagent.train.link import Link
from gridagent.train.sealed import KeyPair, Listener, SealedError, SealedSocket, connect
from gridagent.train.transaction_events import CHAIR

MEET_TIMEOUT_S = 60.0


class Channels:
    """Channels by party. `heard(party, body)` is called for each message, `lost(party)` when one breaks."""

    def __init__(
        self,
        handover: str,
        members: Sequence[wire.Member],
        until_s: float,
        heard: Callable[[str, dict[str, Any]], None],
        lost: Callable[[str], None],
    ) -> None:
        self._handover = handover
        self._members = members
        self._until_s = until_s
        self._heard, self._lost = heard, lost
        self._open = True
        self._listener: Listener | None = None
        self._met: dict[bytes, str] = {}  #: public key -> purpose and party
        self._star: dict[str, SealedSocket] = {}  #: party (or "chair") -> channel
        self._state: SealedSocket | None = None
        self._changed = threading.Condition()

    def listen(self) -> Listener:
        """Starts to accept met peers, once."""
        if self._listener is None:
            self._listener = Listener(node_address(), self._handover)
            threading.Thread(target=self._accept, name="gridagent-accept", daemon=True).start()
        return self._listener

    def meet(self, request: wire.MeetRequest) -> wire.MeetReply:
        """Another member wants a channel to us. Raises `HandoverError` if it has no part in this."""
        party = f"{request.role}:{request.rank}"
        known = any((m.role, m.rank) == (request.role, request.rank) for m in self._members)
        if not known or request.purpose not in ("star", "state"):
            raise HandoverError(f"{party} has no part in hand-over {self._handover}")
        listener = self.listen()
        self._met[request.public_key] = f"{request.purpose} {party}"
        public = listener.meet(request.public_key, request.purpose)
        return wire.MeetReply(public_key=public, host=listener.host, port=listener.port)

    def call(self, link: Link, peer: wire.Member, purpose: str, me: wire.Member, name: str = CHAIR) -> None:
        """Meets `peer` through the agents and connects. Raises `LinkError`, `SealedError`.

        `name`: how `heard`, `lost` and `send` call this channel to the chair, where a process has several.
        """
        pair = KeyPair()
        request = wire.MeetRequest(
            handover=self._handover,
            role=me.role,
            rank=me.rank,
            purpose=purpose,
            to_session=peer.session,
            public_key=pair.public,
        )
        answer = link.ask("meet", {"url": peer.url, "node": peer.node, **wire.plain(request)}, MEET_TIMEOUT_S)
        reply = msgspec.convert(answer, wire.MeetReply)
        channel = connect(reply.host, reply.port, pair, reply.public_key, self._handover, purpose)
        self._add(purpose, name, channel)

    def wait_star(self, count: int, timeout_s: float) -> int:
        """Waits until `count` members have reached us; returns how many have."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._star) >= count, timeout=timeout_s)
            return len(self._star)

    def state(self, timeout_s: float) -> SealedSocket:
        """The channel between source and target, bounded by `timeout_s`. Raises `SealedError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state is not None, timeout=timeout_s):
                raise SealedError("the other end of the transfer never came")
            assert self._state is not None
            self._state.settimeout(timeout_s)
            return self._state

    def send(self, party: str, body: dict[str, Any]) -> None:
        """Sends to a party, if it is connected (a member's is the chair). Raises `SealedError`."""
        channel = self._star.get(party)
        if channel is not None:
            channel.send(msgspec.msgpack.encode(body))

    def close_state(self) -> None:
        """Breaks the transfer off, so that the other end notices at once."""
        if self._state is not None:
            self._state.close()

    def close(self) -> None:
        self._open = False
        if self._listener is not None:
            self._listener.close()
        for channel in self._star.values():
            channel.close()
        self.close_state()

    def _accept(self) -> None:
        assert self._listener is not None
        while self._open and time.monotonic() < self._until_s:
            with contextlib.suppress(SealedError):
                key, channel = self._listener.accept(1.0)
                purpose, _, party = self._met.pop(key).partition(" ")
                self._add(purpose, party, channel)

    def _add(self, purpose: str, party: str, channel: SealedSocket) -> None:
        with self._changed:
            if purpose == "state":
                self._state = channel
            else:
                self._star[party] = channel
                name = f"gridagent-star-{party}"
                threading.Thread(target=self._read, args=(party, channel), name=name, daemon=True).start()
            self._changed.notify_all()

    def _read(self, party: str, channel: SealedSocket) -> None:
        while True:
            try:
                self._heard(party, msgspec.msgpack.decode(channel.receive(), type=dict[str, Any]))
            except (SealedError, msgspec.MsgspecError):
                self._lost(party)
                return
