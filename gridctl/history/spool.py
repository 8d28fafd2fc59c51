"""What the nodes' streams tell, on its way into the store: numbered files of JSON lines in a folder.

A number is when its file was begun, in seconds since 1970. A line is a sample, a step of a rank, or how many
lines were lost; the first of a file says how far each node's stream was taken before it. The newest file is
the writer's. A torn line is nothing.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from gridagent.wire import StreamRecord
from gridctl.history.store import check_room

#: A file that is as long or as old is followed by the next, which lets it be compacted.
FILE_BYTES = 64 << 20
FILE_S = 300.0
#: More than this lies here only where nothing compacts: then the newest are lost.
SPOOL_BYTES = 4 << 30

_NAME = re.compile(r"\d{10}\.jsonl")
_encode = msgspec.json.Encoder().encode


def spooled(folder: Path, after: int = 0) -> list[Path]:
    """The files above number `after`, in order; the last may be growing."""
    try:
        found = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [path for path in found if int(path.stem) > after]


class Spool:
    """The one writer of a spool. Loses what cannot be written, counts it, and never raises for it."""

    def __init__(self, folder: Path, bytes_max: int = SPOOL_BYTES) -> None:
        self._folder = folder
        self._bytes_max = bytes_max
        self._seen: dict[str, tuple[int, float]] = {}  #: node -> seq and time of what was taken last
        self._fd = -1
        self._size = self._before = 0
        self._begun_unix_s = 0.0
        self._owed = 0  #: lost since the last line that says so
        self.lost = 0  #: since the start
        self.why = ""  #: why the newest lines were lost; empty while none are

    def write(self, records: Iterable[StreamRecord], now_unix_s: float) -> None:
        """Takes samples and progress; what was taken before, and other kinds, are passed over."""
        if self._fd < 0 and not self._seen:
            self._remember()
        taken: dict[str, tuple[int, float]] = {}
        made = []
        for record in records:
            seq, t_unix_s = taken.get(record.node) or self._seen.get(record.node, (0, 0.0))
            if record.seq <= seq and record.t_unix_s <= t_unix_s:
                continue
            if line := _line(record):
                made.append(_encode(line))
                taken[record.node] = (record.seq, record.t_unix_s)
        if made:
            self._append(made, now_unix_s)
            self._seen |= taken

    def close(self) -> None:
        """Ends the file in hand; the next `write` begins another."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, made: list[bytes], now_unix_s: float) -> None:
        told = [_encode({"lost": self._owed})] if self._owed else []
        content = b"".join(line + b"\n" for line in told + made)
        try:
            if self._fd < 0 or self._size > FILE_BYTES or not 0 <= now_unix_s - self._begun_unix_s < FILE_S:
                self._next(now_unix_s)
            if self._before + self._size + len(content) > self._bytes_max:
                raise OSError(0, f"{self._folder} has {self._bytes_max} bytes that nothing has compacted")
            check_room(self._folder)
            self._write(content)
        except OSError as error:
            self.lose(len(made), error.strerror or str(error))
        else:
            self._owed, self.why = 0, ""

    def lose(self, count: int, why: str) -> None:
        """So many lines are lost."""
        self._owed += count
        self.lost += count
        self.why = why

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(content)

    def _next(self, now_unix_s: float) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = spooled(self._folder)
        number = max(int(now_unix_s), int(found[-1].stem) + 1 if found else 1)
        self.close()
        self._before = sum(path.stat().st_size for path in found)
        path = self._folder / f"{number:010d}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._size, self._begun_unix_s = 0, now_unix_s
        self._write(_encode({"seqs": self._seen}) + b"\n")

    def _remember(self) -> None:
        """How far the streams were taken before, as the newest file says."""
        for path in spooled(self._folder)[-1:]:
            with contextlib.suppress(OSError), path.open("rb") as file:
                for line in file:
                    with contextlib.suppress(msgspec.MsgspecError, ValueError, TypeError, LookupError):
                        said = msgspec.json.decode(line)
                        for node, (seq, t_unix_s) in said.get("seqs", {}).items():
                            self._seen[node] = (int(seq), float(t_unix_s))
                        if "seq" in said:
                            self._seen[said["node"]] = (int(said["seq"]), float(said["t_unix_s"]))


def _line(record: StreamRecord) -> dict[str, Any] | None:
    """A sample with its numbers, or a step; None for anything else."""
    head = {"seq": record.seq, "t_unix_s": record.t_unix_s, "node": record.node}
    v = record.v
    if record.kind == "sample" and isinstance(v.get("device"), str) and isinstance(v.get("v"), dict):
        values = {str(name): value for name, value in v["v"].items() if _number(value)}
        return {**head, "device": v["device"], "v": values} if values else None
    if record.kind == "progress" and isinstance(v.get("job"), str) and isinstance(v.get("step"), int):
        names = ("rank", "epoch", "step", "step_s", "loss", "grad_norm")
        told = {name: v[name] for name in names if _number(v.get(name))}
        return {**head, "job": v["job"], **told}
    return None


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
