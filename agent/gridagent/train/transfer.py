"""A rank's state on its way from source to target, in few large sealed frames.

Source: manifest (name, category, dtype, shape, bytes of every entry), then all bytes as one virtual
stream cut into chunks, then the trailer (SHA-256 of every entry, digest of every category). One
thread gathers and hashes while another seals and sends. Target: opens, lands each piece in the very
tensor that it is for, hashes what landed, checks completeness, hashes, finiteness.

Both ends hold a few chunks beside the state itself, whatever its size.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from gridagent.train.sealed import SealedError, SealedSocket
from gridagent.train.state import Entry, RankState, category_digests, flat_bytes, memory_of
from gridagent.train.state import digests as state_digests

CHUNK_BYTES = 4 << 20
_BUFFERS = 3
#: Parts no larger than this are read back from the live objects and compared once more.
_SMALL_BYTES = 1 << 20


class TransferError(Exception):
    """The transfer failed verification or broke off. `found` has one line per defect."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("; ".join(found))
        self.found = found


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    category: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Trailer(msgspec.Struct, frozen=True):
    hashes: list[str]  #: SHA-256 of each entry, in manifest order
    digests: dict[str, str]  #: category -> digest, over the live state of the source


@dataclass
class TransferReport:
    """What one end did. Times in milliseconds, on this end's clock."""

    digests: dict[str, str]
    nbytes: int
    parts_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of one entry."""

    index: int
    start: int
    stop: int


def chunks(sizes: list[int], chunk_bytes: int = CHUNK_BYTES) -> Iterator[list[Piece]]:
    """Cuts the concatenation of entries with these sizes into chunks, each a list of pieces."""
    chunk: list[Piece] = []
    room = chunk_bytes
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            chunk.append(Piece(index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


# ------------------------------------------------------------------------------------------------ source


class _Reader:
    """Reads byte ranges of entries; makes at most one contiguous copy at a time."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._index = -1
        self._flat: Tensor | memoryview = memoryview(b"")

    def read(self, piece: Piece, out: memoryview) -> None:
        data = self._entries[piece.index].data
        if isinstance(data, bytes):
            out[:] = data[piece.start : piece.stop]
            return
        if piece.index != self._index:
            self._index, self._flat = piece.index, flat_bytes(data.contiguous())
        source = self._flat
        assert isinstance(source, Tensor)
        torch.frombuffer(out, dtype=torch.uint8).copy_(source[piece.start : piece.stop])


def send_state(
    channel: SealedSocket,
    entries: list[Entry],
    live_rng: Callable[[], list[Entry]],
    damage: Callable[[str, Any], Any] = lambda _where, value: value,
) -> TransferReport:
    """Streams `entries`. Returns the digests of the live state. Raises `SealedError`.

    `live_rng` reads the random states again at the end: the digest that the target must meet is that
    of the live generators, not of what was sent.

    `damage` spoils a transfer on purpose (demo, damage matrix): called with "manifest", "chunk" and
    "trailer" and the value that is about to be sent.
    """
    started_s = time.perf_counter()
    hashes: list[Any] = [hashlib.sha256() for _ in entries]
    manifest = [ManifestEntry(e.name, e.category, e.dtype, e.shape, e.nbytes) for e in entries]
    channel.send(msgspec.msgpack.encode(damage("manifest", manifest)))
    free: queue.SimpleQueue[bytearray] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[bytearray, int] | None] = queue.SimpleQueue()
    for _ in range(_BUFFERS):
        free.put(bytearray(CHUNK_BYTES))
    failures: list[BaseException] = []
    sent_s = 0.0

    def sealer() -> None:
        nonlocal sent_s
        while (item := full.get()) is not None:
            buffer, size = item
            if not failures:
                try:
                    begun_s = time.perf_counter()
                    channel.send(damage("chunk", memoryview(buffer)[:size]))
                    sent_s += time.perf_counter() - begun_s
                except BaseException as error:
                    failures.append(error)
            free.put(buffer)

    thread = threading.Thread(target=sealer, name="gridagent-seal", daemon=True)
    thread.start()
    reader = _Reader(entries)
    capture_s = 0.0
    for pieces in chunks([entry.nbytes for entry in entries]):
        buffer = free.get()
        begun_s = time.perf_counter()
        offset = 0
        for piece in pieces:
            view = memoryview(buffer)[offset : offset + piece.stop - piece.start]
            reader.read(piece, view)
            hashes[piece.index].update(view)
            offset += piece.stop - piece.start
        capture_s += time.perf_counter() - begun_s
        full.put((buffer, offset))
    full.put(None)
    thread.join()
    if failures:
        raise failures[0]
    digests = category_digests(zip(entries, [h.hexdigest() for h in hashes], strict=True))
    digests["rng"] = state_digests(live_rng())["rng"]
    trailer = Trailer([h.hexdigest() for h in hashes], digests)
    channel.send(msgspec.msgpack.encode(damage("trailer", trailer)), last=True)
    total_ms = (time.perf_counter() - started_s) * 1e3
    parts_ms = {"capture": capture_s * 1e3, "transport": sent_s * 1e3, "send_total": total_ms}
    return TransferReport(digests, sum(entry.nbytes for entry in entries), parts_ms)


