"""Source `log:FILE`: a log file, followed by its inode. Rotation and truncation are noticed and told.

A file that was renamed is read to its end, and a while longer: its writer learns late of the new one. A file
that was cut off (`copytruncate`) is shorter than what was read of it, or has other bytes where the last ones
were. How far the file was read is kept by inode, so that rotations while no agent ran lose nothing that is
still there; what was packed meanwhile is told as lost.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from gridagent.telemetry import Reading
from gridagent.telemetry.logs import LINE_BYTES_MAX, LogProbe
from gridagent.telemetry.tree import Tree, note

READ_BYTES = 256 << 10
#: How long a renamed file is read on.
GRACE_S = 5.0
#: So many renamed files are read on at the same time.
OLD_MAX = 32
_MARK_BYTES = 32
#: Neighbours that are looked at for the file of before.
_NEIGHBOURS_MAX = 4096
#: What a rotation puts behind a file's name: a number or a date, and more where it is packed.
_ROTATED = re.compile(r"[._-]\d[\d._-]*?(?P<packed>\.(gz|xz|zst|bz2))?")


class Position(msgspec.Struct, frozen=True):
    """How far a file was told. `mark`: the last bytes before, in hex; with others it is another content."""

    device: int
    inode: int
    offset: Annotated[int, msgspec.Meta(ge=0)]
    mark: Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2}){0,64}$")]
    torn: bool = False  #: the line at the offset has begun before and was told, or is none of ours
    old: "Position | None" = None  #: the file of before a rotation, to which lines may still come


class _Open:
    """A file that is open."""

    def __init__(self, descriptor: int, offset: int) -> None:
        self.descriptor, self.offset = descriptor, offset
        self.drained = self.torn = False
        at = os.fstat(descriptor)
        self.key = (at.st_dev, at.st_ino)
        self.mark = self.ending()

    def ending(self) -> bytes:
        """The last bytes before the offset."""
        length = min(self.offset, _MARK_BYTES)
        return os.pread(self.descriptor, length, self.offset - length)

    def cut_off(self) -> bool:
        """Is what was read no longer there?"""
        return os.fstat(self.descriptor).st_size < self.offset or self.ending() != self.mark

    def rewind(self) -> None:
        """Back to the begin: it is another content."""
        self.offset, self.mark, self.torn = 0, b"", False

    def skip(self) -> None:
        """On to the end: what is there is not told, nor what follows of a line that has begun."""
        self.offset = os.fstat(self.descriptor).st_size
        self.mark = self.ending()
        self.torn = self.mark[-1:] not in (b"", b"\n")

    def lines(self, *, last: bool = False) -> list[bytes]:
        """Whole lines from here on, at most `READ_BYTES` of them. `last`: also one without an end.

        Of a longer line the begin is given, and nothing more: the rest must not pass for a line of its own.
        """
        chunk = os.pread(self.descriptor, READ_BYTES, self.offset)
        self.drained = len(chunk) < READ_BYTES
        endless = b"\n" not in chunk and not self.drained
        end = len(chunk) if last or endless else chunk.rfind(b"\n") + 1
        if not end:
            return []
        self.offset += end
        self.mark = (self.mark + chunk[:end])[-_MARK_BYTES:]
        found = chunk[:end].split(b"\n")
        if self.torn:
            del found[0]
        self.torn = chunk[end - 1 : end] != b"\n"
        return found

    def position(self) -> Position:
        return Position(*self.key, self.offset, self.mark.hex(), self.torn)

    def close(self) -> None:
        os.close(self.descriptor)


class LogFile(LogProbe):
    """Records of kind `log` with the given source name. Without a cursor it begins at the file's end."""

    INTERVAL_S = 0.5

    def __init__(
        self, tree: Tree, path: str, name: str, cursor: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(tree, cursor, clock)
        self._path, self._name = path, name
        self._file: _Open | None = None
        self._olds: list[_Open] = []  #: files of before rotations, the oldest first
        self._old_until_s = 0.0
        self._absent = False
        self._before = self.kept(Position)

    def position(self) -> Position | None:
        old = self._olds[0] if self._olds else None
        if old is not None and not old.drained:
            return old.position()
        if self._file is None:
            return None
        return msgspec.structs.replace(self._file.position(), old=old and old.position())

    def read(self) -> list[Reading]:
        found: list[Reading] = []
        if self._file is None:
            self._begin(found)
        else:
            self._look(found)
        self.more = not self._tell_old(found)  # in order: first the old files' lines
        if self._file is not None and not self.more:
            self._tell(self._file, found)
            self.more = not self._file.drained
        return found

    def close(self) -> None:
        super().close()
        for file in (*self._olds, self._file):
            if file is not None:
                file.close()
        self._olds, self._file = [], None

    def _begin(self, found: list[Reading]) -> None:
        """The first look, and every further one until the file is there."""
        file = self._open(self._path)
        if file is None:
            if not self._absent and not self.tree.has(self._path):
                self._absent = True
                found.append(note(self.tree.source, "absent", f"/{self._path} is not there yet"))
            return
        self._file, before = file, self._before
        if before is None:
            if not self._absent:
                file.skip()
        elif file.key == (before.device, before.inode):
            if not self._resume(file, before):
                self._told_cut_off(found)
        elif (old := self._neighbour(before)) is not None:
            self._rotate(old, found)
        else:
            what = f"/{self._path} was replaced while no agent ran; the old one's last lines are lost"
            found.append(note(self.tree.source, "lost", what))
            self._olds = self._between(_changed_ns(self._cursor), found)
        if before is not None and before.old is not None and (old := self._neighbour(before.old)) is not None:
            self._olds.insert(0, old)
            self._old_until_s = self.clock() + GRACE_S

    def _look(self, found: list[Reading]) -> None:
        """Is it still the same file?"""
        assert self._file is not None
        self.tree.reading = self._path
        try:
            at = os.stat(self.tree.root / self._path)
        except OSError:
            return  # in the middle of a rotation; what is open stays readable
        if (at.st_dev, at.st_ino) != self._file.key:
            fresh = self._open(self._path)
            if fresh is not None:
                old, self._file = self._file, fresh
                self._rotate(old, found)
        elif self._file.cut_off():
            self._file.rewind()
            self._told_cut_off(found)

    def _rotate(self, old: _Open, found: list[Reading]) -> None:
        while len(self._olds) >= OLD_MAX:
            first = self._olds.pop(0)
            self._tell(first, found, last=True)
            first.close()
            if not first.drained:
                what = f"/{self._path} is rotated faster than it can be read; lines are lost"
                found.append(note(self.tree.source, "lost", what))
        self._old_until_s = self.clock() + GRACE_S
        old.drained = False
        found.append(
            note(self.tree.source, "rotated", f"/{self._path} was rotated; the old file is read to its end")
        )
        self._olds.append(old)
        self._olds += self._between(os.fstat(old.descriptor).st_mtime_ns, found)

    def _between(self, since_ns: int, found: list[Reading]) -> list[_Open]:
        """The files that came and were rotated unseen: beside it, by its name, written to since then."""
        folder, name = os.path.split(self._path)
        known = {file.key for file in (*self._olds, self._file) if file is not None}
        came: list[tuple[int, str]] = []
        for other in self.tree.names(folder, name)[:_NEIGHBOURS_MAX]:
            path = os.path.join(folder, other)
            changed_ns, rotated = _changed_ns(self.tree.root / path), _ROTATED.fullmatch(other, len(name))
            if rotated is None or changed_ns <= since_ns:
                continue
            if rotated["packed"]:
                what = f"/{path} was packed before it was read: lines of it may be lost"
                found.append(note(self.tree.source, "lost", what))
            else:
                came.append((changed_ns, path))
        if len(came) > OLD_MAX:
            what = f"/{self._path} was rotated {len(came)} times unseen; lines of the oldest files are lost"
            found.append(note(self.tree.source, "lost", what))
        opened = [file for _, path in sorted(came)[-OLD_MAX:] if (file := self._open(path)) is not None]
        for file in opened:
            if file.key in known:
                file.close()
        return [file for file in opened if file.key not in known]

    def _tell_old(self, found: list[Reading]) -> bool:
        """Tells what the files of before have. False: there is more of them."""
        while self._olds:
            old = self._olds[0]
            over = old.drained and (len(self._olds) > 1 or self.clock() >= self._old_until_s)
            self._tell(old, found, last=over)
            if not old.drained:
                return False
            if over:
                self._olds.pop(0).close()
            elif len(self._olds) == 1:
                return True  # its writer may learn late of the new one
        return True

    def _told_cut_off(self, found: list[Reading]) -> None:
        what = f"/{self._path} was cut off and is read from its begin; lines before may be lost"
        found.append(note(self.tree.source, "truncated", what))

    def _tell(self, file: _Open, found: list[Reading], *, last: bool = False) -> None:
        for line in file.lines(last=last):
            # A writer that goes on at its old offset in a file that was cut off leaves zeros before.
            if line := line.strip(b"\0\r")[:LINE_BYTES_MAX]:
                found.append(Reading("log", {"source": self._name, "line": line.decode(errors="replace")}))

    def _resume(self, file: _Open, before: Position) -> bool:
        file.offset = before.offset
        file.mark, file.torn = bytes.fromhex(before.mark), before.torn
        if file.cut_off():
            file.rewind()
            return False
        return True

    def _neighbour(self, before: Position) -> _Open | None:
        """The file of before under another name beside it, where it was neither packed nor deleted."""
        folder = os.path.dirname(self._path)
        for name in self.tree.names(folder)[:_NEIGHBOURS_MAX]:
            path = os.path.join(folder, name)
            try:
                at = os.stat(self.tree.root / path)
            except OSError:
                continue
            if (at.st_dev, at.st_ino) == (before.device, before.inode):
                file = self._open(path)
                if file is not None and self._resume(file, before):
                    return file
        return None

    def _open(self, path: str) -> _Open | None:
        self.tree.reading = path
        try:
            descriptor = os.open(self.tree.root / path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return _Open(descriptor, 0)
            os.close(descriptor)
            raise OSError(errno.ESPIPE, "it is no regular file")
        except OSError as error:
            self.tree.trouble(path, error)
            return None


def _changed_ns(path: Path) -> int:
    """When a file was last written to; 0 where it is none."""
    try:
        at = os.stat(path)
    except OSError:
        return 0
    return at.st_mtime_ns if stat.S_ISREG(at.st_mode) else 0
