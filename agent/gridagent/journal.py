"""The append-only, hash-chained log: an agent's operations and a controller's history.

A journal is a folder of segments `NNNNNNNN.jsonl`. One line is one record:

    {"seq", "t_unix_s", "kind", "actor", "data", "prev", "hash"}

`seq` starts at 1 and rises by one; `prev` is the hash of the record before (64 zeros for the
first); `hash` is the SHA-256 of the line's own bytes without the hash member. Keys are written in
one fixed order, so a hash depends on nothing but the content, and a check needs no re-encoding.

A record that `append` has returned is on the disk. There is one writer (a lock file); any number of
readers look at the files without a lock. What the chain cannot show is the loss of the newest
records as a whole: compare `Verification.head` with a copy kept elsewhere for that.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

GENESIS = "0" * 64
SEGMENT_BYTES = 16 << 20

LEAP_S = 30 * 86400.0  #: `verify` tells of a pause so long: a controller at work writes more often
_SEGMENT_NAME = re.compile(r"\d{8}\.jsonl")
_HASH_MEMBER = re.compile(rb',"hash":"([0-9a-f]{64})"}\n')
_HASH_MEMBER_BYTES = 76
_FULL = (errno.ENOSPC, errno.EDQUOT)


class JournalError(Exception):
    """Base of everything that this module raises."""


class JournalLocked(JournalError):
    """Another process writes this journal."""


class JournalFull(JournalError):
    """No space left for the record. Nothing of it was kept; append again once there is space."""


class JournalDamaged(JournalError):
    """A line that ought to be a record is none. `verify` says where the chain breaks."""


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    t_unix_s: float
    kind: str
    actor: str
    data: dict[str, Any]
    prev: str


class Record(_Body, frozen=True, kw_only=True):
    """One record. `kind`: finding, incident, decision, plan, gate, run, step, audit, lease, note."""

    hash: str


class Repair(msgspec.Struct, frozen=True, kw_only=True):
    """What opening found at the end of the last segment, and what became of it."""

    segment: str
    bytes: int
    kept: bool  #: True: a whole record that lacked its line end. False: a torn write, cut off
    text: str  #: the bytes themselves (the first 4096), undecodable ones replaced


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify` found."""

    ok: bool
    records: int  #: sound records, from the first one on
    first_bad: int | None  #: the seq that ought to stand where the chain breaks
    what: str  #: what is wrong there, "" if nothing
    head: str  #: hash of the last sound record
    torn_bytes: int = 0  #: bytes of an unfinished last line: not damage, the next open repairs it
    clock_back: int = 0  #: records older than the one before them: a note, not damage
    clock_back_first: int | None = None  #: seq of the first of these
    clock_leaps: int = 0  #: records more than `LEAP_S` after the one before: nobody wrote, or a clock was set
    clock_leaps_first: int | None = None  #: seq of the first of these
    segment: str = ""  #: the segment in which the chain breaks
    offset: int = 0  #: of the first bad line in it, in bytes
    foreign: tuple[str, ...] = ()  #: what lies in the folder and is no part of a journal


_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(Record).decode


