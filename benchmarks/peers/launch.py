"""Starts the processes of a benchmark and leaves none of them behind."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DEADLINE_S = 300.0
Start = Callable[..., "subprocess.Popen[bytes]"]


@contextlib.contextmanager
def processes(log: Path) -> Iterator[Start]:
    """Gives a function that starts a process (words, and the environment's additions by name).

    Each is in a session of its own, says what it says to `log`, and computes with one thread.
    """
    children: list[subprocess.Popen[bytes]] = []

    def start(words: list[str], **environ: str) -> "subprocess.Popen[bytes]":
        with log.open("ab") as out:
            child = subprocess.Popen(
                words,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        children.append(child)
        return child

    try:
        yield start
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def wait(what: str, log: Path, ready: Callable[[], bool]) -> None:
    """Until `ready()`. Ends the benchmark at the deadline, with what the processes said."""
    until_s = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > until_s:
            raise SystemExit(f"{what} took longer than {DEADLINE_S:.0f} s\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


def run_ranks(words: list[str], world: int, log: Path) -> None:
    """Runs one process a rank to the end. Ends the benchmark if one of them fails."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with processes(log) as start:
        job = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [start(words, RANK=str(rank), LOCAL_RANK=str(rank), **job) for rank in range(world)]
        wait("a job", log, lambda: all(rank.poll() is not None for rank in ranks))
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"a rank failed\n{log.read_text()[-3000:]}")
