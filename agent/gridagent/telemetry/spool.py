"""Everything that a node tells goes through here first: append-only segments, then the stream.

A segment is named after the seq of its first record. Records are written and flushed in batches,
soon after they were made (`SYNC_S`), and only flushed records are streamed: what a reader has seen
is on the disk, and its seq is never given again. When the spool is full its oldest segment goes,
and a `gap` record says which records went; the same for records that the disk would not take.
"""

import asyncio
import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from gridagent.wire import StreamRecord

SYNC_S = 0.2
RETRY_S = 1.0
SEGMENT_BYTES = 8 << 20
#: Records that are kept in memory while the disk refuses them.
PENDING_MAX = 20_000
READ_BYTES = 256 << 10


class _Seq(msgspec.Struct):
    seq: int


_encode = msgspec.json.Encoder().encode
_decode_seq = msgspec.json.Decoder(_Seq).decode


class Spool:
    """The one writer of a spool folder, used from one event loop; `run` is a task of it."""

    def __init__(
        self,
        folder: Path,
        node: str,
        boot: str,
        *,
        bytes_max: int,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._node, self._boot, self._clock = folder, node, boot, clock
        self._segment_bytes = min(segment_bytes, max(bytes_max // 4, 1))
        self._bytes_max = bytes_max
        self._pending: deque[tuple[int, bytes]] = deque()
        self._wake = asyncio.Event()
        self._changed = asyncio.Condition()
        self._version = 0
        self._writing = threading.Lock()
        self._fd = -1
        self._segments: dict[int, int] = {}  #: first seq -> flushed bytes, oldest first
        self.seq = self._resume()  #: of the newest record

    def append(self, kind: str, v: dict[str, Any], t_unix_s: float | None = None) -> int:
        """Takes a record over and returns its seq. Never waits, never fails."""
        self.seq += 1
        if t_unix_s is None or not math.isfinite(t_unix_s):
            t_unix_s = self._clock()
        record = StreamRecord(
            seq=self.seq, boot=self._boot, t_unix_s=t_unix_s, node=self._node, kind=kind, v=v
        )
        self._pending.append((self.seq, _encode(record) + b"\n"))
        self._wake.set()
        return self.seq

    async def run(self) -> None:
        """Writes batches until it is cancelled; `close` writes what is pending then."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(SYNC_S)
            self._wake.clear()
            batch, self._pending = self._pending, deque()
            try:
                await asyncio.shield(asyncio.to_thread(self._write, batch))
            except OSError:
                self._take_back(batch)
                await asyncio.sleep(RETRY_S)
            self._trim()
            async with self._changed:
                self._version += 1
                self._changed.notify_all()

    def close(self) -> None:
        """Writes what is pending, after `run` has ended."""
        with contextlib.suppress(OSError):  # the disk is full: nobody is left to be told
            self._write(self._pending)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Whole lines with a seq above `after`, many at a time; then new ones as they come, for ever."""
        first, offset = self._locate(after)
        while True:
            version = self._version
            if offset < self._segments.get(first, 0):
                chunk = self._read(first, offset, self._segments[first])
                offset += len(chunk)
                yield chunk
            elif newer := [other for other in self._segments if other > first]:
                first, offset = newer[0], 0
            else:
                async with self._changed:
                    while self._version == version:
                        await self._changed.wait()

    def _locate(self, after: int) -> tuple[int, int]:
        """(segment, offset) of the first record with a seq above `after`."""
        first = max((first for first in self._segments if first <= after + 1), default=0)
        offset = 0
        if first:
            with self._path(first).open("rb") as lines:
                for line in lines:
                    if offset >= self._segments[first] or _seq_of(line) > after:
                        break
                    offset += len(line)
        return first, offset

    def _read(self, first: int, offset: int, end: int) -> bytes:
        with self._path(first).open("rb") as file:
            file.seek(offset)
            chunk = file.read(min(READ_BYTES, end - offset))
            return chunk if chunk.endswith(b"\n") else chunk + file.readline()

    def _write(self, batch: deque[tuple[int, bytes]]) -> None:
        """Puts a whole batch into one segment and flushes it, or changes nothing. Runs in a thread."""
        if not batch:
            return
        with self._writing:
            newest = next(reversed(self._segments), 0)
            if not newest or self._segments[newest] >= self._segment_bytes:
                newest = self._open(batch[0][0])
            size = self._segments[newest]
            try:
                view = memoryview(b"".join(line for _, line in batch))
                while view:
                    view = view[os.write(self._fd, view) :]
                os.fsync(self._fd)
            except OSError:
                os.ftruncate(self._fd, size)
                raise
            self._segments[newest] = os.fstat(self._fd).st_size

    def _open(self, first: int) -> int:
        fd = os.open(self._path(first), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._segments.setdefault(first, 0)
        return first

    def _trim(self) -> None:
        while len(self._segments) > 1 and sum(self._segments.values()) > self._bytes_max:
            first, following = list(self._segments)[:2]
            with contextlib.suppress(FileNotFoundError):
                self._path(first).unlink()
            del self._segments[first]
            self._append_gap(first, following - 1)

    def _take_back(self, batch: deque[tuple[int, bytes]]) -> None:
        batch.extend(self._pending)
        self._pending = batch
        self._wake.set()
        if len(batch) > PENDING_MAX:
            dropped = [batch.popleft()[0] for _ in range(len(batch) - PENDING_MAX)]
            self._append_gap(dropped[0], dropped[-1])

    def _append_gap(self, first: int, last: int) -> None:
        self.append("gap", {"first": first, "last": last, "records": last - first + 1})

    def _resume(self) -> int:
        """Finds what an earlier run left and returns its newest seq. Cuts a torn last line off."""
        paths = sorted(path for path in self._folder.glob("*.jsonl") if path.stem.isdecimal())
        for path in paths:
            self._segments[int(path.stem)] = path.stat().st_size
        if not paths:
            return 0
        first = self._open(int(paths[-1].stem))
        content = paths[-1].read_bytes()
        while content and (not content.endswith(b"\n") or _seq_of(_last_line(content)) < 0):
            content = content[: content.rstrip(b"\n").rfind(b"\n") + 1]
        os.ftruncate(self._fd, len(content))
        self._segments[first] = len(content)
        return _seq_of(_last_line(content)) if content else first - 1

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:020d}.jsonl"


def _last_line(content: bytes) -> bytes:
    return content[content.rfind(b"\n", 0, len(content) - 1) + 1 :]


def _seq_of(line: bytes) -> int:
    try:
        return _decode_seq(line).seq
    except msgspec.MsgspecError:
        return -1
