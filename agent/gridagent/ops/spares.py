"""spare.park: starts processes that wait for a rank. They outlive the agent."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from gridagent.errors import OpFailed, Refused
from gridagent.home import Home
from gridagent.ops import arguments
from gridagent.sessions import Sessions
from gridagent.wire import OpRequest

COUNT_MAX = 64
POLL_S = 0.1
TAIL_BYTES = 2000


class _Park(msgspec.Struct):
    count: int = 1
    gpus: list[int] = []


class SparePark:
    """Starts `count` spares, shares `gpus` out among them, and is done once all have reported."""

    def __init__(self, home: Home, sessions: Sessions) -> None:
        self._home = home
        self._sessions = sessions
        self._children: list[subprocess.Popen[bytes]] = []

    def reap(self) -> None:
        """Collects spares that have ended, so that none stays as a zombie."""
        self._children = [child for child in self._children if child.poll() is None]

    def check(self, request: OpRequest) -> None:
        """Raises `Refused` for a count that is out of bounds or does not divide the devices."""
        args = arguments(request, _Park)
        if not 1 <= args.count <= COUNT_MAX:
            raise Refused("bad-request", f"spare.park: count must lie between 1 and {COUNT_MAX}")
        if len(args.gpus) % args.count:
            raise Refused(
                "bad-request", f"spare.park: {len(args.gpus)} gpus cannot be shared by {args.count} spares"
            )

    async def run(self, request: OpRequest) -> Any:
        """Returns {"sessions", "pids"}. Raises `OpFailed` with the spare's last words if one ends early."""
        args = arguments(request, _Park)
        share = len(args.gpus) // args.count
        started = [
            self._start(args.gpus[i * share : (i + 1) * share] if share else []) for i in range(args.count)
        ]
        try:
            sessions = [await self._reported(child, log, gpus) for child, log, gpus in started]
        except BaseException:
            for child, _, _ in started:  # all or none: nobody would know of the others
                child.kill()
            raise
        return {"sessions": sessions, "pids": [child.pid for child, _, _ in started]}

    def _start(self, gpus: list[int]) -> tuple[subprocess.Popen[bytes], Path, list[int]]:
        taken = {path.name for path in self._home.root.glob("spare-*.log")}
        number = next(n for n in range(len(taken) + 1) if f"spare-{n}.log" not in taken)
        log = self._home.root / f"spare-{number}.log"
        environment = dict(os.environ)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        command = [sys.executable, "-m", "gridagent", "park", "--home", str(self._home.root.absolute())]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._children.append(child)
        return child, log, gpus

    async def _reported(self, child: subprocess.Popen[bytes], log: Path, gpus: list[int]) -> str:
        while (session := self._sessions.parked_by(child.pid)) is None:
            if child.poll() is not None:
                words = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
                raise OpFailed(f"a spare ended with status {child.returncode} before it was parked: {words}")
            await asyncio.sleep(POLL_S)
        session.gpus = gpus
        return session.id
