"""Sealed channel between two training processes: AES-256-GCM frames under keys of one transfer.

The two ends agree on keys with X25519; the public keys travel through the agents, over mutual TLS,
so an end knows that the other sits on the node that the plan names. Keys are bound to the
transfer's id by HKDF and die with the channel. Frames follow the STREAM construction (Hoang,
Reyhanitabar, Rogaway, Vizar 2015): nonce = 7 bytes of prefix, 4 bytes of counter, 1 byte that is 1
on the last frame of a stream; the transfer's id is associated data. So a frame that is changed,
dropped, repeated, reordered, cut off or taken from another transfer is refused.
"""

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

Buffer = bytes | bytearray | memoryview

TAG_BYTES = 16
FRAME_BYTES_MAX = 8 << 20
_HEADER = struct.Struct(">I")
_NONCE = struct.Struct(">7sIB")


#: Pieces below this are copied together: a call each, with the interpreter's lock let go and fetched again,
#: costs more than the copy.
GATHER_BYTES = 64 << 10
_Piece = TypeVar("_Piece", bound=Buffer)


class SealedError(Exception):
    """The channel cannot be trusted or is gone; nothing received through it may be used."""


class PeerGoneError(SealedError):
    """The other end has closed the channel, or is gone: why, it knows itself."""


@dataclass
class KeyPair:
    """One end's ephemeral X25519 key for one channel."""

    private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes_raw()

    def derive(self, peer_public: bytes, handover: str, purpose: str) -> tuple[bytes, bytes]:
        """Keys (caller -> callee, callee -> caller), 39 bytes each: AES key (32) and nonce prefix (7)."""
        try:
            shared = self.private.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError as error:
            raise SealedError(f"the peer's public key is not usable: {error}") from None
        info = f"gridctl handover {handover} {purpose}".encode()
        keys = HKDF(algorithm=hashes.SHA256(), length=78, salt=None, info=info).derive(shared)
        return keys[:39], keys[39:]


class _Direction:
    """Key, nonce prefix and counter of one direction."""

    def __init__(self, key: bytes, associated: bytes) -> None:
        self._aes = AES(key[:32])
        self._prefix = key[32:39]
        self._associated = associated
        self._counter = 0

    def _nonce(self, last: bool) -> GCM:
        if self._counter >= 1 << 32:
            raise SealedError("too many frames under one key")
        nonce = _NONCE.pack(self._prefix, self._counter, last)
        self._counter += 1
        return GCM(nonce)

    def seal_into(self, pieces: Sequence[Buffer], out: memoryview, last: bool) -> None:
        """Seals the concatenation of `pieces` from where they lie; `out` holds them and the tag."""
        context = Cipher(self._aes, self._nonce(last)).encryptor()
        context.authenticate_additional_data(self._associated)
        offset = 0
        for run in _runs(pieces):
            offset += context.update_into(run[0] if len(run) == 1 else b"".join(run), out[offset:])
        context.finalize()
        out[offset : offset + TAG_BYTES] = context.tag

    def open_into(self, sealed: memoryview, outs: Sequence[memoryview], last: bool) -> None:
        """Opens a frame into `outs`, which it fills exactly. They hold nothing to be used if this raises."""
        context = Cipher(self._aes, self._nonce(last)).decryptor()
        context.authenticate_additional_data(self._associated)
        offset = 0
        for run in _runs(outs):
            size = sum(out.nbytes for out in run)
            plain = run[0] if len(run) == 1 else memoryview(bytearray(size))
            context.update_into(sealed[offset : offset + size], plain)
            offset += size
            for out in run if len(run) > 1 else []:
                out[:], plain = plain[: out.nbytes], plain[out.nbytes :]
        try:
            context.finalize_with_tag(bytes(sealed[offset:]))
        except InvalidTag:
            raise SealedError(
                "a frame was changed, repeated, reordered, or sealed for another transfer"
            ) from None


