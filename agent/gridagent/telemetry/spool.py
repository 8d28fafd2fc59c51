"""Everything that a node tells goes through here first: append-only segments, then the stream.

A segment is named after the seq of its first record. A record is handed to the kernel at once, so a
killed agent loses none; it is flushed to the disk within `SYNC_S`, and only flushed records are
streamed: what a reader has seen is on the disk, and its seq is never given again. When the spool is
full its oldest segment goes, and a `gap` record says which records went; the same for records that
the disk would not take.
"""

import asyncio
import contextlib
import itertools
import math
import os
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
        self._dropped: tuple[int, int] | None = None  #: first and last seq that the disk did not take
        self._fd, self._newest, self._size = -1, 0, 0  #: the newest segment and what the kernel has of it
        self._segments: dict[int, int] = {}  #: first seq -> flushed bytes, oldest first
        self.seq = self._resume()  #: of the newest record
        self._handed_seq = self.seq  #: so far the kernel has them
        self._handed = asyncio.Event()  #: set, and replaced, when it has more

    def append(self, kind: str, v: dict[str, Any], t_unix_s: float | None = None) -> int:
        """Takes a record over and returns its seq. Never waits, never fails."""
        self.seq += 1
        if t_unix_s is None or not math.isfinite(t_unix_s):
            t_unix_s = self._clock()
        record = StreamRecord(
            seq=self.seq, boot=self._boot, t_unix_s=t_unix_s, node=self._node, kind=kind, v=v
        )
        self._pending.append((self.seq, _encode(record) + b"\n"))
        self._shed()
        self._wake.set()
        return self.seq

    async def stored(self) -> None:
        """Returns once no end of this process can lose a record that was taken over so far."""
        wanted = self.seq
        while self._handed_seq < wanted:
            await self._handed.wait()

    async def run(self) -> None:
        """Writes what is appended until it is cancelled; `close` does the rest."""
        while True:
            await self._wake.wait()
            try:
                await self._store()
            except OSError:
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    def close(self) -> None:
        """Writes and flushes what is left, after `run` has ended."""
        if self._pending or self._fd >= 0:
            with contextlib.suppress(OSError):  # the disk is full: nobody is left to be told
                self._write()
                os.fsync(self._fd)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    async def follow(self, after: int) -> AsyncIterator[bytes]:
        """Whole lines with a seq above `after`, many at a time; then new ones as they come, for ever.

        A reader that is ahead has read another spool, which is gone: it is told everything.
        """
        first, offset = self._locate(after if after <= self.seq else 0)
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

    async def _store(self) -> None:
        """Writes for `SYNC_S` whatever comes, then flushes and publishes it."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + SYNC_S
        while True:
            self._wake.clear()
            self._write()
            if self._dropped:
                self._append_gap(*self._dropped)
                self._dropped = None
            try:
                async with asyncio.timeout_at(end_s):
                    await self._wake.wait()
            except TimeoutError:
                break
        flushing = asyncio.ensure_future(asyncio.to_thread(os.fsync, self._fd))
        try:
            await asyncio.shield(flushing)
        finally:
            await asyncio.wait([flushing])  # also when cancelled: `close` must not take the file away
        self._segments[self._newest] = self._size
        self._trim()
        async with self._changed:
            self._version += 1
            self._changed.notify_all()

    def _write(self) -> None:
        """Hands what is pending to the kernel, in whole records. Raises `OSError`; the rest stays pending."""
        while self._pending:
            if self._fd < 0 or self._size >= self._segment_bytes:
                self._open(self._pending[0][0])
            size, count = self._size, 0
            for _, line in self._pending:
                size, count = size + len(line), count + 1
                if size >= self._segment_bytes:
                    break
            view = memoryview(b"".join(line for _, line in itertools.islice(self._pending, count)))
            try:
                while view:
                    view = view[os.write(self._fd, view) :]
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._size = size
            for _ in range(count):
                self._handed_seq, _ = self._pending.popleft()
            self._handed.set()
            self._handed = asyncio.Event()

    def _open(self, first: int) -> None:
        """Goes on in the segment `first`, once the one before is flushed."""
        fd = os.open(self._path(first), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._segments[self._newest] = self._size
        self._fd, self._newest, self._size = fd, first, 0
        self._segments[first] = 0

    def _trim(self) -> None:
        while len(self._segments) > 1 and sum(self._segments.values()) > self._bytes_max:
            first, following = list(self._segments)[:2]
            with contextlib.suppress(FileNotFoundError):
                self._path(first).unlink()
            del self._segments[first]
            self._append_gap(first, following - 1)

    def _shed(self) -> None:
        """Forgets the oldest of what the disk does not take, or not in time."""
        while len(self._pending) > PENDING_MAX:
            last, _ = self._pending.popleft()
            self._dropped = (self._dropped[0] if self._dropped else last, last)

    def _append_gap(self, first: int, last: int) -> None:
        self.append("gap", {"first": first, "last": last, "records": last - first + 1})

    def _resume(self) -> int:
        """Finds what an earlier run left and returns its newest seq. Cuts a torn last line off."""
        paths = sorted(path for path in self._folder.glob("*.jsonl") if path.stem.isdecimal())
        for path in paths:
            self._segments[int(path.stem)] = path.stat().st_size
        if not paths:
            return 0
        first = int(paths[-1].stem)
        self._open(first)
        content = paths[-1].read_bytes()
        seq, size = first - 1, len(content)
        while size:
            begin = content.rfind(b"\n", 0, size - 1) + 1
            line = content[begin:size]
            if line.endswith(b"\n") and (last := _seq_of(line)) >= 0:
                seq = last
                break
            size = begin
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        self._size = self._segments[first] = size
        return seq

    def _path(self, first: int) -> Path:
        return self._folder / f"{first:020d}.jsonl"


def _seq_of(line: bytes) -> int:
    try:
        return _decode_seq(line).seq
    except msgspec.MsgspecError:
        return -1
