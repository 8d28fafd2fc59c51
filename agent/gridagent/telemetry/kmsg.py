"""Source `kmsg`: the kernel's log, record by record from /dev/kmsg.

Every record has a number. Records that the kernel's ring had no room for (the read fails with EPIPE, or the
numbers leave a gap) are told as a `note` with state `lost`. The number of the last record that was told is
kept with the boot's id: a restarted agent goes on behind it, and after a reboot the whole log is new. The
form of a record stands in the kernel's ABI document `dev-kmsg`.
"""

import errno
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gridagent.home import boot_id
from gridagent.telemetry import Reading
from gridagent.telemetry.logs import LINE_BYTES_MAX, LogProbe
from gridagent.telemetry.tree import Tree, note

DEVICE = "dev/kmsg"
#: An agent that was never here before tells of this time; what is older is no news. A boot's start is.
FIRST_S = 600.0
#: A record older than that says so: `late_s` is its age when it was told.
LATE_S = 5.0
RETRY_S = 10.0
_READ_BYTES = 64 << 10  #: a record fits, or the kernel refuses with EINVAL
_READS_MAX = 1000
_RECORD = re.compile(rb"\d{1,4},(?P<seq>\d{1,20}),(?P<usec>\d{1,20}),[^;]{1,64};")


class Position(msgspec.Struct, frozen=True):
    """The last record that was told."""

    boot: str
    seq: int


class Kmsg(LogProbe):
    """Records of kind `log`, source `kmsg`, as the kernel gives them (priority, number and time in front)."""

    def __init__(self, tree: Tree, cursor: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(tree, cursor, clock)
        self._boot = boot_id(str(tree.root))
        self._fd = -1
        self._retry_s = float("-inf")
        self._said: set[int] = set()  #: what went wrong with the device and was told
        self._rest = b""
        self._drained_s: float | None = None  #: when there was no more to be read, last
        before = self.kept(Position)
        #: None: nothing is known of what was told; -1: nothing of this boot
        self._seq: int | None = None
        if before is not None and before.boot and self._boot:
            self._seq = before.seq if before.boot == self._boot else -1
        self._first = self._seq is None

    def position(self) -> Position | None:
        return None if self._seq is None else Position(self._boot, self._seq)

    def read(self) -> list[Reading]:
        found: list[Reading] = []
        self.more = (self._fd >= 0 or self._open(found)) and self._drain(found)
        if self._fd >= 0 and not self.more:
            self._first = False
        return found

    def close(self) -> None:
        super().close()
        self._close()

    def _open(self, found: list[Reading]) -> bool:
        now_s = self.clock()
        if now_s < self._retry_s:
            return False
        self.tree.reading = DEVICE
        try:
            self._fd = os.open(self.tree.root / DEVICE, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if errno.ENOENT not in self._said:
                self._said.add(errno.ENOENT)
                found.append(
                    note(self.tree.source, "absent", f"there is no /{DEVICE}: kernel messages are unseen")
                )
        except OSError as error:
            self.tree.trouble(DEVICE, error)
        self._retry_s = now_s + RETRY_S
        return self._fd >= 0

    def _drain(self, found: list[Reading]) -> bool:
        """Reads until there is no more for now. True: it stopped before, because it was much."""
        for _ in range(_READS_MAX):
            now_s = self.clock()
            try:
                chunk = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                self._drained_s = now_s
                return False
            except BrokenPipeError:
                continue  # the next record's number tells how many were lost
            except OSError as error:
                if error.errno not in self._said:
                    self._said.add(error.errno or 0)
                    what = f"/{DEVICE} failed ({error.strerror}) and is opened again"
                    found.append(note(self.tree.source, "failed", what))
                self._close()
                return False
            if not chunk:
                self._drained_s = now_s
                return False
            found += self._records(chunk)
        return True

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._rest = -1, b""

    def _records(self, chunk: bytes) -> Iterator[Reading]:
        """The device gives one record a read; a pipe or file in its place whatever is there."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        self._rest = self._rest[:LINE_BYTES_MAX]
        for line in lines:
            if line and not line.startswith(b" "):  # such lines are the record's fields for programs
                yield from self._line(line[:LINE_BYTES_MAX])

    def _line(self, line: bytes) -> Iterator[Reading]:
        v: dict[str, object] = {"source": "kmsg", "line": line.decode(errors="replace")}
        if match := _RECORD.match(line):
            seq, age_s = int(match["seq"]), self._age_s(int(match["usec"]) / 1e6)
            if self._seq is not None and seq <= self._seq:
                return
            if self._seq is not None and seq > self._seq + 1:
                lost = seq - self._seq - 1
                what = f"{lost} kernel messages before number {seq} are lost: the ring had no room for them"
                yield note(self.tree.source, "lost", what, lost=lost)
            self._seq = seq
            if self._first and age_s > FIRST_S:
                return
            if age_s > LATE_S:
                v["late_s"] = round(age_s, 1)
        yield Reading("log", v)

    def _age_s(self, printed_s: float) -> float:
        """How long ago a record was printed. The kernel's log has a clock of its own, which nothing corrects:
        within months it may be minutes off. But no record is older than the last look that found none."""
        now_s = self.clock()
        since_look_s = math.inf if self._drained_s is None else now_s - self._drained_s
        return min(now_s - printed_s, since_look_s)