class Journal:
    """The one writer of a journal folder (made if missing, readable by its owner only).

    Raises `JournalLocked` if another writer is alive, `JournalDamaged` if the last record is not
    sound. A torn last line (power loss, `kill -9`) is cut off; `repair` and a record of kind `note`
    tell of it. Safe to use from several threads.
    """

    def __init__(
        self,
        directory: Path | str,
        clock: Callable[[], float] = time.time,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.directory = Path(directory)
        self.repair: Repair | None = None
        self.last_seq = 0
        self.head = GENESIS
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._guard = threading.Lock()
        self._fd = -1
        self._size = 0
        self._number = 0
        self._dirty = False
        _make_folder(self.directory)
        self._lock_fd = _lock(self.directory)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def append(self, kind: str, actor: str, data: dict[str, Any]) -> Record:
        """Writes one record and flushes it to the disk before it returns.

        Raises `JournalFull` without space and `JournalError` for any other failure; the journal is
        then as it was before, and can be appended to again.
        """
        with self._guard:
            if self._lock_fd < 0:
                raise JournalError(f"the journal {self.directory} is closed")
            body = _Body(
                seq=self.last_seq + 1,
                t_unix_s=float(self._clock()),
                kind=kind,
                actor=actor,
                data=data,
                prev=self.head,
            )
            try:
                head = _encode(body)
            except (TypeError, ValueError, OverflowError) as error:
                raise JournalError(
                    f"a {kind} record of {actor} cannot be written as JSON: {error}"
                ) from error
            digest = hashlib.sha256(head).hexdigest()
            line = b'%s,"hash":"%s"}\n' % (head[:-1], digest.encode())
            try:
                self._write(line)
            except OSError as error:
                raise self._failure(error) from error
            self.last_seq, self.head = body.seq, digest
            return _decode(line)

    def close(self) -> None:
        """Ends writing and gives the lock back. Closing twice is fine."""
        with self._guard:
            for fd in (self._fd, self._lock_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._lock_fd = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        """Finds the end of the chain, repairs a torn tail, opens the last segment for appending."""
        segments = _segments(self.directory)
        for path in reversed(segments):
            content = path.read_bytes()
            end = content.rfind(b"\n") + 1
            if path is segments[-1] and end < len(content):
                end = self._mend(path, content, end)
                content = content[:end]
            if content:
                start = content.rfind(b"\n", 0, end - 1) + 1
                self._take_over(path, content[start:].rstrip(b"\n") + b"\n")
                break
        if segments:
            self._number = int(segments[-1].stem)
            self._fd = os.open(segments[-1], os.O_WRONLY | os.O_APPEND)
            self._size = os.fstat(self._fd).st_size
        else:
            self._next_segment()
        if self.repair:
            with contextlib.suppress(JournalFull):  # the attribute still tells of it
                self.append("note", "journal", {"repair": msgspec.to_builtins(self.repair)})

    def _mend(self, path: Path, content: bytes, end: int) -> int:
        """Repairs the unfinished last line of `path`. Returns where the content now ends."""
        tail = content[end:]
        kept = _sound(tail + b"\n") is not None
        fd = os.open(path, os.O_WRONLY)
        try:
            os.ftruncate(fd, end)
            if kept:
                os.pwrite(fd, tail + b"\n", end)
            os.fsync(fd)
        finally:
            os.close(fd)
        text = tail[:4096].decode(errors="replace")
        self.repair = Repair(segment=path.name, bytes=len(tail), kept=kept, text=text)
        return len(content) if kept else end

    def _take_over(self, path: Path, line: bytes) -> None:
        record = _sound(line)
        if record is None:
            raise JournalDamaged(
                f"the last record in {path} is damaged, so nothing can follow it;"
                f" run `gridctl journal verify`, then move {self.directory} aside to start a new journal"
            )
        self.last_seq, self.head = record.seq, record.hash

    def _write(self, line: bytes) -> None:
        if self._dirty:
            self._undo()
        if self._size and self._size + len(line) > self._segment_bytes:
            self._next_segment()
        self._dirty = True
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fsync(self._fd)
        self._dirty = False
        self._size += len(line)

    def _next_segment(self) -> None:
        path = self.directory / f"{self._number + 1:08d}.jsonl"
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            _fsync_folder(self.directory)
        except BaseException:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._number = fd, os.fstat(fd).st_size, self._number + 1

    def _undo(self) -> None:
        os.ftruncate(self._fd, self._size)
        os.fsync(self._fd)
        self._dirty = False

    def _failure(self, error: OSError) -> JournalError:
        if self._dirty:
            with contextlib.suppress(OSError):  # tried again before the next write
                self._undo()
        if error.errno in _FULL:
            return JournalFull(f"no space left for the journal {self.directory}: free some, then try again")
        return JournalError(f"the journal {self.directory} cannot be written: {error.strerror}")


class Tail:
    """Reads on from where it stopped, without waiting and without a lock. `damaged`: past what is no record.

    `new()` yields the whole records that came since the last call. A record may show up here in
    the instant before its writer has flushed it.
    """

    def __init__(self, directory: Path | str, after: int = 0, *, damaged: bool = False) -> None:
        self._directory = Path(directory)
        self._damaged = damaged
        self._after = after
        self._segment = ""
        self._offset = 0

    def new(self) -> Iterator[Record]:
        """Raises `JournalDamaged` at a line that is no record."""
        segments = _segments(self._directory)
        if not self._segment:
            segments = _from(segments, self._after + 1)
        for path in segments:
            if path.name < self._segment:
                continue
            if path.name != self._segment:
                self._segment, self._offset = path.name, 0
            yield from self._segment_records(path, last=path is segments[-1])

    def _segment_records(self, path: Path, *, last: bool) -> Iterator[Record]:
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n") and last:
                    return  # being written, or torn; the writer's next open repairs it
                record = _parse(line)
                if record is None and not self._damaged:
                    raise JournalDamaged(
                        f"{path} at byte {self._offset}: not a record; run `gridctl journal verify`"
                    )
                self._offset += len(line)
                if record and record.seq > self._after:
                    self._after = record.seq
                    yield record


def read(directory: Path | str, after: int = 0, *, damaged: bool = False) -> Iterator[Record]:
    """All whole records with a seq above `after`, as of now. No lock; hashes are not checked.

    Raises `JournalDamaged` at a line that is no record, or leaves it out: `damaged`. A torn last line is
    left out.
    """
    return Tail(directory, after, damaged=damaged).new()


def follow(directory: Path | str, after: int, wait: Callable[[], bool]) -> Iterator[Record]:
    """Records above `after`, then new ones as they come.

    `wait` is called whenever there is nothing new; it returns False to end. Code on an event loop
    calls `Tail.new` itself.
    """
    tail = Tail(directory, after)
    while True:
        yield from tail.new()
        if not wait():
            return


def segments(directory: Path | str, after: int = 0) -> list[Path]:
    """The files that hold the records above `after`, in order; the first may begin below it."""
    return _from(_segments(Path(directory)), after + 1)


def sound(directory: Path | str, after: int, head: str) -> Iterator[tuple[Record, bytes]]:
    """Records above `after` with their lines; each hash is checked, and the chain from `head` on.

    `head` is the hash of record `after`. Raises `JournalDamaged` at the first that does not hold; all
    before it were yielded. A torn last line is left out.
    """
    checker = _Checker(after, head)
    files = segments(directory, after)
    for path in files:
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") and path is files[-1]:
                    return
                record = _parse(line)
                if record is not None and record.seq <= after:
                    continue
                if what := checker.feed(line):
                    raise JournalDamaged(f"{path}: {what}; run `gridctl journal verify`")
                assert record is not None
                yield record, line


def verify(directory: Path | str) -> Verification:
    """Checks every byte of a journal: each hash, the chain, the order. Never raises for damage."""
    checker = _Checker()
    segments = _segments(Path(directory))
    checker.foreign = _foreign(Path(directory))
    for path in segments:
        offset = 0
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n") and path is segments[-1]:
                    checker.torn_bytes = len(line)
                elif what := checker.feed(line):
                    return checker.result(f"{what} (in {path.name})", path.name, offset)
                offset += len(line)
    return checker.result("")


def _foreign(directory: Path) -> tuple[str, ...]:
    """Names in a journal's folder that are neither segments nor its lock."""
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    return tuple(name for name in names if not _SEGMENT_NAME.fullmatch(name) and name != "writer.lock")


class _Checker:
    def __init__(self, records: int = 0, head: str = GENESIS) -> None:
        self.records = records
        self.head = head
        self.torn_bytes = 0
        self._t_unix_s = float("-inf")
        self._clock_back: list[int] = []
        self._clock_back_count = 0
        self._leaps: list[int] = []
        self._leaps_count = 0
        self.foreign: tuple[str, ...] = ()

    def feed(self, line: bytes) -> str:
        """Takes the next line; returns what is wrong with it, or ""."""
        record = _parse(line)
        expected = self.records + 1
        if record is None:
            return "the line is no record: changed or cut"
        if _sound(line) is None:
            return "the record was changed: its hash is another"
        if record.seq > expected:
            return f"records {expected} to {record.seq - 1} are missing, or stand elsewhere"
        if record.seq < expected:
            return f"record {record.seq} stands here: put in, repeated or out of order"
        if record.prev != self.head:
            return "the record does not continue the one before it: one of them was replaced"
        if record.t_unix_s < self._t_unix_s:
            self._clock_back = self._clock_back or [record.seq]
            self._clock_back_count += 1
        if self.records and record.t_unix_s > self._t_unix_s + LEAP_S:
            self._leaps = self._leaps or [record.seq]
            self._leaps_count += 1
        self.records, self.head, self._t_unix_s = record.seq, record.hash, record.t_unix_s
        return ""

    def result(self, what: str, segment: str = "", offset: int = 0) -> Verification:
        return Verification(
            ok=not what,
            records=self.records,
            first_bad=self.records + 1 if what else None,
            what=what,
            head=self.head,
            torn_bytes=self.torn_bytes,
            clock_back=self._clock_back_count,
            clock_back_first=self._clock_back[0] if self._clock_back else None,
            clock_leaps=self._leaps_count,
            clock_leaps_first=self._leaps[0] if self._leaps else None,
            segment=segment,
            offset=offset,
            foreign=self.foreign,
        )


def _parse(line: bytes) -> Record | None:
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _sound(line: bytes) -> Record | None:
    """The record of a line whose hash fits its bytes, else None."""
    member = _HASH_MEMBER.fullmatch(line[-_HASH_MEMBER_BYTES:])
    if member is None:
        return None
    digest = hashlib.sha256(line[:-_HASH_MEMBER_BYTES] + b"}").hexdigest()
    return _parse(line) if digest.encode() == member[1] else None


def _segments(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if _SEGMENT_NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def _from(segments: list[Path], seq: int) -> list[Path]:
    """The segments from the one on that holds record `seq`."""
    for index in range(len(segments) - 1, 0, -1):
        with segments[index].open("rb") as file:
            record = _parse(file.readline())
        if record is not None and record.seq <= seq:
            return segments[index:]
    return segments


def _make_folder(directory: Path) -> None:
    if not directory.is_dir():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _fsync_folder(directory.parent)


def _fsync_folder(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _lock(directory: Path) -> int:
    """Takes the writer's lock, which the kernel gives back when the process ends in any way."""
    fd = os.open(directory / "writer.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise JournalLocked(
            f"the journal {directory} is being written by process {holder or 'unknown'};"
            " a journal has one writer: end that process, or use another folder"
        ) from None
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
