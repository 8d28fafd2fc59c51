"""Runs `gridctl` as a process: with pipes, as a script would, or on a terminal, as a person would."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
COMMAND = [sys.executable, "-c", "from gridctl.cli import main; main()"]


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GRIDCTL_")}
    return {**kept, "GRIDCTL_HOME": str(home), "TERM": "dumb", **more}


def gridctl(
    home: Path, *arguments: str, expect: int = 0, types: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs to its end without a terminal; `types` is all of its stdin."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=environment(home),
        input=types,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == expect, (arguments, done.returncode, done.stdout, done.stderr)
    return done


def data(home: Path, *arguments: str) -> Any:
    """What a command prints as JSON."""
    return json.loads(gridctl(home, *arguments, "-o", "json").stdout)


class OnTerminal:
    """A `gridctl` whose stdin, stdout and stderr are a terminal of its own."""

    def __init__(self, home: Path, *arguments: str, **more: str) -> None:
        self._end_s = time.monotonic() + DEADLINE_S
        self.screen = ""
        self._pid, self._master = pty.fork()
        if self._pid == 0:
            os.execve(sys.executable, [*COMMAND, *arguments], environment(home, **more))

    def sees(self, pattern: str) -> None:
        """Waits until the screen shows it."""
        while not re.search(pattern, self.screen):
            assert self._read(), f"ended without {pattern!r}:\n{self.screen}"

    def types(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())

    def interrupts(self) -> None:
        """Presses Ctrl-C."""
        os.write(self._master, b"\x03")

    def ends(self) -> int:
        """Waits for its end and returns the exit code."""
        while self._read():
            pass
        _, status = os.waitpid(self._pid, 0)
        os.close(self._master)
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def _read(self) -> bool:
        left_s = self._end_s - time.monotonic()
        ready, _, _ = select.select([self._master], [], [], max(0.0, left_s))
        if not ready:
            self.kill()
            raise AssertionError(f"no end within {DEADLINE_S:.0f} s:\n{self.screen}")
        try:
            piece = os.read(self._master, 1 << 16)
        except OSError:  # the other side of the terminal is closed
            return False
        self.screen += piece.decode(errors="replace")
        return bool(piece)
