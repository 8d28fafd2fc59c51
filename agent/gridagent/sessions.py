"""The agent's end of the Unix socket: which ranks and spares live on this node, and talking to them.

A session outlives its connection: a process that reconnects, or finds a new agent, goes on under
the same id. It counts as lost once its process is gone, or after `RECONNECT_S` without one.
"""

import asyncio
import contextlib
import os
import re
import socket
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from gridagent.errors import OpFailed, SessionLost
from gridagent.framing import Unframer, WireError, frame
from gridagent.launch import LaunchError, Launches
from gridagent.names import job_flaw
from gridagent.telemetry.spool import Spool
from gridagent.wire import (
    WIRE_VERSION,
    Answer,
    Ask,
    Command,
    Farewell,
    Hello,
    Message,
    Phase,
    Progress,
    RankStatus,
    Reply,
    SpareStatus,
    StepEntry,
)

HELLO_S = 10.0
RECONNECT_S = 10.0
SWEEP_S = 0.5
READ_BYTES = 64 << 10
#: A session's answer may come this much after the deadline that it was given.
GRACE_S = 2.0
#: Ended sessions that the status still shows.
ENDED_MAX = 64
MEDIAN_STEPS = 50
MARK_BYTES_MAX = 96
MARK = re.compile(r"[0-9]{1,20} [0-9a-f]{64}")
#: Marks of unknown sessions that the status tells.
MARKS_MAX = 32
#: What a process wrote down last is of no use to a job that has long ended.
MARK_AGE_S_MAX = 7 * 86400.0
#: Session ids become file names.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

AskHandler = Callable[["Session", Ask], Awaitable[Any]]


class Session:
    """One training process or parked spare."""

    def __init__(self, hello: Hello, pid: int) -> None:
        self.id = hello.session
        self.pid = pid
        self.writer: asyncio.StreamWriter | None = None
        self.lost_since_s = 0.0
        self.steps_s: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self.t_step_unix_s = 0.0
        self.loss: float | None = None
        self.gpus: list[int] = []
        self.digests: dict[str, str] = {}
        self.state = "parked"
        self.greet(hello)

    def greet(self, hello: Hello) -> None:
        """Takes over what the process says of itself now."""
        self.role, self.job, self.rank = hello.role, hello.job, hello.rank
        self.world_size, self.epoch, self.step = hello.world_size, hello.epoch, hello.step
        self.facts, self.environment = hello.facts, hello.environment
        self.ward = hello.ward
        self.gpus = hello.gpus or self.gpus
        if hello.role == "rank":
            self.state = hello.state or "training"

    @property
    def connected(self) -> bool:
        return self.writer is not None

    @property
    def ended(self) -> bool:
        return self.state in ("finished", "lost")

    def advance(self, entries: list[StepEntry]) -> None:
        """Takes finished steps over."""
        for entry in entries:
            self.steps_s.append(entry.step_s)
            self.step, self.t_step_unix_s = entry.step, entry.t_unix_s
            self.loss = entry.loss if entry.loss is not None else self.loss

    def as_rank(self) -> RankStatus:
        """The session as NodeStatus shows it."""
        return RankStatus(
            job=self.job,
            rank=self.rank,
            world_size=self.world_size,
            session=self.id,
            pid=self.pid,
            epoch=self.epoch,
            step=self.step,
            connected=self.connected,
            state=self.state,
            ward=self.ward,
            t_step_unix_s=self.t_step_unix_s,
            step_s_median=statistics.median(self.steps_s) if self.steps_s else 0.0,
            loss=self.loss,
            gpus=self.gpus,
            digests=self.digests,
        )

    def as_spare(self) -> SpareStatus:
        """The session as NodeStatus shows it."""
        return SpareStatus(
            session=self.id,
            pid=self.pid,
            connected=self.connected,
            state=self.state,
            facts=self.facts,
            environment=self.environment,
            gpus=self.gpus,
        )


