"""Reads recordings: what agents export, in order, as JSON lines; plain, .gz, or .zst with a library.

Line by line, so that memory does not depend on the length. A last line that is torn ends the recording;
any other line that cannot be read is counted and left out.
"""

import gzip
import importlib
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from gridagent.wire import StreamRecord
from gridctl.errors import ConfigError
from gridctl.model.findings import WatchedNode
from gridctl.model.truth import Truth

#: Libraries that read Zstandard, the first that is installed is taken.
_ZSTD = ("compression.zstd", "zstandard", "pyzstd")
_LINE_BYTES_MAX = 16 << 20


class Job(msgspec.Struct, frozen=True):
    """A job of the header: which rank runs where."""

    id: str
    ranks: dict[str, str] = {}


class Header(msgspec.Struct, frozen=True):
    """The first line. What is not known here is ignored: an older reader reads a newer recording."""

    recording: int
    name: str = ""
    start: str = ""
    interval_s: float = 1.0
    nodes: list[WatchedNode] = []
    jobs: list[Job] = []


class Recording:
    """An open recording: `header`, then its records once. `unreadable` counts lines that were left out."""

    def __init__(self, path: Path) -> None:
        """Raises `ConfigError` where the file is no recording, `OSError` where it cannot be read."""
        self.unreadable = 0
        self._closing = ExitStack()
        try:
            self._lines = _whole(self._open(path))
            self.header = msgspec.json.decode(next(self._lines, b""), type=Header)
        except (msgspec.DecodeError, EOFError, OSError, ValueError) as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, gzip.BadGzipFile):
                raise
            raise ConfigError(f"{path} is no recording: its first line is no header ({error})") from None
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        self._closing.close()

    def records(self) -> Iterator[StreamRecord]:
        """The records in the file's order; `t_unix_s` counts from the recording's start."""
        decode = msgspec.json.Decoder(dict[str, Any]).decode
        boots: dict[str, str] = {}
        seq = 0
        for line in self._lines:
            try:
                fields = decode(line)
                node, kind = fields.pop("node"), fields.pop("kind")
                t_s = float(fields.pop("t"))
            except (ValueError, KeyError, TypeError, RecursionError):
                self.unreadable += bool(line.strip())
                continue
            if not (isinstance(node, str) and isinstance(kind, str) and math.isfinite(t_s)):
                self.unreadable += 1
                continue
            seq += 1
            if kind == "beat" and isinstance(boot := fields.get("boot"), str):
                boots[node] = boot
            yield StreamRecord(
                seq=seq, boot=boots.get(node, ""), t_unix_s=t_s, node=node, kind=kind, v=fields
            )

    def _open(self, path: Path) -> BinaryIO:
        raw = self._closing.enter_context(path.open("rb"))
        magic = raw.read(4)
        raw.seek(0)
        if magic[:2] == b"\x1f\x8b":
            return cast(BinaryIO, self._closing.enter_context(gzip.GzipFile(fileobj=raw)))
        if magic != b"\x28\xb5\x2f\xfd":
            return raw
        for name in _ZSTD:
            try:
                library = importlib.import_module(name)
            except ImportError:
                continue
            return cast(BinaryIO, self._closing.enter_context(library.open(raw, "rb")))
        raise ConfigError(f"{path} is packed with Zstandard: pip install zstandard, or unpack it (zstd -d)")


def truth_path(recording: Path) -> Path:
    """Where the truth of a recording stands: NAME.truth.json beside NAME.jsonl, NAME.jsonl.gz or .zst."""
    name = recording.name
    for ending in (".gz", ".zst", ".jsonl"):
        name = name.removesuffix(ending)
    return recording.with_name(f"{name}.truth.json")


def truth_of(recording: Path) -> Truth:
    """What really happened. Raises `ConfigError` where that is not known or cannot be read."""
    path = truth_path(recording)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Truth)
    except FileNotFoundError:
        raise ConfigError(f"{recording} cannot be scored: its truth, {path}, is not there") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no truth of a recording: {error}") from None


def _whole(lines: BinaryIO) -> Iterator[bytes]:
    """The lines of a file that may end anywhere, also in the middle of its packing."""
    try:
        while line := lines.readline(_LINE_BYTES_MAX):
            yield line
    except (EOFError, gzip.BadGzipFile):
        return


def job_members(jobs: Iterable[Job]) -> dict[str, set[str]]:
    """Node -> the ids of the jobs that have a rank on it."""
    members: dict[str, set[str]] = {}
    for job in jobs:
        for node in job.ranks.values():
            members.setdefault(node, set()).add(job.id)
    return members