# ------------------------------------------------------------------------------------------------ target


class _Landing:
    """Where one entry lands: the live tensor itself where it fits, else a fresh tensor or bytes."""

    def __init__(self, wanted: ManifestEntry, live: Entry | None) -> None:
        self.wanted = wanted
        self.hash = hashlib.sha256()
        self.final: Tensor | None = None
        if wanted.dtype == "packed":
            self.memory = memoryview(bytearray(wanted.nbytes))
            self.tensor: Tensor | None = None
            return
        dtype = getattr(torch, wanted.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TransferError([f"{wanted.name} has the unknown dtype {wanted.dtype}"])
        fits = (
            live is not None
            and isinstance(live.data, Tensor)
            and live.dtype == wanted.dtype
            and live.shape == wanted.shape
            and wanted.category in ("parameters", "optimizer", "buffers")
        )
        target = live.data if fits and live is not None else None
        assert not isinstance(target, bytes)
        in_place = target is not None and target.is_contiguous()
        self.tensor = (
            target
            if in_place
            else torch.empty(wanted.shape, dtype=dtype, device=target.device if target is not None else "cpu")
        )
        if target is not None and not in_place:
            self.final = target
        assert self.tensor is not None
        self.flat = flat_bytes(self.tensor)
        self.on_cpu = self.tensor.device.type == "cpu"
        self.memory = memory_of(self.tensor) if self.on_cpu else memoryview(b"")

    def land(self, piece: Piece, data: memoryview) -> None:
        """Writes one piece and hashes what landed, read back from where it lies."""
        if self.tensor is None:
            self.memory[piece.start : piece.stop] = data
            self.hash.update(self.memory[piece.start : piece.stop])
            return
        destination = self.flat[piece.start : piece.stop]
        destination.copy_(torch.frombuffer(data, dtype=torch.uint8))
        landed = self.memory[piece.start : piece.stop] if self.on_cpu else memory_of(destination.cpu())
        self.hash.update(landed)

    def not_finite(self) -> bool:
        """Holds the entry a NaN or infinity? A finite sum proves that it does not."""
        tensor = self.tensor
        if tensor is None or not tensor.is_floating_point():
            return False
        if tensor.numel() > 4096 and bool(torch.isfinite(tensor.sum())):
            return False
        return not bool(torch.isfinite(tensor).all())

    def entry(self) -> Entry:
        if self.tensor is None:
            return Entry(self.wanted.name, self.wanted.category, bytes(self.memory))
        if self.final is not None:
            self.final.copy_(self.tensor)
            return Entry(self.wanted.name, self.wanted.category, self.final)
        return Entry(self.wanted.name, self.wanted.category, self.tensor)


def receive_state(
    channel: SealedSocket, state: RankState, before_rng: Callable[[], None] = lambda: None
) -> TransferReport:
    """Receives into `state`, verifies everything, applies it; RNG states are set last.

    `before_rng` runs when all but the random states is in place (a loader is re-opened there, because
    that may draw random numbers). Raises `TransferError` with every defect found, `SealedError`.
    """
    buffer = memoryview(bytearray(CHUNK_BYTES * 2))
    size, _ = channel.receive_into(buffer)
    started_s = time.perf_counter()
    live = {entry.name: entry for entry in state.inventory(loaders=False)}
    manifest = _decode(bytes(buffer[:size]), list[ManifestEntry], "manifest")
    _check_manifest(manifest, live, set(state.loaders))
    landings = [_Landing(wanted, live.get(wanted.name)) for wanted in manifest]
    verify_s = _land_all(channel, landings)
    size, last = channel.receive_into(buffer)
    landed_s = time.perf_counter()
    trailer = _decode(bytes(buffer[:size]), Trailer, "trailer")
    if not last:
        raise TransferError(["the stream does not end where its manifest says"])
    found = _compare(landings, trailer)
    if found:
        raise TransferError(found)
    received = {landing.wanted.name: landing.entry() for landing in landings}
    state.apply(received)
    before_rng()
    state.apply_rng(received)
    found = _read_back(state, received)
    digests = category_digests(
        (received[landing.wanted.name], landing.hash.hexdigest()) for landing in landings
    )
    found += [
        f"{name}: digest {value[:12]} of what landed, {trailer.digests.get(name, 'none')[:12]} at the source"
        for name, value in digests.items()
        if value != trailer.digests.get(name)
    ]
    if found:
        raise TransferError(found)
    verify_s += time.perf_counter() - landed_s
    parts_ms = {"verify": verify_s * 1e3, "receive_total": (time.perf_counter() - started_s) * 1e3}
    return TransferReport(digests, sum(wanted.nbytes for wanted in manifest), parts_ms)


def _decode(data: bytes, kind: Any, what: str) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise TransferError([f"the {what} is damaged: {error}"]) from None


def _check_manifest(manifest: list[ManifestEntry], live: dict[str, Entry], loaders: set[str]) -> None:
    """Completeness: whatever the target's own objects hold must be on its way, in the same shape."""
    found = []
    coming = {wanted.name: wanted for wanted in manifest}
    if len(coming) != len(manifest):
        found.append("the manifest names a part twice")
    for name, entry in live.items():
        wanted = coming.get(name)
        if wanted is None:
            found.append(f"{name} ({entry.category}) is part of the rank but not in the manifest")
        elif (
            entry.category in ("parameters", "buffers")
            and entry.dtype != "packed"
            and ((entry.dtype, entry.shape) != (wanted.dtype, wanted.shape))
        ):
            found.append(
                f"{name} is {wanted.dtype}{list(wanted.shape)} in the manifest,"
                f" {entry.dtype}{list(entry.shape)} here"
            )
    for name, wanted in coming.items():
        known = (
            name in live
            or wanted.category == "optimizer"
            or wanted.category == "other"
            or name.startswith("rng/numpy")
        )
        if not known:
            found.append(f"{name} ({wanted.category}) is in the manifest but no part of the rank here")
    found += [
        f"{name} (other) is part of the rank but not in the manifest"
        for name in loaders
        if name not in coming
    ]
    if found:
        raise TransferError(found)


def _land_all(channel: SealedSocket, landings: list[_Landing]) -> float:
    """Receives every chunk; a second thread opens the next one meanwhile. Returns seconds spent landing."""
    free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[memoryview, int] | BaseException] = queue.SimpleQueue()
    for _ in range(_BUFFERS):
        free.put(memoryview(bytearray(CHUNK_BYTES)))
    plan = list(chunks([landing.wanted.nbytes for landing in landings]))

    def opener() -> None:
        try:
            for _ in plan:
                buffer = free.get()
                full.put((buffer, channel.receive_into(buffer)[0]))
        except BaseException as error:
            full.put(error)

    threading.Thread(target=opener, name="gridagent-open", daemon=True).start()
    spent_s = 0.0
    for pieces in plan:
        item = full.get()
        if isinstance(item, BaseException):
            raise item
        buffer, size = item
        begun_s = time.perf_counter()
        if size != sum(piece.stop - piece.start for piece in pieces):
            raise TransferError([f"a chunk has {size} bytes, not what the manifest says"])
        offset = 0
        for piece in pieces:
            landings[piece.index].land(piece, buffer[offset : offset + piece.stop - piece.start])
            offset += piece.stop - piece.start
        spent_s += time.perf_counter() - begun_s
        free.put(buffer)
    return spent_s


