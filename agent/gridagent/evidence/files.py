"""Evidence that lies in files: kernel log, logs, the spool's last hour, the collectives' flight recorder."""

import contextlib
import errno
import os
import re
import stat
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gridagent.evidence import SPOOL_S, Order, RankProcess
from gridagent.redact import KeyLines, redacted, redacted_text
from gridagent.wire import StreamRecord

KMSG_BYTES = 8192
KERNEL_FILES = ("var/log/kern.log", "var/log/messages", "var/log/syslog")
#: Where torch writes what its flight recorder knows: the value, followed by the rank, names the file.
FLIGHT_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

Found = tuple[bytes, str]  #: what was gathered, and what is wrong with it

_SECRET = re.compile(
    rb"KEY|TOKEN|SECRET|PASS|CRED|AUTH|SIGNATURE|BASIC|BEARER|://|PRIVATE"
    rb"|AKIA|ASIA|gh[pousr]_|hf_|github_|glpat|nvapi|xox|sk-|eyJ",
    re.IGNORECASE,
)


def kernel_log(sysroot: Path, bytes_max: int, seconds: float) -> Found:
    """The kernel's ring buffer; where it may not be read, the end of a file that a log daemon wrote."""
    why = ""
    try:
        ring, cut = _ring(sysroot / "dev/kmsg", bytes_max)
        if ring:
            return _text(ring), cut
        why = "/dev/kmsg is empty"
    except OSError as error:
        why = f"/dev/kmsg: {error.strerror}"
    for name in KERNEL_FILES:
        with contextlib.suppress(OSError):
            data, cut = tail(sysroot / name, bytes_max, seconds)
            return data, f"of /{name}, because {why}" + (f"; {cut}" if cut else "")
    raise FileNotFoundError(errno.ENOENT, f"{why}; nor is there a /{', /'.join(KERNEL_FILES)} to read")


def tail(path: Path, bytes_max: int, seconds: float) -> Found:
    """The end of a text file, from the beginning of a line."""
    descriptor = _open(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        file.seek(max(0, size - bytes_max))
        data = file.read(bytes_max)
    if size <= bytes_max:
        return _text(data), ""
    return _text(data[data.find(b"\n") + 1 :]), f"cut: the last {bytes_max} of {size} bytes"


def flight_recorder(rank: RankProcess) -> Iterator[tuple[str, Path]]:
    """(variable, file) of every dump that the rank's environment names."""
    for variable in FLIGHT_PREFIXES:
        if prefix := rank.env.get(variable):
            yield variable, Path(f"{prefix}{rank.rank}")


def dump(path: Path, bytes_max: int, seconds: float) -> Found:
    """A dump as it is: it is pickled, and never opened here."""
    with os.fdopen(_open(path), "rb") as file:
        data = file.read(bytes_max + 1)
    note = f"{path} as torch wrote it: pickled, not redacted"
    return data[:bytes_max], f"{note}; cut after {bytes_max} bytes" if len(data) > bytes_max else note


class Spool:
    """The agent's spool: its last hour, and what every device said last in it."""

    def __init__(self, order: Order) -> None:
        self._folder = Path(order.spool)
        self._since_unix_s = order.t_unix_s - SPOOL_S
        self._newest: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, KeyLines] = {}  #: source of a log -> its private keys, which have many lines

    def last_hour(self, bytes_max: int, seconds: float) -> Found:
        """The records of the last hour, the newest where that is too much."""
        decode = msgspec.json.Decoder(StreamRecord).decode
        kept: deque[bytes] = deque()
        size, cut = 0, 0
        for path in self._segments():
            with path.open("rb") as lines:
                for line in lines:
                    try:
                        record = decode(line)
                    except msgspec.MsgspecError:
                        continue  # being written just now
                    told = self._told(line, record)
                    if record.t_unix_s < self._since_unix_s:
                        continue
                    self._see(record)
                    kept.append(told)
                    size += len(kept[-1])
                    while size > bytes_max:
                        size -= len(kept.popleft())
                        cut += 1
        return b"".join(kept), f"cut: without the {cut} oldest records of the hour" if cut else ""

    def newest_samples(self, bytes_max: int, seconds: float) -> Found:
        """What GPUs, ports and sensors say now, after `last_hour`."""
        return msgspec.json.format(msgspec.json.encode(redacted(self._newest))), ""

    def _told(self, line: bytes, record: StreamRecord) -> bytes:
        """A record without secrets."""
        text = record.v.get("line") if record.kind == "log" else None
        if isinstance(text, str):
            keys = self._keys.setdefault(str(record.v.get("source")), KeyLines())
            if (left := keys.redacted(text)) != text:
                record = msgspec.structs.replace(record, v={**record.v, "line": left})
                line = msgspec.json.encode(record) + b"\n"
        return (
            msgspec.json.encode(redacted(msgspec.json.decode(line))) + b"\n" if _SECRET.search(line) else line
        )

    def _see(self, record: StreamRecord) -> None:
        """Later members over earlier ones: some are told only now and then."""
        v = record.v
        if record.kind != "sample" or not isinstance(values := v.get("v"), dict):
            return
        known = self._newest.setdefault(str(v.get("device")), {"v": {}})
        known.update({**v, "v": {**known["v"], **values}, "t_unix_s": record.t_unix_s})

    def _segments(self) -> list[Path]:
        """The segments that may hold records of the last hour, the oldest first."""
        found: list[Path] = []
        for path in sorted(self._folder.glob("*.jsonl"), reverse=True):
            found.append(path)
            with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as lines:
                if msgspec.json.decode(lines.readline(), type=StreamRecord).t_unix_s < self._since_unix_s:
                    break
        return found[::-1]


def _ring(path: Path, bytes_max: int) -> Found:
    """All records that a kernel log device has now, the newest where that is too much."""
    kept: deque[bytes] = deque()
    size, cut = 0, 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(descriptor, KMSG_BYTES)
            except BrokenPipeError:
                continue  # the ring has overtaken this reader
            except BlockingIOError:
                break
            if not record:
                break
            kept.append(record)
            size += len(record)
            while size > bytes_max:
                size -= len(kept.popleft())
                cut += 1
    finally:
        os.close(descriptor)
    return b"".join(kept), f"cut: without the {cut} oldest messages" if cut else ""


def _open(path: Path) -> int:
    """Opens what is a plain file, by no link: a path may come from a job's environment."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no plain file", str(path))
    return descriptor


def _text(data: bytes) -> bytes:
    return redacted_text(data.decode(errors="replace")).encode() if _SECRET.search(data) else data
