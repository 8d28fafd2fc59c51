"""Programs of the node as sources of evidence: bounded in time and bytes, ended with all they started."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.05
#: How long a killed program is waited for: one that hangs in the kernel is left behind.
KILLED_S = 1.0

_running: set[subprocess.Popen[bytes]] = set()


def find(name: str) -> str | None:
    """Where a program is: on the path, or beside this Python."""
    beside = Path(sys.executable).with_name(name)
    return shutil.which(name) or (str(beside) if os.access(beside, os.X_OK) else None)


def run(command: Sequence[str], folder: str, bytes_max: int, seconds: float) -> tuple[bytes, str]:
    """What a program prints, and what is wrong with it, else "". Raises `OSError` if it cannot be started.

    `folder` is where it runs; what it leaves there counts as its output, too.
    """
    end_s = time.monotonic() + seconds
    before = _size(folder)
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TMPDIR": folder}
    with tempfile.TemporaryFile(dir=folder) as output:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(child)
        wrong = ""
        try:
            while child.poll() is None and not wrong:
                if time.monotonic() >= end_s:
                    wrong = f"{command[0]} did not end within {seconds:.0f} s and was killed"
                elif os.fstat(output.fileno()).st_size + _size(folder) - before > bytes_max:
                    wrong = f"{command[0]} told more than {bytes_max} bytes and was killed"
                else:
                    time.sleep(POLL_S)
        finally:
            _kill(child)
            _running.discard(child)
        if not wrong and child.returncode:
            wrong = f"{command[0]} ended with status {child.returncode}"
        output.seek(0)
        return output.read(bytes_max), wrong


def end_all() -> None:
    """Kills every program that runs now, and what it started."""
    for child in list(_running):
        _kill(child)


def _size(folder: str) -> int:
    """Of everything that lies below it."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_size
    return total


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILLED_S)
