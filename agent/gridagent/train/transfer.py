"""A rank's state on its way from source to target, in large sealed frames.

Source: manifest (name, category, dtype, shape, bytes of every entry), then all bytes as one virtual
stream cut into chunks, then the trailer (SHA-256 of every entry, digest of every category). Chunks are
sealed from where the tensors lie. Target: opens each chunk right into the tensors that it is for,
hashes what landed, checks completeness, hashes, finiteness. At both ends hashing, which costs the
most, runs beside in threads of its own.

Both ends hold one sealed chunk beside the state itself, whatever its size (tensors that are not
contiguous CPU memory pass through host copies of a chunk).
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

from gridagent.train.packing import memory_of
from gridagent.train.sealed import GATHER_BYTES, SealedError, SealedSocket
from gridagent.train.state import Entry, RankState, category_digests, flat_bytes
from gridagent.train.state import digests as state_digests

CHUNK_BYTES = 4 << 20
_HASH_THREADS = 2
#: Chunks that may wait to be hashed: bounds the host copies of what is not CPU memory.
_WAITING = 4
#: Parts no larger than this are read back from the live objects and compared once more.
_SMALL_BYTES = 1 << 20


class TransferError(Exception):
    """The transfer failed verification or broke off. `found` has one line per defect."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("; ".join(found))
        self.found = found


class ManifestEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry as it is announced; `state.Entry` without the data."""

    name: str
    category: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class Trailer(msgspec.Struct, frozen=True):
    """What ends a stream: what its bytes must hash to."""

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


class _Hashes:
    """SHA-256 of every entry, computed beside the thread that moves the bytes.

    All pieces of an entry go to one thread, in order; `done(index)` runs there after the last. Use as a
    context; leaving it ends the threads.
    """

    def __init__(self, sizes: list[int], done: Callable[[int], None] = lambda _index: None) -> None:
        self._sizes = sizes
        self._done = done
        self._hashes: list[Any] = [hashlib.sha256() for _ in sizes]
        self._lanes = [queue.Queue[list[tuple[Piece, memoryview]]](_WAITING) for _ in range(_HASH_THREADS)]
        self._given = [0] * _HASH_THREADS
        self._lane_of: dict[int, int] = {}
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name="gridagent-hash", daemon=True)
            for lane in self._lanes
        ]

    def __enter__(self) -> "_Hashes":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def feed(self, chunk: list[tuple[Piece, memoryview]]) -> None:
        """Hashes these pieces, whose memory must not change until `results`."""
        lots: list[list[tuple[Piece, memoryview]]] = [[] for _ in self._lanes]
        for piece, view in chunk:
            lane = self._lane_of.get(piece.index, -1)
            if lane < 0:
                lane = self._lane_of[piece.index] = self._given.index(min(self._given))
                self._given[lane] += self._sizes[piece.index]
            lots[lane].append((piece, view))
        for lane, lot in enumerate(lots):
            if lot:
                self._lanes[lane].put(lot)

    def results(self) -> list[str]:
        """The hexadecimal hashes of all entries, once all that was fed is in."""
        self._end()
        if self._failures:
            raise self._failures[0]
        return [digest.hexdigest() for digest in self._hashes]

    def _end(self) -> None:
        threads, self._threads = self._threads, []
        for lane in self._lanes[: len(threads)]:
            lane.put([])
        for thread in threads:
            thread.join()

    def _work(self, lane: "queue.Queue[list[tuple[Piece, memoryview]]]") -> None:
        while lot := lane.get():
            if self._failures:
                continue
            try:
                for piece, view in lot:
                    self._hashes[piece.index].update(view)
                    if piece.stop == self._sizes[piece.index]:
                        self._done(piece.index)
            except BaseException as error:
                self._failures.append(error)


# ------------------------------------------------------------------------------------------------ source


class _Reader:
    """Where the bytes of entries lie; at most one contiguous copy at a time."""

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries
        self._index = -1
        self._memory = memoryview(b"")
        self._device: Tensor | None = None  #: the entry's bytes, where they lie on a device

    def view(self, piece: Piece) -> memoryview:
        if piece.index != self._index:
            self._index, self._device = piece.index, None
            data = self._entries[piece.index].data
            if isinstance(data, bytes):
                self._memory = memoryview(data)
            elif data.device.type == "cpu":
                self._memory = memory_of(data.contiguous())
            else:
                self._device = flat_bytes(data.contiguous())
        if self._device is not None:
            return memory_of(self._device[piece.start : piece.stop].cpu())
        return self._memory[piece.start : piece.stop]


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
    entries = sorted(entries, key=lambda entry: entry.nbytes >= GATHER_BYTES)  # small ones side by side
    manifest = [ManifestEntry(e.name, e.category, e.dtype, e.shape, e.nbytes) for e in entries]
    channel.send(msgspec.msgpack.encode(damage("manifest", manifest)))
    sizes = [entry.nbytes for entry in manifest]
    reader = _Reader(entries)
    transport_s = 0.0
    with _Hashes(sizes) as running:
        for pieces in chunks(sizes):
            views = [reader.view(piece) for piece in pieces]
            running.feed(list(zip(pieces, views, strict=True)))
            begun_s = time.perf_counter()
            channel.send_pieces(damage("chunk", views))
            transport_s += time.perf_counter() - begun_s
        hashes = running.results()
    digests = category_digests(zip(entries, hashes, strict=True))
    digests["rng"] = state_digests(live_rng())["rng"]
    channel.send(msgspec.msgpack.encode(damage("trailer", Trailer(hashes, digests))), last=True)
    total_s = time.perf_counter() - started_s
    parts_s = {"capture": total_s - transport_s, "transport": transport_s, "send_total": total_s}
    return TransferReport(digests, sum(sizes), {part: took_s * 1e3 for part, took_s in parts_s.items()})


# ------------------------------------------------------------------------------------------------ target


class _Landing:
    """Where one entry lands: the live tensor itself where it fits, else a fresh tensor or bytes."""

    def __init__(self, wanted: ManifestEntry, live: Entry | None) -> None:
        self.wanted = wanted
        self.final: Tensor | None = None
        self.finite = True
        if wanted.dtype == "packed":
            self.memory: memoryview | None = memoryview(bytearray(wanted.nbytes))
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
        on_cpu = self.tensor.device.type == "cpu"
        self.memory = memory_of(self.tensor) if on_cpu else None

    def view(self, piece: Piece) -> memoryview:
        """Where the piece is to be put: its place in the entry, or host memory on the way to a device."""
        if self.memory is not None:
            return self.memory[piece.start : piece.stop]
        return memoryview(bytearray(piece.stop - piece.start))

    def landed(self, piece: Piece, view: memoryview) -> memoryview:
        """The piece is in its view. Returns what is to be hashed, read back from where it lies."""
        if self.memory is not None:
            return view
        assert self.tensor is not None
        place = flat_bytes(self.tensor)[piece.start : piece.stop]
        place.copy_(torch.frombuffer(view, dtype=torch.uint8))
        return memory_of(place.cpu())

    def check_finite(self) -> None:
        """Notes whether the entry holds a NaN or infinity. A finite sum proves that it does not.

        A buffer may hold infinities: an attention mask does.
        """
        tensor = self.tensor
        if tensor is None or _sum_is_finite(tensor):
            return
        bad = torch.isnan(tensor) if self.wanted.category == "buffers" else ~torch.isfinite(tensor)
        self.finite = not bool(bad.any())

    def entry(self) -> Entry:
        if self.tensor is None:
            assert self.memory is not None
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
    live = {entry.name: entry for entry in state.inventory(loaders=False)}  # while the source comes
    sent, _ = channel.receive_frame()
    started_s = time.perf_counter()
    manifest = _decode(sent, list[ManifestEntry], "manifest")
    _check_manifest(manifest, live, set(state.loaders))
    landings = [_Landing(wanted, live.get(wanted.name)) for wanted in manifest]
    hashes = _land_all(channel, landings)
    sent, last = channel.receive_frame()
    landed_s = time.perf_counter()
    trailer = _decode(sent, Trailer, "trailer")
    if not last:
        raise TransferError(["the stream does not end where its manifest says"])
    found = _compare(landings, hashes, trailer)
    if found:
        raise TransferError(found)
    received = {landing.wanted.name: landing.entry() for landing in landings}
    state.apply(received)
    before_rng()
    state.apply_rng(received)
    found = _read_back(state, received)
    digests = category_digests(zip(received.values(), hashes, strict=True))
    found += [
        f"{name}: digest {value[:12]} of what landed, {trailer.digests.get(name, 'none')[:12]} at the source"
        for name, value in digests.items()
        if value != trailer.digests.get(name)
    ]
    if found:
        raise TransferError(found)
    ended_s = time.perf_counter()
    parts_ms = {"verify": (ended_s - landed_s) * 1e3, "receive_total": (ended_s - started_s) * 1e3}
    return TransferReport(digests, sum(wanted.nbytes for wanted in manifest), parts_ms)


def _decode(data: bytearray, kind: Any, what: str) -> Any:
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


def _land_all(channel: SealedSocket, landings: list[_Landing]) -> list[str]:
    """Receives every chunk to where it belongs. Returns the hash of every entry, of what landed."""
    sizes = [landing.wanted.nbytes for landing in landings]

    def hashed(index: int) -> None:
        if sizes[index] >= GATHER_BYTES:
            landings[index].check_finite()

    with _Hashes(sizes, hashed) as running:
        for pieces in chunks(sizes):
            views = [landings[piece.index].view(piece) for piece in pieces]
            size = channel.receive_pieces(views)
            if size != (wanted_bytes := sum(piece.stop - piece.start for piece in pieces)):
                first = landings[pieces[0].index].wanted
                where = f"{first.name} ({first.category}) from byte {pieces[0].start}"
                raise TransferError(
                    [f"the stream is cut off: {size} of {wanted_bytes} bytes of {where} came"]
                )
            running.feed(
                [(p, landings[p.index].landed(p, view)) for p, view in zip(pieces, views, strict=True)]
            )
        hashes = running.results()
    _check_small(landings)
    return hashes


def _sum_is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum()))


def _check_small(landings: list[_Landing]) -> None:
    """Notes which of the small entries are not finite, in one look where all are."""
    alike: dict[tuple[torch.dtype, torch.device], list[_Landing]] = {}
    for landing in landings:
        if landing.tensor is not None and landing.wanted.nbytes < GATHER_BYTES:
            alike.setdefault((landing.tensor.dtype, landing.tensor.device), []).append(landing)
    for group in alike.values():
        tensors = [landing.tensor.reshape(-1) for landing in group if landing.tensor is not None]
        if not _sum_is_finite(torch.cat(tensors)):
            for landing in group:
                landing.check_finite()


def _compare(landings: list[_Landing], hashes: list[str], trailer: Trailer) -> list[str]:
    if len(trailer.hashes) != len(landings):
        return [f"the trailer has {len(trailer.hashes)} hashes for {len(landings)} parts"]
    found = []
    for landing, ours, theirs in zip(landings, hashes, trailer.hashes, strict=True):
        name = f"{landing.wanted.name} ({landing.wanted.category})"
        if ours != theirs:
            found.append(f"{name} differs from the source's by hash")
        elif landing.wanted.category in ("parameters", "optimizer", "buffers") and not landing.finite:
            found.append(f"{name} holds NaN or infinity")
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