def _compare(landings: list[_Landing], trailer: Trailer) -> list[str]:
    if len(trailer.hashes) != len(landings):
        return [f"the trailer has {len(trailer.hashes)} hashes for {len(landings)} parts"]
    found = []
    for landing, digest in zip(landings, trailer.hashes, strict=True):
        if landing.hash.hexdigest() != digest:
            found.append(
                f"{landing.wanted.name} ({landing.wanted.category}) differs from the source's by hash"
            )
        elif landing.wanted.category in ("parameters", "optimizer", "buffers") and landing.not_finite():
            found.append(f"{landing.wanted.name} ({landing.wanted.category}) holds NaN or infinity")
    return found


def _read_back(state: RankState, received: dict[str, Entry]) -> list[str]:
    """Reads small parts once more from the live objects: did setting them really set them?"""
    found = []
    for entry in state.inventory(loaders=False):
        other = received.get(entry.name)
        if other is None:
            found.append(f"{entry.name} ({entry.category}) did not arrive")
        elif (
            entry.nbytes <= _SMALL_BYTES
            and entry.category in ("rng", "other", "optimizer")
            and not _same(entry, other)
        ):
            found.append(f"{entry.name} ({entry.category}) reads back differently after it was set")
    return found


def _same(one: Entry, other: Entry) -> bool:
    if isinstance(one.data, bytes) or isinstance(other.data, bytes):
        return one.data == other.data if type(one.data) is type(other.data) else False
    return (
        one.data is other.data
        or one.data.data_ptr() == other.data.data_ptr()
        or torch.equal(one.data, other.data.to(one.data.device))
    )


__all__ = ["SealedError", "TransferError", "TransferReport", "receive_state", "send_state"]
