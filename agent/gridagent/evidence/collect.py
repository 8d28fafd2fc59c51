"""Gathers and packs: item by item, each bounded in seconds and bytes; what perishes first comes first."""

import contextlib
import fcntl
import gzip
import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from gridagent.evidence import Order, Outcome, RankProcess, files, stacks, tools
from gridagent.redact import redacted, redacted_argv, redacted_text
from gridagent.wire import EvidenceItem

#: Archives that stay; older ones go.
KEPT = 8
SMALL_BYTES = 4 << 20
LOG_BYTES = 16 << 20
LARGE_BYTES = 64 << 20
FILE_S = 15.0
BMC_S = 30.0
BUG_REPORT_S = 120.0

Found = tuple[bytes, str]


class Item(msgspec.Struct, frozen=True):
    """One file of the archive. `gather` gets the bytes and seconds that it may take."""

    name: str
    bytes_max: int
    seconds: float
    gather: Callable[[int, float], Found]


def collect(order: Order) -> Outcome:
    """Writes the archive. Never raises for what the node says or lacks."""
    folder = Path(order.folder)
    part = folder / f"{order.id}.part"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Outcome(error="another collection is at work on this node; wait for its end")
            _tidy(folder)
            with tempfile.TemporaryDirectory(prefix="work-", dir=folder, ignore_cleanup_errors=True) as work:
                outcome = _pack(order, part, work)
            _forget(folder, but=part.with_suffix(".tar.gz"))
            return outcome
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return Outcome(
            error=f"{error.filename or folder} cannot be written: {error.strerror}; nothing is kept"
        )


def _pack(order: Order, part: Path, work: str) -> Outcome:
    end_s = time.monotonic() + order.deadline_s
    left = order.bytes_max
    found: list[EvidenceItem] = []
    with part.open("wb") as raw:
        os.fchmod(raw.fileno(), 0o600)
        with tarfile.open(fileobj=raw, mode="w:gz", compresslevel=6) as archive:
            for item in _items(order, work):
                room, seconds = min(item.bytes_max, left), min(item.seconds, end_s - time.monotonic())
                data, note = _bounded(item, room, seconds)
                found.append(_described(item.name, data, note))
                if data:
                    _add(archive, item.name, data, order.t_unix_s)
                    left -= len(data)
            manifest = {"id": order.id, "t_unix_s": order.t_unix_s, **order.about, "items": found}
            _add(archive, "manifest.json", msgspec.json.format(msgspec.json.encode(manifest)), order.t_unix_s)
        raw.flush()
        os.fsync(raw.fileno())
    with part.open("rb") as packed:
        digest = hashlib.file_digest(packed, "sha256").hexdigest()
        size = os.fstat(packed.fileno()).st_size
    part.rename(part.with_suffix(".tar.gz"))
    return Outcome(bytes=size, sha256=digest, items=found)


def _bounded(item: Item, bytes_max: int, seconds: float) -> Found:
    """Gathers in a thread that is left behind if it is late: a read may hang in the kernel for ever."""
    if seconds <= 0 or bytes_max <= 0:
        return b"", f"left out: the whole had no {'time' if seconds <= 0 else 'room'} left"
    result: list[Found] = []

    def work() -> None:
        try:
            data, note = item.gather(bytes_max, seconds)
            result.append((data[:bytes_max], note))
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            result.append((b"", f"{where}{error.strerror or error}"))
        except Exception as error:  # what a node says breaks no collection
            result.append((b"", f"not understood: {error!r}"))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds + tools.KILLED_S + 1.0)
    return result[0] if result else (b"", f"did not end within {seconds:.0f} s")


