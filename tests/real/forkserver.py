"""Starts ranks and spares quickly: torch is imported once, every process is a fork of that one.

`ForkServer` is the test's end; run as a program this file is the server:

stdin, one JSON object a line: {"argv": [...] of `gridagent`, "env": {...}, "cwd": ..., "log": ...}.
stdout, one JSON object a line: {"started": pid} in the order of the requests, {"ended": pid, "status": n}.

A fork runs the command line of `gridagent` itself. Only the last act of `gridagent exec` differs: where
it would exec the script's interpreter, the script runs in this process. Nothing of gridagent.train is
imported before the fork, and no torch function is called.
"""

import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import queue
import runpy
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from agents import DEADLINE_S

PR_SET_PDEATHSIG = 1
#: What a training script and its session import sooner or later.
PRELOAD = (
    "cryptography.hazmat.primitives.ciphers.aead",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.onnx",
    "torchdata.stateful_dataloader",
)
JOBS = Path(__file__).with_name("jobs")


class Process(Protocol):
    """A rank or a spare: started by exec or by the fork server."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class Forked:
    """A fork of the fork server."""

    def __init__(self, pid: int, ended: "Future[int]") -> None:
        self.pid = pid
        self._ended = ended

    def poll(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def wait(self, timeout: float | None = None) -> int:
        return self._ended.result(timeout)

    def send_signal(self, sig: int) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """forkserver.py, which forks processes with torch imported."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._lock = threading.Lock()
        self._started: queue.SimpleQueue[Forked] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def start(self, argv: list[str], env: dict[str, str], log: Path) -> Forked:
        """Runs `gridagent ARGV` in a fork."""
        order = {"argv": argv, "env": env, "cwd": str(JOBS), "log": str(log)}
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return self._started.get(timeout=DEADLINE_S)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        self._process.stdout.close()

    def _read(self) -> None:
        ended: dict[int, Future[int]] = {}
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if "started" in event:
                pid = event["started"]
                ended[pid] = Future()
                self._started.put(Forked(pid, ended[pid]))
            else:
                ended.pop(event["ended"]).set_result(event["status"])


@functools.cache
def shared() -> ForkServer:
    """The one fork server of this test process. It ends with it."""
    server = ForkServer()
    atexit.register(server.close)
    return server


# ------------------------------------------------------------------------------------ the server itself


def main() -> int:
    """Serves until stdin ends; returns in every fork with its exit status."""
    for name in PRELOAD:
        importlib.import_module(name)

    children: dict[int, int] = {}  # pidfd -> pid
    stdin = os.fdopen(0, "rb", buffering=0)  # nothing may lie in a buffer when we poll
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                poll.unregister(fd)
                os.close(fd)
                pid = children.pop(fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                say(ended=pid, status=status)
                continue
            line = stdin.readline()
            if not line:
                return 0
            order = json.loads(line)
            if (pid := os.fork()) == 0:
                return become(order)
            children[os.pidfd_open(pid)] = pid
            poll.register(next(reversed(children)), select.POLLIN)
            say(started=pid)


def become(order: dict[str, Any]) -> int:
    from gridagent import cli

    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also a killed test leaves nothing behind
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((null, 0), (log, 1), (log, 2)):
        os.dup2(fd, number)
    os.closerange(3, 64)  # what belongs to the server and its other children
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    os.execvpe = run_here  # type: ignore[assignment]
    return cli.main(order["argv"])


def run_here(_program: str, argv: list[str], environment: dict[str, str]) -> None:
    """In the place of exec: `python SCRIPT ARGS` in this process."""
    os.environ.update(environment)
    if os.environ.pop("FORKSERVER_NO_AGENT", ""):  # the undisturbed run knows of no agent
        del os.environ["GRIDAGENT_SOCKET"]
    sys.argv = argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[1])))
    runpy.run_path(argv[1], run_name="__main__")
    sys.exit(0)


def say(**event: int) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a fork need not take torch apart
