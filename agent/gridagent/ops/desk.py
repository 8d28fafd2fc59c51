"""Takes operations in: checks, journal, effect, journal. Runs on one event loop, which orders everything."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from gridagent.errors import OpFailed, Refused
from gridagent.lease import Lease
from gridagent.ops import Effect
from gridagent.ops.freeze import Freezes
from gridagent.ops.log import Entry, OpLog, args_digest
from gridagent.telemetry.spool import Spool
from gridagent.wire import OpRequest, OpStatus

#: A run that does nothing on this node for so long has lost it.
HOLD_S = 900.0
DEADLINE_S_MAX = 3600.0
#: An effect may end this much after its deadline, so that it can say itself what was late.
GRACE_S = 5.0

#: So many runs that have let go of the node are remembered: late calls of theirs are refused.
RUNS_OVER = 256
#: After these a run has let go of the node.
ENDS_RUN = frozenset({"handover.release", "handover.retire", "handover.abort", "run.end"})
#: These only look: without a lease, beside a run, and while frozen.
READ_ONLY = frozenset({"job.describe", "evidence.collect"})


class Hold:
    """The run that has the node: from its first hand-over operation until it lets go or falls silent."""

    def __init__(self) -> None:
        self.run = ""
        self._until_s = 0.0
        self._over: deque[str] = deque(maxlen=RUNS_OVER)  #: runs that have let go for good

    def see(self, entry: Entry, age_s: float = 0.0, *, again: bool = False) -> None:
        """Takes an operation into account when it is accepted and `again` when it has ended.

        One that ends after its run let go of the node (a join that outlives the abort) does not take
        the node back.
        """
        kind, run = entry.request.kind, entry.request.run
        if kind == "run.end" and entry.status.state == "done":
            self._over.append(run)
        if again and self.run != run:
            return
        if kind in ENDS_RUN:
            if entry.status.state == "done" and self.run == run:
                self.run = ""
        elif kind.startswith("handover.") or kind == "node.reset":
            self.run = run
            self._until_s = time.monotonic() + HOLD_S - age_s

    def check(self, request: OpRequest, running: Iterable[Entry]) -> None:
        """Raises `Refused` if another run has the node, or this one has let go of it.

        A call that was on its way when its run was turned back must not take the node once more.
        """
        if request.kind == "run.end":
            return
        if (
            request.run in self._over
            and (request.kind.startswith("handover.") or request.kind == "node.reset")
            and request.kind not in ENDS_RUN
        ):
            raise Refused("run-over", f"run {request.run} has let go of this node; make a new plan")
        others = [e for e in running if e.request.run != request.run and e.request.kind not in READ_ONLY]
        held = self.run if time.monotonic() < self._until_s else ""
        if others or held not in ("", request.run):
            run = others[0].request.run if others else held
            raise Refused(
                "busy", f"run {run} has this node; wait for its end, abort it, or end it with run.end"
            )


class RunEnd:
    """run.end: the run lets go of the node."""

    def check(self, request: OpRequest) -> None:
        """Always possible."""

    async def run(self, request: OpRequest) -> Any:
        """Nothing to do: that it is done is what counts (`Hold.see`)."""
        return {}


class Desk:
    """The node's operations. `effects` maps every kind to what carries it out."""

    def __init__(
        self,
        log: OpLog,
        lease: Lease,
        freezes: Freezes,
        spool: Spool,
        effects: dict[str, Effect],
        *,
        allow_damage: bool,
    ) -> None:
        self._log, self._lease, self._freezes, self._spool = log, lease, freezes, spool
        self._effects = {**effects, "run.end": RunEnd()}
        self._allow_damage = allow_damage
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._hold = Hold()
        self._stopping = False
        now_unix_s = time.time()
        for entry in log.entries.values():
            last_unix_s = max(entry.status.t_unix_s, entry.t_end_unix_s)
            self._hold.see(entry, max(0.0, now_unix_s - last_unix_s))  # the clock may have been set back

    @property
    def running(self) -> str:
        """The id of an operation that runs now, or ""."""
        return next(iter(self._tasks), "")

    async def submit(self, request: OpRequest, actor: str, jobs: set[str]) -> OpStatus:
        """Carries the operation out, or joins the one with this id, and returns how it ended.

        `jobs` are all jobs that it touches. Raises `Refused`; then nothing happened.
        """
        known = self._log.entries.get(request.id)
        if known:
            first = (known.request.kind, known.request.run, known.sha256)
            if first != (request.kind, request.run, args_digest(request)):
                raise Refused(
                    "bad-request", f"the id {request.id} was used for another operation; make a new one"
                )
            return await self.wait(request.id, DEADLINE_S_MAX)
        self._check(request, jobs)
        entry = self._log.accept(request, actor)
        self._hold.see(entry)
        self._tell(entry, actor)
        self._tasks[request.id] = asyncio.ensure_future(self._carry_out(entry, actor))
        return await self.wait(request.id, DEADLINE_S_MAX)

    async def wait(self, op: str, wait_s: float) -> OpStatus:
        """The state of an operation, once it has ended or `wait_s` is over. Raises `Refused`."""
        entry = self._log.entries.get(op)
        if entry is None:
            raise Refused("not-found", f"no operation {op!a} was ever accepted here")
        task = self._tasks.get(op)
        if task:
            await asyncio.wait([task], timeout=wait_s)
        return entry.status

    async def stop(self, patience_s: float) -> None:
        """Accepts nothing more and lets what runs come to its end for a while."""
        self._stopping = True
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=patience_s)

    def _check(self, request: OpRequest, jobs: set[str]) -> None:
        effect = self._effects.get(request.kind)
        if self._stopping:
            raise Refused("stopping", "this agent is ending; try again when it is back")
        if effect is None:
            raise Refused("unknown-op", f"{request.kind!a} is no operation of this agent's version")
        if not (request.id and request.run):
            raise Refused("bad-request", "an operation needs an id and a run")
        if not 0 < request.deadline_s <= DEADLINE_S_MAX or math.isnan(request.deadline_s):
            raise Refused("bad-request", f"deadline_s must lie between 0 and {DEADLINE_S_MAX:.0f}")
        if request.args.get("damage") and not self._allow_damage:
            raise Refused("forbidden", "damage is for drills: this agent was not started with --allow-damage")
        if request.kind not in READ_ONLY:
            self._lease.check(request.holder, request.fence)
            self._freezes.check(request.kind, jobs)
            self._hold.check(request, [self._log.entries[op] for op in self._tasks])
        effect.check(request)

    async def _carry_out(self, entry: Entry, actor: str) -> None:
        request = entry.request
        value: Any = None
        error = ""
        try:
            async with asyncio.timeout(request.deadline_s + GRACE_S):
                value = await self._effects[request.kind].run(request)
        except TimeoutError:
            error = f"{request.kind} did not end within {request.deadline_s:.1f} s"
        except (OpFailed, OSError) as failure:
            error = str(failure) or type(failure).__name__
        except Exception as failure:
            error = f"{request.kind} failed inside the agent: {failure!r}; please report it"
        self._log.end(entry, actor, error=error, value=value)
        self._hold.see(entry, again=True)
        self._tell(entry, actor)
        del self._tasks[request.id]

    def _tell(self, entry: Entry, actor: str) -> None:
        request, status = entry.request, entry.status
        about = {"id": request.id, "kind": request.kind, "run": request.run, "job": request.job}
        self._spool.append("op", {**about, "state": status.state, "error": status.error, "actor": actor})