def _items(order: Order, work: str) -> Iterator[Item]:
    yield _json("status.json", order.status)
    yield _json("ranks.json", [_rank(rank) for rank in order.ranks])
    for rank in order.ranks:
        if rank.state == "finished":
            continue  # its number may be another process's by now
        name = f"stacks/{_plain(rank.job)}-{rank.rank}-{rank.pid}.txt"
        yield Item(name, SMALL_BYTES, 2 * stacks.PY_SPY_S, partial(stacks.of_process, rank.pid, work))
    root = Path(order.sysroot)
    yield Item("kernel.log", LOG_BYTES, FILE_S, partial(files.kernel_log, root))
    for rank in order.ranks:
        for variable, path in files.flight_recorder(rank):
            name = f"flight-recorder/{_plain(rank.job)}-{rank.rank}-{rank.pid}-{variable.lower()}"
            yield Item(name, LARGE_BYTES, FILE_S, partial(files.dump, path))
    for number, log in enumerate(dict.fromkeys(order.logs)):
        name = f"logs/{number}-{_plain(log.strip('/'))}"
        yield Item(name, LOG_BYTES, FILE_S, partial(files.tail, root / log.lstrip("/")))
    spool = files.Spool(order)
    yield Item("spool.jsonl", LARGE_BYTES, 2 * FILE_S, spool.last_hour)
    yield Item("devices.json", SMALL_BYTES, FILE_S, spool.newest_samples)
    yield Item("bmc-events.txt", SMALL_BYTES, BMC_S, partial(_program, work, "ipmitool", ("sel", "elist")))
    yield Item("nvidia-bug-report.log", LARGE_BYTES, BUG_REPORT_S, partial(_bug_report, work))


def _plain(text: str) -> str:
    """A name out of a job's or a file's: it may not lead anywhere when the archive is unpacked."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:100]


def _json(name: str, value: object) -> Item:
    return Item(name, SMALL_BYTES, FILE_S, lambda *_: (msgspec.json.encode(redacted(value)), ""))


def _rank(rank: RankProcess) -> dict[str, object]:
    return {**msgspec.to_builtins(rank), "argv": redacted_argv(rank.argv)}


def _program(work: str, name: str, arguments: Iterable[str], bytes_max: int, seconds: float) -> Found:
    """What a program of the node prints, without secrets; a node without it says so."""
    program = tools.find(name)
    if program is None:
        return b"", f"{name} is not installed on this node"
    data, wrong = tools.run([program, *arguments], work, bytes_max, seconds)
    return redacted_text(data.decode(errors="replace")).encode(), wrong


def _bug_report(work: str, bytes_max: int, seconds: float) -> Found:
    """NVIDIA's own report, unpacked to take secrets out."""
    with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as folder:
        target = Path(folder) / "nvidia-bug-report.log"
        options = ("--safe-mode", "--output-file", str(target))  # else it may hang beside a GPU that does
        said, wrong = _program(folder, "nvidia-bug-report.sh", options, bytes_max, seconds)
        for path in (target.with_name(f"{target.name}.gz"), target):
            if path.is_file():
                with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                    text, torn = _all_of(file, bytes_max)
                return redacted_text(text.decode(errors="replace")).encode(), wrong or torn
        return b"", wrong or f"nvidia-bug-report.sh left no report: {said[:400].decode(errors='replace')}"


def _all_of(file: gzip.GzipFile | io.BufferedReader, bytes_max: int) -> Found:
    """What can be read of a file that may be torn."""
    text = io.BytesIO()
    try:
        while chunk := file.read1(min(1 << 16, bytes_max - text.tell())):  # what is there, also before a tear
            text.write(chunk)
    except (EOFError, gzip.BadGzipFile):
        return text.getvalue(), "torn"
    return text.getvalue(), "" if text.tell() < bytes_max else f"cut after {bytes_max} bytes"


def _described(name: str, data: bytes, note: str) -> EvidenceItem:
    digest = hashlib.sha256(data).hexdigest() if data else ""
    return EvidenceItem(name=name, bytes=len(data), sha256=digest, note=redacted_text(note))


def _add(archive: tarfile.TarFile, name: str, data: bytes, t_unix_s: float) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = len(data), int(t_unix_s), 0o600
    archive.addfile(entry, io.BytesIO(data))


def _tidy(folder: Path) -> None:
    """Takes away what a killed collection left."""
    for left in (*folder.glob("*.part"), *folder.glob("work-*")):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


def _forget(folder: Path, but: Path) -> None:
    """Takes the oldest archives away, now that there is a newer one, whatever the clock says of that."""
    others = sorted((p for p in folder.glob("*.tar.gz") if p != but), key=lambda path: path.stat().st_mtime)
    for old in others[: max(0, len(others) - KEPT + 1)]:
        with contextlib.suppress(OSError):
            old.unlink()