def _runs(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Neighbours that are small together, every other piece alone."""
    run: list[_Piece] = []
    for piece in pieces:
        if run and (memoryview(piece).nbytes >= GATHER_BYTES or memoryview(run[-1]).nbytes >= GATHER_BYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


class SealedSocket:
    """Frames over a connected TCP socket. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, send_key: bytes, receive_key: bytes, handover: str) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._out = _Direction(send_key, handover.encode())
        self._in = _Direction(receive_key, handover.encode())
        self._send_buffer = bytearray()
        self._receive_buffer = bytearray()
        self._header = bytearray(5)

    def send(self, plain: Buffer, *, last: bool = False) -> int:
        """Seals and sends one frame; returns the bytes on the wire. Raises `SealedError`."""
        return self.send_pieces([plain], last=last)

    def send_pieces(self, pieces: Sequence[Buffer], *, last: bool = False) -> int:
        """One frame out of several pieces of memory, none of which is copied before it is sealed."""
        size = sum(memoryview(piece).nbytes for piece in pieces) + TAG_BYTES
        if size > FRAME_BYTES_MAX:
            raise SealedError(f"a frame of {size} bytes exceeds {FRAME_BYTES_MAX}")
        if len(self._send_buffer) < size + 5:
            self._send_buffer = bytearray(size + 5)
        frame = memoryview(self._send_buffer)[: size + 5]
        _HEADER.pack_into(frame, 0, size)
        frame[4] = last
        self._out.seal_into(pieces, frame[5:], last)
        try:
            self._sock.sendall(frame)
        except OSError as error:
            raise SealedError(f"the peer is gone: {error}") from None
        return size + 5

    def receive_frame(self) -> tuple[bytearray, bool]:
        """Receives one frame; returns its plain text, and whether it was the last of a stream."""
        sealed, last = self._frame()
        plain = bytearray(sealed.nbytes - TAG_BYTES)
        self._in.open_into(sealed, [memoryview(plain)], last)
        return plain, last

    def receive_pieces(self, outs: Sequence[memoryview]) -> int:
        """Receives one frame into several pieces of memory if it fits them exactly.

        Returns its bytes of plain text; where those are not the bytes of `outs`, nothing was written.
        """
        sealed, last = self._frame()
        plain_bytes = sealed.nbytes - TAG_BYTES
        if plain_bytes == sum(out.nbytes for out in outs):
            self._in.open_into(sealed, outs, last)
        return plain_bytes

    def _frame(self) -> tuple[memoryview, bool]:
        """The next frame as it came, valid until the one after it, and whether it is the last."""
        self._fill(memoryview(self._header))
        size = _HEADER.unpack_from(self._header)[0]
        last = self._header[4]
        if not TAG_BYTES <= size <= FRAME_BYTES_MAX or last > 1:
            raise SealedError(f"a frame header is not ours (size {size})")
        if len(self._receive_buffer) < size:
            self._receive_buffer = bytearray(size)
        sealed = memoryview(self._receive_buffer)[:size]
        self._fill(sealed)
        return sealed, bool(last)

    def receive(self) -> bytearray:
        """Receives one frame that stands for itself."""
        return self.receive_frame()[0]

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                count = self._sock.recv_into(view)
            except OSError as error:
                raise PeerGoneError(f"the peer is gone: {error}") from None
            if not count:
                raise PeerGoneError("the peer closed the channel")
            view = view[count:]

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def close(self) -> None:
        """Ends both directions at once, so that a thread blocked in a receive wakes."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()


class Listener:
    """Accepts the channels of one hand-over. Binds port 0 on the node's own address.

    A caller says in clear which channel it comes for (a random id handed out at the meeting); a
    connection that names no expected channel is closed. Whoever guesses an id still lacks its keys.
    """

    def __init__(self, host: str, handover: str) -> None:
        self._handover = handover
        self._sock = socket.create_server((host, 0), backlog=64)
        self.host, self.port = self._sock.getsockname()[:2]
        self._expected: dict[bytes, tuple[bytes, bytes]] = {}

    def meet(self, peer_public: bytes, purpose: str) -> bytes:
        """Answers a meeting: makes this channel's keys, returns our public key."""
        pair = KeyPair()
        to_us, from_us = pair.derive(peer_public, self._handover, purpose)
        self._expected[peer_public] = (from_us, to_us)
        return pair.public

    def accept(self, timeout_s: float) -> tuple[bytes, SealedSocket]:
        """Waits for one met peer: (its public key, the channel). Raises `SealedError` at the deadline."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self._sock.settimeout(left_s)
            try:
                sock, _ = self._sock.accept()
                sock.settimeout(min(left_s, 5.0))
                greeting = sock.recv(32, socket.MSG_WAITALL)
            except TimeoutError:
                continue
            except OSError as error:
                raise SealedError(f"the listener is closed: {error}") from None
            keys = self._expected.pop(greeting, None)
            if keys is None:
                sock.close()
                continue
            sock.settimeout(None)
            return greeting, SealedSocket(sock, *keys, self._handover)
        raise SealedError("no peer came in time")

    def close(self) -> None:
        self._sock.close()


def connect(
    host: str, port: int, pair: KeyPair, peer_public: bytes, handover: str, purpose: str
) -> SealedSocket:
    """The caller's end of a channel, after a meeting."""
    to_peer, from_peer = pair.derive(peer_public, handover, purpose)
    try:
        sock = socket.create_connection((host, port), timeout=10.0)
        sock.sendall(pair.public)
        sock.settimeout(None)
    except OSError as error:
        raise SealedError(f"cannot reach the peer at {host}:{port}: {error}") from None
    return SealedSocket(sock, to_peer, from_peer, handover)
