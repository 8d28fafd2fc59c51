"""A fleet as plain data, and a world that carries out what the engine says, for the runbook's tests."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gridagent.wire import (
    Blocker,
    ChairOffer,
    CutReport,
    LaunchSpec,
    NodeStatus,
    RankStatus,
    SessionReport,
    SpareStatus,
    StepEntry,
)
from gridctl.model.fleet import Node
from gridctl.model.plans import Call, Plan, Request
from gridctl.model.policy import Policy
from gridctl.runbook.engine import RunState, advance
from gridctl.runbook.events import (
    Arm,
    Deadline,
    Drop,
    Effect,
    Event,
    Observe,
    Observed,
    OpEnded,
    Record,
    Send,
    Started,
    Stop,
    Watch,
    Watched,
)
from gridctl.runbook.hot_swap import build
from gridctl.runbook.progress import Progress, fold
from gridctl.runbook.selection import select

NOW = 1_800_000_000.0
JOB = "lm"


def status(name: str, **more: Any) -> NodeStatus:
    number = int(name[1:])
    base: dict[str, Any] = {
        "node": name,
        "url": f"https://10.0.0.{number}:7000",
        "serial": f"SN{number}",
        "boot_id": f"boot{number}",
        "version": "0.1.0",
        "now_unix_s": NOW,
        "rack": "r1",
        "driver": "555",
    }
    return NodeStatus(**{**base, **more})


def rank(number: int, **more: Any) -> RankStatus:
    base: dict[str, Any] = {
        "job": JOB,
        "rank": number,
        "world_size": 3,
        "session": f"s{number}",
        "pid": 100 + number,
        "epoch": 0,
        "step": 50,
        "connected": True,
        "step_s_median": 0.1,
    }
    return RankStatus(**{**base, **more})


def spare(session: str = "spare", **more: Any) -> SpareStatus:
    base: dict[str, Any] = {"session": session, "pid": 200, "connected": True, "state": "parked"}
    base["environment"] = {}
    return SpareStatus(**{**base, **more})


def node(st: NodeStatus, **more: Any) -> Node:
    base: dict[str, Any] = {
        "name": st.node,
        "url": st.url,
        "rack": st.rack,
        "reachable": True,
        "seen_unix_s": NOW,
        "status": st,
    }
    return Node(**{**base, **more})


def fleet(**changes: dict[str, Any]) -> dict[str, Node]:
    """n1..n3 hold ranks 0..2, n4 has a spare. `changes`: node -> fields of its status."""
    base: dict[str, dict[str, Any]] = {
        "n1": {"ranks": [rank(0)]},
        "n2": {"ranks": [rank(1)]},
        "n3": {"ranks": [rank(2)]},
        "n4": {"spares": [spare()]},
    }
    return {name: node(status(name, **{**given, **changes.get(name, {})})) for name, given in base.items()}


def report(number: int, **more: Any) -> SessionReport:
    base: dict[str, Any] = {
        "role": "rank",
        "job": JOB,
        "rank": number,
        "world_size": 3,
        "epoch": 0,
        "step": 50,
        "pid": 100 + number,
        "state_bytes": {"parameters": 40_000_000, "optimizer": 20_000_000},
        "groups": ["world:0,1,2"],
        "buckets": "b1",
        "inventory": "inv",
        "facts": {"torch": "2.13.0", "threads": "1", "cpu": "avx2", "script": "c0de"},
        "environment": {},
        "step_s_median": 0.1,
    }
    return SessionReport(**{**base, **more})


def launch(number: int) -> LaunchSpec:
    return LaunchSpec(
        job=JOB, rank=number, world_size=3, argv=["python", "train.py", "--token=abc"], cwd="/x"
    )


def plan_for(nodes: Mapping[str, Node], policy: Policy | None = None, **request: Any) -> Plan:
    wanted = Request(**{"node": "n2", "who": "ann", **request})
    policy = policy or Policy()
    selection = select(wanted, nodes, policy)
    reports = [report(move.rank) for move in selection.moves]
    launches = [launch(move.rank) for move in selection.moves]
    return build(selection, reports, launches, nodes, policy, ids=("p1", "h1", "i1"), now_unix_s=NOW)


def entries(count: int, loss: float | None = 2.0, grad_norm: float | None = 1.0) -> list[StepEntry]:
    return [StepEntry(i, NOW + i, 0.1, loss, grad_norm) for i in range(count)]


@dataclass
class World:
    """Answers effects by script and keeps what a real fleet would keep.

    `script`: operation id -> what its agent does: "ok", "fail" (the effect failed), "refuse" (at the
    door), "gone" (its process has ended), "lost" (done, but nobody hears of it), "silent" (nothing happens),
    "abort" and "returned" (a cut's outcomes). Operations without an entry are "ok". The first answer stays:
    ids are idempotent.
    """

    plan: Plan
    script: dict[str, str] = field(default_factory=dict)
    journal: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    effects: list[str] = field(default_factory=list)  #: operation ids whose effect took place, in order
    answers: dict[str, OpEnded] = field(default_factory=dict)
    committed: bool = False
    returned: bool = False
    released: bool = False
    cordoned: bool = False
    crash_after: int = 10**9  #: so many records, then the driver is gone
    losses_after: float | None = 2.0
    lost_after: list[int] = field(default_factory=list)  #: ranks that end while the swap is watched
    facts: dict[str, str] = field(default_factory=dict)  #: of the warm spare, where they differ
    late: list[Blocker] = field(default_factory=list)  #: of the warm spare

    def nodes(self) -> dict[str, Node]:
        epoch = 2 if self.returned else 1 if self.committed else 0
        source: dict[str, Any] = {"epoch": epoch}
        if self.committed and not self.returned:
            source = {"epoch": 0, "state": "frozen"}
        n2: dict[str, Any] = {"ranks": [] if self.released else [rank(1, **source)]}
        if self.cordoned:
            n2 |= {"cordoned": True, "cordon_owner": "gridctl"}
        n4: dict[str, Any] = {"spares": [spare()]}
        if self.committed and not self.returned:
            n4 = {"spares": [], "ranks": [rank(1, session="spare", epoch=1)]}
        others = {name: {"ranks": [rank(i, epoch=epoch)]} for name, i in (("n1", 0), ("n3", 2))}
        return fleet(n2=n2, n4=n4, **others)

    def operate(self, op: str, call: Call) -> OpEnded:
        if op not in self.answers:
            self.answers[op] = self._first(op, call, self.script.get(op, "ok"))
        return self.answers[op]

    def _first(self, op: str, call: Call, what: str) -> OpEnded:
        if what == "refuse":
            return OpEnded(op, False, code="busy", text="refused", began=False)
        if what == "gone":
            return OpEnded(op, False, code="not-found", text="no such process", began=False)
        if what == "silent":
            return OpEnded(op, False, code="node-unreachable", text="silent")
        if call.kind == "handover.retire" and f"r1.specialise.{op.rpartition('.')[2]}" not in self.effects:
            return OpEnded(op, False, code="not-taken", text="it is parked", began=False)
        self.effects.append(op)
        if what == "fail":
            return OpEnded(op, False, code="op-failed", text="failed")
        value = self._effect(call, what)
        if what == "lost":
            return OpEnded(op, False, code="node-unreachable", text="the answer was lost")
        return OpEnded(op, True, value=value)

    def _effect(self, call: Call, what: str) -> Any:
        match call.kind:
            case "node.cordon":
                self.cordoned = True
            case "node.uncordon":
                self.cordoned = False
            case "job.describe":
                return msgspec.to_builtins(report(1))
            case "handover.specialise":
                facts = {**report(1).facts, **self.facts}
                return msgspec.to_builtins(report(1, facts=facts, blockers=self.late))
            case "handover.open":
                return msgspec.to_builtins(ChairOffer(store_host="h", store_port=1, nonce="n"))
            case "handover.release":
                self.released = True
            case "handover.cut":
                outcome = what if what in ("abort", "returned") else "commit"
                self.committed, self.returned = outcome != "abort", outcome == "returned"
                cut = CutReport(handover="h1", outcome=outcome, epoch=1, boundary_step=60, reason="because")
                return msgspec.to_builtins(cut)
        return {}

    def progress(self) -> Progress:
        """What the journal says: all that survives a crash."""
        progress = Progress()
        for kind, data in self.journal:
            progress = fold(progress, kind, data, NOW)
        return progress

    def drive(self, first: Event, late: Event | None = None, late_at: int = 0) -> RunState | None:
        """One driver's life. None: it was killed. `late` is an event that arrives after so many others."""
        state = RunState(run="r1", plan=self.plan, progress=self.progress())
        events: deque[Event] = deque([first])
        token = ""
        for turn in range(2000):
            if late is not None and turn >= late_at:
                events.appendleft(late)
                late = None
            event = events.popleft() if events else Deadline(token)
            state, effects = advance(state, event)
            for effect in effects:
                if isinstance(effect, Stop):
                    return state
                if isinstance(effect, Arm):
                    token = effect.token
                elif isinstance(effect, Record):
                    if len(self.journal) >= self.crash_after:
                        return None
                    self.journal.append((effect.kind, effect.data))
                else:
                    events.extend(self._answer(effect, late=turn > 100))
        raise AssertionError("the run does not end")

    def _answer(self, effect: Effect, *, late: bool) -> list[Event]:
        """What follows from an effect. `late`: looking again brings nothing new, so that deadlines pass."""
        match effect:
            case Drop():
                return []
            case Send(op, call):
                self._was_announced(op)
                return [self.operate(op, call)]
            case Observe(after_s):
                return [] if after_s and late else [Observed(self.nodes())]
            case Watch(steps):
                after = {r: entries(steps, self.losses_after) for r in range(3)}
                return [Watched({r: entries(20) for r in range(3)}, after, self.lost_after)]
        raise AssertionError(f"unknown effect {effect}")

    def _was_announced(self, op: str) -> None:
        """No effect without its record before it."""
        step, *rest = op.removeprefix("r1.").split(".")
        state = "undoing" if rest[0].startswith("undo") else "started"
        assert any(
            kind == "step" and data["step"] == step and data["state"] == state for kind, data in self.journal
        ), op

    def to_the_end(self) -> str:
        """Drives, and lets an operator resume or roll back what was killed or is held."""
        for _ in range(8):
            if self.progress().ended:
                break
            self.drive(Started("ann", accept=True))
        return self.progress().state
