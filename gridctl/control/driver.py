"""Carries out what the engine says for one run: journal first, then the agents."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Protocol

import msgspec

from gridagent.wire import OpRequest, OpStatus
from gridctl.control.devicelog import DeviceLog
from gridctl.control.evidence import World as Collecting
from gridctl.control.evidence import collect
from gridctl.control.lease import FleetLease
from gridctl.control.steplog import StepLog
from gridctl.errors import Refused
from gridctl.home import Home
from gridctl.model.evidence import Wanted
from gridctl.model.plans import Call, Plan
from gridctl.model.policy import Policy
from gridctl.ports.agents import AgentError, AgentRefused, AgentUnreachable
from gridctl.runbook.engine import RunState, advance
from gridctl.runbook.events import (
    Arm,
    Deadline,
    Drop,
    Effect,
    Event,
    Halted,
    Observe,
    Observed,
    OpEnded,
    Record,
    Send,
    Stop,
    Wanting,
    Watch,
    Watched,
)
from gridctl.runbook.references import launch_digest, launches_in, resolve
from gridctl.runbook.watch import Told, wants

RETRY_S = 0.5
#: An agent's own deadline comes first; only then is its silence a failure of the call.
SLACK_S = 5.0
#: A timer that comes so late tells of this process: it slept, and what it waits for may be at its door.
LATE_S = 1.0
#: After the job's last rank has ended its last steps may still be on their way.
LAST_STEPS_S = 3.0


class World(Collecting, Protocol):
    """What a driver needs of the controller."""

    home: Home
    lease: FleetLease
    steps: StepLog
    devices: DeviceLog
    policy: Policy


class Driver:
    """One run in hand. `drive` returns when it has ended or is held."""

    def __init__(self, world: World, run: str, plan: Plan, who: str) -> None:
        _, progress = world.ledger.runs.get(run, ("", None))
        state = RunState(run=run, plan=plan)
        self.state = state if progress is None else msgspec.structs.replace(state, progress=progress)
        self.halted: Halted | None = None  #: why this driver let go of a run that has not ended
        self._world = world
        self._who = who
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, event: Event) -> None:
        """An event from outside: an operator, or a lost lease."""
        self._events.put_nowait(event)

    async def drive(self, first: Event) -> None:
        """Runs the engine until it says `Stop`. Whatever still runs here then is cancelled."""
        event = first
        try:
            while not self._take(event):
                event = await self._events.get()
        finally:
            if self._timer:
                self._timer.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, event: Event) -> bool:
        """One turn of the engine. True: stop."""
        if isinstance(event, Halted):
            self.halted = event
        self.state, effects = advance(self.state, event)
        for effect in effects:
            if isinstance(effect, Stop):
                return True
            try:
                self._start(effect)
            except Refused as refused:  # the journal: nothing after this record may happen
                return self._take(Halted(refused.code, refused.text))
        return False

    def _start(self, effect: Effect) -> None:
        match effect:
            case Record(kind, data):
                self._world.ledger.append(kind, data)
            case Arm(token, after_s):
                self._arm(Deadline(token), after_s)
            case Send(op, call):
                task = self._spawn(self._send(op, call))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case Drop():
                for task in self._calls:
                    task.cancel()
            case Observe(after_s):
                self._spawn(self._observe(after_s))
            case Watch(steps):
                self._spawn(self._watch(steps))

    def _arm(self, deadline: Deadline, after_s: float) -> None:
        """Tells of the deadline. If this process slept meanwhile, it first hears what others have said."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + after_s

        def over() -> None:
            if loop.time() - due_s > LATE_S:
                self._arm(deadline, SLACK_S)
            else:
                self.tell(deadline)

        if self._timer:
            self._timer.cancel()
        self._timer = loop.call_at(due_s, over)

    def _spawn(self, work: Awaitable[Event]) -> asyncio.Task[None]:
        async def report() -> None:
            self.tell(await work)

        task = asyncio.create_task(report())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.tell(Halted("internal", f"the controller failed in this run: {error!r}"))

    async def _observe(self, after_s: float) -> Event:
        await asyncio.sleep(after_s)
        plan, world = self.state.plan, self._world
        nodes = await world.look({plan.node, *plan.nodes})
        return Observed(nodes, world.devices.of(plan.node), world.ledger.incidents.get(plan.incident))

    # ----------------------------------------------------------------------------------------------
    # Calls

    async def _send(self, op: str, call: Call) -> Event:
        """Makes the call until it was answered or its time is over: the id makes that safe."""
        if call.kind == "evidence.collect":
            return await self._collect(op)
        until_s = time.monotonic() + call.deadline_s + SLACK_S
        try:
            args = await self._resolved(call)
            status = await self._until_answered(op, call, args, until_s)
        except AgentRefused as error:
            if error.code == "fenced":  # somebody else steers now: neither forward nor back
                return Halted("fenced", f"{call.node}: {error.text}")
            return OpEnded(op, False, code=error.code, text=f"{call.node}: {error.text}", began=False)
        except AgentUnreachable as error:
            text = f"{call.kind} on {call.node}: {error}. The node is unknown, not failed"
            return OpEnded(op, False, code="node-unreachable", text=text)
        if status.state == "done":
            return OpEnded(op, True, value=status.value)
        code = "interrupted" if status.state == "interrupted" else "op-failed"
        text = status.error or f"it is {status.state}"
        return OpEnded(op, False, code=code, text=f"{call.kind} on {call.node}: {text}")

    async def _collect(self, op: str) -> Event:
        """Evidence of the plan's incident, as `gridctl collect` takes it: once, fetched, journaled."""
        plan, folder = self.state.plan, self._world.home.evidence
        wanted = Wanted(target=plan.incident, folder=str(folder), who=self._who)
        try:
            found = await collect(self._world, wanted)
        except Refused as error:
            text = f"no evidence could be had, so nothing was reset: {error.text}. `{plan.command}"
            return OpEnded(op, False, code=error.code, text=f"{text} --without-evidence WHY` goes without")
        return OpEnded(op, True, value={"id": found.id, "file": found.file, "sha256": found.sha256})

    async def _until_answered(self, op: str, call: Call, args: dict[str, Any], until_s: float) -> OpStatus:
        while True:
            request = OpRequest(
                id=op,
                run=self.state.run,
                fence=self._world.lease.fence,
                holder=self._world.lease.holder,
                who=self._who,
                kind=call.kind,
                job=call.job,
                args=args,
                deadline_s=call.deadline_s,
            )
            try:
                status = await self._world.agents.operate(call.url, request)
                if status.state != "accepted":
                    return status
            except AgentUnreachable:
                if time.monotonic() >= until_s:
                    raise
            except AgentRefused as error:
                # A node that comes back gets the lease with the next renewal; one that is busy with what is
                # left of an earlier run will be free.
                if (
                    error.code not in ("starting", "stopping", "no-lease", "busy")
                    or time.monotonic() >= until_s
                ):
                    raise
            await asyncio.sleep(RETRY_S)

    async def _resolved(self, call: Call) -> dict[str, Any]:
        """The call's arguments without references. Raises `AgentError`."""
        plan, launches = self.state.plan, {}
        urls = {member.node: member.url for member in plan.members}
        urls |= {move.origin: move.origin_url for move in plan.moves}
        for wanted in launches_in(call.args):
            url = urls[wanted["node"]]
            spec = await self._world.agents.launch(url, wanted["job"], wanted["rank"])
            if launch_digest(spec) != wanted["sha256"]:
                raise AgentRefused(
                    "stale-plan",
                    f"rank {wanted['rank']} of {wanted['job']} was started in another way than the plan says",
                )
            launches[wanted["sha256"]] = msgspec.to_builtins(spec)
        args: dict[str, Any] = resolve(call.args, self.state.progress.done, launches)
        return args

    # ----------------------------------------------------------------------------------------------

    async def _watch(self, steps: int) -> Event:
        """Waits for so many steps of all ranks in the new epoch, or for the end of the job, or of a rank."""
        plan, log, policy = self.state.plan, self._world.steps, self._world.policy
        ranks = sorted({member.rank for member in plan.members})
        after: dict[int, list[Any]] = {}
        complete = over = False
        lost: list[int] = []
        while not complete and not over and not lost:
            told = await self._told(plan)
            over = {rank.state for rank in told.values()} == {"finished"}
            lost = sorted(number for number, rank in told.items() if rank.state == "lost")
            with_steps = asyncio.create_task(log.changed())
            await asyncio.wait([with_steps], timeout=LAST_STEPS_S if over else 1.0)
            with_steps.cancel()
            after = log.after(plan.job, ranks, plan.epoch_to)
            complete = all(len(after[rank]) >= steps for rank in ranks)
            heard = {rank: len(after[rank]) for rank in ranks}
            self.tell(Wanting(wants(plan.members, steps, heard, told)))
        before = log.before(plan.job, ranks, plan.epoch_to, policy.band_steps)
        return Watched(before, {rank: after[rank][:steps] for rank in ranks}, [] if complete else lost)

    async def _told(self, plan: Plan) -> dict[int, Told]:
        """What agents say of the new membership's ranks, as far as they answer.

        "lost" is the agent's own word: the process is gone. A session that merely reconnects is not. While
        others stand somebody has died; a new process that did so before its first word is on no list.
        """
        try:
            nodes = await self._world.look({member.node for member in plan.members})
        except AgentError:
            return {}
        sessions = {member.session for member in plan.members if member.role != "source"}
        statuses = [node.status for node in nodes.values() if node.reachable and node.status]
        told = {
            rank.rank: Told(rank.state, rank.epoch, rank.step)
            for status in statuses
            for rank in status.ranks
            if rank.session in sessions
        }
        if any(rank.state == "standing" for rank in told.values()):
            answering = {status.node for status in statuses}
            for member in plan.members:
                if member.role == "target" and member.node in answering:
                    told.setdefault(member.rank, Told("lost", plan.epoch_to, -1))
        return told
