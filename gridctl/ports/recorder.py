"""Writes recordings: what `gridctl.ports.recording` reads. One file, plain or .gz, a line a record."""

import contextlib
import gzip
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from gridagent.wire import StreamRecord
from gridctl.errors import ConfigError
from gridctl.ports.recording import Header

#: How much a recorder that is killed may lose.
FLUSH_S = 2.0
#: A clock that is set back by more is told as it is: a jump. By less, its node's records keep their order.
SET_BACK_S = 30.0
_OWN = ("t", "node", "kind")

_encode = msgspec.json.Encoder().encode


def check_name(path: Path) -> None:
    """Raises `ConfigError` for a file that is there already, or whose name is none of a recording."""
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise ConfigError(f"{path}: a recording is named .jsonl or .jsonl.gz")
    if path.exists():
        raise ConfigError(f"{path} exists already and is not overwritten: choose another name")


class Recorder:
    """An open recording. Raises `ConfigError` for the name, `OSError` where it cannot be written."""

    def __init__(
        self, path: Path, header: Header, start_unix_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_name(path)
        self._start_unix_s, self._clock = start_unix_s, clock
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._raw = os.fdopen(descriptor, "wb")
        packed = path.suffix == ".gz"
        self._packer = gzip.GzipFile(fileobj=self._raw, mode="wb", filename="") if packed else None
        self._file: gzip.GzipFile | BinaryIO = self._packer or self._raw
        self._last_s: dict[str, float] = {}
        self._flush_s = clock() + FLUSH_S
        self.records = 0
        self._file.write(_encode(header) + b"\n")

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the file well. After a disk that refused it is readable up to there."""
        if error is None:
            self.close()
        else:
            with contextlib.suppress(OSError):
                self.close()

    def write(self, record: StreamRecord) -> None:
        """Takes one record."""
        t_s = round(record.t_unix_s - self._start_unix_s, 6)
        last_s = self._last_s.get(record.node, t_s)
        if last_s - SET_BACK_S < t_s < last_s:
            t_s = last_s
        self._last_s[record.node] = t_s
        own = {"t": t_s, "node": record.node, "kind": record.kind}
        fields = {f"{record.kind}_{key}" if key in _OWN else key: value for key, value in record.v.items()}
        self._file.write(_encode({**own, **fields}) + b"\n")
        self.records += 1

    def flush(self) -> None:
        """Hands what is written to the kernel, now and then; to be called often."""
        if self._clock() >= self._flush_s:
            self._flush_s = self._clock() + FLUSH_S
            if self._packer:
                self._packer.flush(zlib.Z_SYNC_FLUSH)
            self._raw.flush()

    def close(self) -> None:
        """Writes the end."""
        try:
            if self._packer:
                self._packer.close()
            self._raw.flush()
            os.fsync(self._raw.fileno())
        finally:
            self._raw.close()