class Sessions:
    """All sessions of the node. `on_ask` answers what a session wants of the agent; `successor`: another
    agent had this home before, whose sessions come here now."""

    def __init__(
        self, path: Path, spool: Spool, launches: Launches, on_ask: AskHandler, *, successor: bool
    ) -> None:
        self._path = path
        self._marks = path.parent / "marks"
        self._spool = spool
        self._launches = launches
        self._on_ask = on_ask
        self._server: asyncio.Server | None = None
        self._complete_at_s = time.monotonic() + RECONNECT_S if successor else 0.0
        self._by_id: dict[str, Session] = {}
        # Not from 1: a late reply to an agent that died must not answer its successor.
        self._next_id = time.time_ns()
        self._waiting: dict[int, tuple[str, str, asyncio.Future[Reply]]] = {}  #: id -> session, kind, reply
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaint = ""

    async def start(self) -> None:
        """Listens. The socket is made for its owner only. Clears away what processes of old left."""
        for mark in self._marks.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - mark.stat().st_mtime > MARK_AGE_S_MAX:
                    mark.unlink()
        mask = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        finally:
            os.umask(mask)

    async def stop(self) -> None:
        """Closes all connections; the processes go on and look for the next agent."""
        if self._server:
            self._server.close()
        for session in self._by_id.values():
            if session.writer:
                session.writer.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    @property
    def complete(self) -> bool:
        """Whether no session of an earlier agent can be on its way here any more."""
        return time.monotonic() >= self._complete_at_s

    def ranks(self) -> list[RankStatus]:
        """Ranks that live here, or ended here, by job and rank."""
        found = [
            session.as_rank() if session.connected else self._with_mark(session.as_rank())
            for session in self._by_id.values()
            if session.role == "rank"
        ]
        return sorted(found, key=lambda rank: (rank.job, rank.rank, rank.session))

    def _with_mark(self, rank: RankStatus) -> RankStatus:
        return msgspec.structs.replace(rank, mark=self._mark(rank.session))

    def marks(self) -> dict[str, str]:
        """What processes wrote down last that no agent since has met: session -> mark, the newest ones."""
        oldest_unix_s = time.time() - MARK_AGE_S_MAX
        found: list[tuple[float, str]] = []
        with contextlib.suppress(OSError), os.scandir(self._marks) as entries:
            for entry in entries:
                if entry.name in self._by_id or not NAME.fullmatch(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):  # its process ends just now
                    if (t_unix_s := entry.stat(follow_symlinks=False).st_mtime) > oldest_unix_s:
                        found.append((t_unix_s, entry.name))
        newest = [name for _, name in sorted(found, reverse=True)[:MARKS_MAX]]
        return {name: mark for name in newest if (mark := self._mark(name))}

    def _mark(self, session: str) -> str:
        """What a process wrote down last, see `train/fingerprint.py`; "": nothing, or nothing of the kind."""
        try:
            with open(self._marks / session, "rb", opener=_open_at_once) as file:
                mark = file.read(MARK_BYTES_MAX).decode("ascii", errors="replace").strip()
        except OSError:
            return ""
        return mark if MARK.fullmatch(mark) else ""

    def spares(self) -> list[SpareStatus]:
        """Spares whose process lives."""
        found = [s.as_spare() for s in self._by_id.values() if s.role == "spare" and not s.ended]
        return sorted(found, key=lambda spare: spare.session)

    def get(self, session: str) -> Session:
        """A session that has not ended. Raises `SessionLost`."""
        found = self._by_id.get(session)
        if found is None or found.ended:
            raise SessionLost(f"session {session} does not live on this node; look at the node's status")
        return found

    def parked_by(self, pid: int) -> Session | None:
        """The spare that this process announced."""
        found = (s for s in self._by_id.values() if s.pid == pid and s.role == "spare" and not s.ended)
        return next(found, None)

    async def command(self, session: str, kind: str, args: dict[str, Any], deadline_s: float) -> Any:
        """Asks a session to do something and returns the value of its reply.

        Raises `SessionLost` if its process ends first, `OpFailed` if it refuses, fails or is silent.
        """
        target = self.get(session)
        self._next_id += 1
        command = Command(id=self._next_id, kind=kind, args=args, deadline_s=deadline_s)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[command.id] = (session, kind, future)
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                while target.writer is None and not future.done():  # on its way back, or lost by the sweep
                    await asyncio.wait([future], timeout=SWEEP_S / 5)
                if target.writer and not future.done():
                    await _send(target.writer, command)
                reply = await future
        except ConnectionError:
            raise OpFailed(f"the connection to session {session} broke as it was told to {kind}") from None
        except TimeoutError:
            raise OpFailed(f"session {session} did not answer {kind} within {deadline_s:.1f} s") from None
        finally:
            del self._waiting[command.id]
        if not reply.ok:
            raise OpFailed(reply.error or f"session {session} failed at {kind} and gave no reason")
        try:
            return _builtin(reply.value)
        except WireError as error:
            raise OpFailed(f"session {session} answered {kind} with {error}") from None

    async def sweep(self) -> None:
        """Calls disconnected sessions lost once that is certain. Runs until it is cancelled."""
        while True:
            now_s = time.monotonic()
            for session in list(self._by_id.values()):
                if session.connected or session.ended:
                    continue
                if not _alive(session.pid):
                    self._end(session, "lost", "its process is gone")
                elif now_s - session.lost_since_s > RECONNECT_S:
                    self._end(session, "lost", f"disconnected for {RECONNECT_S:.0f} s")
            await asyncio.sleep(SWEEP_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session: Session | None = None
        try:
            pid, uid = _peer(writer)
            if uid not in (0, os.getuid()):
                raise WireError(f"a process of user {uid} may not be a session of this agent")
            unframer = Unframer(at_agent=True)
            async with asyncio.timeout(HELLO_S) as patience:
                while data := await reader.read(READ_BYTES):
                    for message in unframer.feed(data):
                        session = self._admit(session, message, pid, writer)
                        patience.reschedule(None)
                        self._take(session, message)
        except TimeoutError:
            _complain("a process connected and did not say who it is")
        except WireError as error:
            self._closed(f"a session's connection was closed: {error}")
        except ConnectionError:
            pass  # the same as an end of the stream
        finally:
            if session and session.writer is writer:
                session.writer, session.lost_since_s = None, time.monotonic()
            writer.close()

    def _closed(self, why: str) -> None:
        """Complains, but not again and again of a process that tries again and again."""
        if why != self._complaint:
            self._complaint = why
            _complain(why)

    def _admit(
        self, session: Session | None, message: Message, pid: int, writer: asyncio.StreamWriter
    ) -> Session:
        """The session that speaks on this connection. Raises `WireError` for a stranger."""
        if not isinstance(message, Hello):
            if session is None:
                raise WireError(f"the first message was no Hello but {type(message).__name__}")
            return session
        if message.wire != WIRE_VERSION:
            raise WireError(f"process {pid} speaks wire version {message.wire}, this agent {WIRE_VERSION}")
        known = self._by_id.get(message.session)
        if message.role not in ("rank", "spare") or (session and session is not known):
            raise WireError(f"process {pid} changed its session or has the unknown role {message.role!r}")
        if not NAME.fullmatch(message.session):
            raise WireError(f"process {pid} names its session {message.session!r}")
        if message.role == "rank":
            _check_job(message.job, pid)
        if known and known.pid != pid:
            raise WireError(f"process {pid} claims the session of process {known.pid}")
        return self._greet(known, message, pid, writer)

    def _greet(self, known: Session | None, hello: Hello, pid: int, writer: asyncio.StreamWriter) -> Session:
        if known is None or known.ended:
            session = self._by_id[hello.session] = Session(hello, pid)
            session.gpus = session.gpus or (known.gpus if known else [])
            if session.role == "spare" and self._launches.promised(session.id):
                session.state = "specialising"  # an earlier agent gave it a rank
            self._forget_ended()
        else:
            session = known
            session.greet(hello)
        if session.writer and session.writer is not writer:
            session.writer.close()
        session.writer = writer
        self._spool.append("session", {"event": "hello", **_who(session)})
        if session.role == "rank":
            self._settle_launch(session)
        return session

    def _take(self, session: Session, message: Message) -> None:
        match message:
            case Progress():
                self._progress(session, message)
            case Phase():
                detail = {"handover": message.handover, "phase": message.phase}
                detail["detail"] = _builtin(message.detail)
                self._spool.append("phase", {**_who(session), **detail}, message.t_unix_s)
            case Reply():
                waiting = self._waiting.get(message.id)
                if waiting and waiting[0] == session.id and not waiting[2].done():
                    waiting[2].set_result(message)
            case Ask():
                task = asyncio.ensure_future(self._answer(session, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Farewell():
                self._farewell(session, message)

    def _progress(self, session: Session, message: Progress) -> None:
        _check_job(message.job, session.pid)
        if session.role == "spare":  # it has taken over a rank
            session.role, session.state = "rank", "training"
        moved = (session.job, session.rank) != (message.job, message.rank)
        session.job, session.rank = message.job, message.rank
        session.epoch = max(session.epoch, message.epoch)  # steps of an epoch before may come after a hello
        session.advance(message.entries)
        if moved:
            self._settle_launch(session)
        for entry in message.entries:
            values = {
                "job": message.job,
                "rank": message.rank,
                "epoch": message.epoch,
                "step": entry.step,
                "loss": entry.loss,
                "step_s": entry.step_s,
                "grad_norm": entry.grad_norm,
            }
            self._spool.append("progress", values, entry.t_unix_s)

    def _settle_launch(self, session: Session) -> None:
        """From now on this node knows how its rank was started, also one that came as a spare."""
        try:
            spec = self._launches.take(session.id, session.gpus) or self._launches.get(
                session.job, session.rank
            )
        except (LaunchError, OSError) as error:
            _complain(f"the launch of rank {session.rank} is not registered: {error}")
            return
        if spec:
            session.gpus = session.gpus or spec.gpus
            session.world_size = session.world_size or spec.world_size

    def _farewell(self, session: Session, message: Farewell) -> None:
        session.epoch, session.digests = message.epoch or session.epoch, message.digests
        session.step = message.step or session.step
        self._end(session, "lost" if message.reason == "failed" else "finished", message.reason)
        if message.reason in ("released", "retired"):  # it holds no rank any more
            self._by_id.pop(session.id, None)

    def _end(self, session: Session, state: str, reason: str) -> None:
        session.state = state
        event = {"event": state, "reason": reason, "step": session.step, "digests": session.digests}
        self._spool.append("session", {**_who(session), **event})
        try:
            if state == "finished" or not _alive(session.pid):  # else it may come back with its rank
                self._launches.forget(session.id)
            if reason == "released":
                self._launches.drop(session.job, session.rank)
        except (LaunchError, OSError) as error:
            _complain(f"the launch of {session.job} rank {session.rank} stays registered: {error}")
        for command, (owner, kind, future) in self._waiting.items():
            if owner != session.id or future.done():
                continue
            if (kind, reason) in (("release", "released"), ("retire", "retired")):
                future.set_result(Reply(id=command, ok=True, value={}))  # it went before it could say so
            else:
                future.set_exception(SessionLost(f"session {session.id} ended: {reason}"))

    def _forget_ended(self) -> None:
        ended = [session for session in self._by_id.values() if session.ended]
        for session in ended[: max(len(ended) - ENDED_MAX, 0)]:
            del self._by_id[session.id]

    async def _answer(self, session: Session, ask: Ask) -> None:
        try:
            answer = Answer(id=ask.id, ok=True, value=await self._on_ask(session, ask))
        except OpFailed as error:
            answer = Answer(id=ask.id, ok=False, error=str(error))
        if session.writer:
            with contextlib.suppress(ConnectionError):  # then it asks again, or is gone
                await _send(session.writer, answer)


def _open_at_once(path: str, flags: int) -> int:
    """No pipe that somebody put there holds the agent up."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_job(job: str, pid: int) -> None:
    if why := job_flaw(job):
        raise WireError(f"process {pid} trains without this agent: {why}")


def _builtin(value: Any) -> Any:
    """A value that a session made up, as JSON can hold it. Raises `WireError`."""
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"something that is no plain value: {error}") from None


def _who(session: Session) -> dict[str, Any]:
    keys = ("role", "job", "rank", "epoch", "pid")
    return {"session": session.id, **{key: getattr(session, key) for key in keys}}


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(frame(message))
    await writer.drain()


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """(pid, uid) of the process at the other end, as the kernel says."""
    connection: socket.socket = writer.get_extra_info("socket")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


def _alive(pid: int) -> bool:
    """Whether the process runs; one that waits for its parent's attention does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _complain(text: str) -> None:
    print(f"gridagent: {ascii(text)[1:-1]}", file=sys.stderr, flush=True)
