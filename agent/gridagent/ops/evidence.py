"""evidence.collect: what this node knows of itself, packed before anything destroys it. One at a time."""

import asyncio
import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from gridagent.errors import OpFailed, Refused
from gridagent.evidence import BYTES_MAX, Order, Outcome, RankProcess
from gridagent.home import AgentConfig, Home
from gridagent.launch import LaunchError, Launches
from gridagent.ops import arguments
from gridagent.wire import Evidence, NodeStatus, OpRequest, plain

#: So much stays free for the journal and the spool, whatever is collected.
RESERVE_BYTES = 64 << 20
#: What the agent keeps of the deadline for itself.
MARGIN_S = 10.0
PART_BYTES_MAX = 4 << 20

#: An archive bears its operation's id.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class _Collect(msgspec.Struct):
    incident: str = ""


class CollectEvidence:
    """Gathers in a child process, which is ended with the operation."""

    def __init__(
        self, home: Home, config: AgentConfig, launches: Launches, status: Callable[[], NodeStatus]
    ) -> None:
        self._home, self._config = home, config
        self._launches, self._status = launches, status
        self._running = ""

    @property
    def running(self) -> str:
        """The collection that runs now, or ""."""
        return self._running

    def check(self, request: OpRequest) -> None:
        """Raises `Refused`: busy, disk-full, read-only, or an id that names no file."""
        arguments(request, _Collect)
        if not _NAME.fullmatch(request.id):
            raise Refused(
                "bad-request", f"the id {request.id[:100]!a} would name the archive: letters, digits, . _ -"
            )
        if self._running:
            raise Refused("busy", f"{self._running} collects on this node now; wait for its end")
        self._room()

    def _room(self) -> int:
        """How many bytes a collection may take. Raises `Refused`."""
        folder = self._home.evidence if self._home.evidence.exists() else self._home.root
        if not os.access(folder, os.W_OK):
            raise Refused("read-only", f"nothing was collected: {folder} cannot be written; make it writable")
        free = shutil.disk_usage(folder).free - RESERVE_BYTES
        if free <= 0:
            raise Refused(
                "disk-full",
                f"nothing was collected: {folder} has {(free + RESERVE_BYTES) >> 20} MiB free, of which"
                f" {RESERVE_BYTES >> 20} MiB are kept for the journal; free some, then try again",
            )
        return min(BYTES_MAX, free // 2)  # packed, and what a program writes meanwhile

    async def run(self, request: OpRequest) -> Any:
        """Returns `Evidence`. Raises `OpFailed`."""
        if self._running:
            raise OpFailed(f"{self._running} collects on this node now; wait for its end")
        self._running = request.id
        try:
            order = self._order(request)
            outcome = await _in_child(order, request.deadline_s)
        finally:
            self._running = ""
        if outcome.error:
            raise OpFailed(outcome.error)
        found = Evidence(
            id=order.id,
            bytes=outcome.bytes,
            sha256=outcome.sha256,
            t_unix_s=order.t_unix_s,
            items=outcome.items,
        )
        return plain(found)

    def part(self, name: str, offset: int) -> bytes:
        """Bytes of an archive from `offset` on, none at its end. Raises `Refused`, `OSError`."""
        if not _NAME.fullmatch(name) or offset < 0:
            raise Refused("bad-request", f"{name[:100]!a} from {offset} is no part of an archive")
        try:
            with (self._home.evidence / f"{name}.tar.gz").open("rb") as file:
                file.seek(offset)
                return file.read(PART_BYTES_MAX)
        except FileNotFoundError:
            raise Refused(
                "not-found", f"there is no archive {name} on this node: never made, or gone for newer ones"
            ) from None

    def _order(self, request: OpRequest) -> Order:
        status = self._status()
        about = {"node": status.node, "boot": status.boot_id, "who": request.who}
        logs = [source.partition("?")[0].removeprefix("log:") for source in self._config.sources]
        return Order(
            id=request.id,
            folder=str(self._home.evidence.absolute()),
            sysroot=str(Path(self._config.sysroot).absolute()),
            spool=str(self._home.spool.absolute()),
            about={**about, "incident": arguments(request, _Collect).incident},
            status=plain(status),
            ranks=[self._process(rank.job, rank.rank, rank.pid, rank.state) for rank in status.ranks],
            logs=[log for log in logs if log.startswith("/")],
            t_unix_s=time.time(),
            deadline_s=max(1.0, request.deadline_s - MARGIN_S),
            bytes_max=self._room(),
        )

    def _process(self, job: str, rank: int, pid: int, state: str) -> RankProcess:
        spec = None
        with contextlib.suppress(LaunchError, OSError):
            spec = self._launches.get(job, rank)
        return RankProcess(
            job=job,
            rank=rank,
            pid=pid,
            state=state,
            argv=spec.argv if spec else [],
            env=spec.env if spec else {},
        )


async def _in_child(order: Order, deadline_s: float) -> Outcome:
    """Raises `OpFailed` where the child says nothing that can be read."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gridagent.evidence",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(deadline_s):
            said, _ = await child.communicate(msgspec.json.encode(order))
        return msgspec.json.decode(said, type=Outcome)
    except TimeoutError:
        raise OpFailed(f"the collection did not end within {deadline_s:.0f} s; nothing is kept") from None
    except msgspec.MsgspecError:
        raise OpFailed(
            f"the collection ended with status {child.returncode} and no word; see the log"
        ) from None
    finally:
        if child.returncode is None:
            child.terminate()  # it ends what it has started
