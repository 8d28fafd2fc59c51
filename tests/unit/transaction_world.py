"""The world of one hand-over, and what one step does to it. `transaction_model.py` explores it.

A world is a tuple of small numbers, because millions of them are compared and kept: every machine state,
message, process and record file is stored once in a table.
"""

import copy
from dataclasses import fields, replace
from typing import Any

from gridagent.train import transaction_events as ev
from gridagent.train import transaction_messages as ms
from gridagent.train.transaction import Chair, Member
from gridagent.train.transaction_events import Phase
from gridagent.train.transaction_messages import SOURCE, SURVIVOR, TARGET, Party, Plan

STOP, BEGUN, CAPTURING, CAPTURED, RESTORING, GOOD, GATHERING, GATHERED = (1 << bit for bit in range(8))
BROKEN, CHAIR_TOLD, MEMBER_TOLD = 1, 2, 4  # state of a channel
DEAD = -1  # in place of a machine: its process is gone
BOUNDARY = 1
ANNOUNCED = {ms.Abort: "abort", ms.Commit: "commit", ms.Run: "run", ms.Return: "return", ms.Dead: "dead"}

UNREAD = {"plan", "me", "found", "_alone"}  # constant, or of influence on texts only
READ_BEFORE = {  # attributes that no decision reads once the machine's phase is that far
    Phase.GO: {"_armed"},
    Phase.PREPARED: {"_standing", "_cut_due_s"},
    Phase.DECIDED: {"_captured", "_restored", "_moved"},
    Phase.ENDING: {"_ready", "reason", "_lost"},
}

World = tuple[int, ...]  # chair, disk, excused, stale, then one process each; all but `excused` are interned
Process = tuple[
    int, tuple[int, ...], tuple[int, ...], int, int, int
]  # machine, down, up, channel, flags, epoch


class Violation(Exception):
    """An invariant does not hold; `trace` is the way there."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.trace: list[str] = []


def plan_of(survivors: int, pairs: int) -> Plan:
    """`survivors` ranks stay (the first hosts the chair), `pairs` ranks move."""
    ranks = range(survivors + pairs)
    members = [Party(SURVIVOR if rank < survivors else SOURCE, rank) for rank in ranks]
    members += [Party(TARGET, rank) for rank in ranks[survivors:]]
    return Plan("h", 0, tuple(members), 4.0, 2.0, 1.0, BOUNDARY)


def _plain(msg: ms.Message) -> ms.Message:
    """The message without its texts."""
    texts: dict[str, Any] = {f.name: "-" for f in fields(msg) if f.name in ("why", "reason")}
    if isinstance(msg, ms.Failed):
        texts["found"] = ("-",)
    return replace(msg, **texts) if texts else msg


def _identity(value: Any) -> Any:
    if isinstance(value, ms.Entry):
        return value.kind
    if isinstance(value, tuple):
        return tuple(_identity(item) for item in value)
    return value


class Table:
    """Numbers for values: equal values, equal numbers."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, key: Any, value: Any) -> int:
        number = self._numbers.setdefault(key, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Model:
    """All worlds of one plan. `chair` and `member` may be broken on purpose."""

    def __init__(
        self,
        survivors: int,
        pairs: int,
        lean: bool = True,
        chair: type[Chair] = Chair,
        member: type[Member] = Member,
    ) -> None:
        self.lean = lean
        self.plan = plan_of(survivors, pairs)
        self.parties = self.plan.members
        self.old = [i for i, p in enumerate(self.parties) if p.role != TARGET]
        self.new = [i for i, p in enumerate(self.parties) if p.role != SOURCE]
        self.index = {party.id: i for i, party in enumerate(self.parties)}
        self.source_of = {
            i: next(j for j, s in enumerate(self.parties) if (s.role, s.rank) == (SOURCE, party.rank))
            for i, party in enumerate(self.parties)
            if party.role == TARGET
        }
        self.machines, self.messages, self.processes = Table(), Table(), Table()
        self.disks, self.stales = Table(), Table()
        self.final: list[bool] = []  # by machine
        self.effects: dict[Any, tuple[int, list[ev.Effect]]] = {}
        self.folds: dict[int, ms.Report] = {}
        self.trimmed: dict[tuple[int, bool], int] = {}
        self.still: dict[int, bool] = {}
        self.doing: tuple[object, ...] = ()
        members = [self._machine(member(self.plan, party)) for party in self.parties]
        self.start: World = (
            self._machine(chair(self.plan)),
            self.disks.number((), ()),
            0,
            self.stales.number((), ()),
            *(self.processes.number(p, p) for p in ((mid, (), (), 0, 0, 0) for mid in members)),
        )

    def _machine(self, machine: Chair | Member) -> int:
        state = {name: _identity(value) for name, value in vars(machine).items() if name not in UNREAD}
        if isinstance(machine, Chair):
            state["reason"] = bool(machine.reason)
        for phase, names in READ_BEFORE.items():
            if machine.phase >= phase:
                state.update(dict.fromkeys(names & state.keys()))
        if machine.phase >= Phase.RUNNING:
            state = {"phase": machine.phase}
        me = machine.me.id if isinstance(machine, Member) else ev.CHAIR
        number = self.machines.number((me, *state.values()), machine)
        if number == len(self.final):
            self.final.append(machine.phase >= Phase.RUNNING)
        return number

    def take(self, mid: int, event: Any) -> tuple[int, list[ev.Effect]]:
        """What machine `mid` becomes and wants by `event`; every transition is computed once."""
        known = self.effects.get((mid, event))
        if known is None:
            machine = copy.copy(self.machines.values[mid])
            effects = machine.on(event, machine.deadline() if isinstance(event, ev.Tick) else 0.0)
            effects = [replace(e, msg=_plain(e.msg)) if isinstance(e, ev.Send) else e for e in effects]
            known = self.effects[mid, event] = (self._machine(machine), effects)
        return known

    def free_to_train(self, i: int, flags: int, epoch: int) -> bool:
        """May the training thread of process `i` begin its next step?"""
        return not flags & STOP and (epoch > 0 or self.parties[i].role != TARGET)

    def is_still(self, i: int, number: int) -> bool:
        """Has process `i` no move that lean exploration makes at once?"""
        if number not in self.still:
            mid, down, up, _, flags, epoch = self.processes.values[number]
            machine = self.machines.values[mid]
            self.still[number] = mid == DEAD or not (
                (i == 0 and (down or up))
                or (flags & STOP and machine.phase in (Phase.ARMED, Phase.GO))
                or (self.final[mid] and self.free_to_train(i, flags, epoch) and not flags & BEGUN)
            )
        return self.still[number]

    def trim(self, number: int, deaf: bool) -> int:
        """The process without what is under way to somebody who will never take it."""
        if (number, deaf) not in self.trimmed:
            mid, down, up, channel, flags, epoch = self.processes.values[number]
            if deaf or channel & CHAIR_TOLD:
                up, channel = (), channel | (CHAIR_TOLD if channel & BROKEN else 0)
            if mid == DEAD or self.final[mid] or channel & MEMBER_TOLD:
                down, channel = (), channel | (MEMBER_TOLD if channel & BROKEN else 0)
            if deaf and self.lean:
                flags &= STOP | BEGUN | GOOD
            lean = (mid, down, up, channel, flags, epoch)
            self.trimmed[number, deaf] = self.processes.number(lean, lean)
        return self.trimmed[number, deaf]

    def fold(self, disk: int) -> ms.Report:
        """What a reader of the record file would say."""
        if disk not in self.folds:
            self.folds[disk] = ms.fold_records(self.disks.values[disk], 0)
        return self.folds[disk]


class Step:
    """One transition under construction: a world, unpacked."""

    def __init__(self, model: Model, world: World, *label: object) -> None:
        self.model = model
        model.doing = label  # names the move should it violate something before it is complete
        self.label = label
        self.chair, self.disk, self.excused, self.stale = world[:4]
        self.ids = list(world[4:])
        self.touched: set[int] = set()

    def world(self) -> World:
        """The world after this step."""
        model = self.model
        writing = model.machines.values[self.chair]._writing if self.chair != DEAD else None
        if model.lean and writing is not None and writing.kind == "abort":
            self.append(writing).to_chair(ev.Recorded(writing))
        while model.lean and any(self._settle(i) for i in tuple(self.touched)):
            pass  # until nobody has such a move left
        deaf = self.chair == DEAD or model.final[self.chair]
        for i in range(len(self.ids)) if deaf else self.touched:
            self.ids[i] = model.trim(self.ids[i], deaf)
        return (self.chair, self.disk, self.excused, self.stale, *self.ids)

    def _settle(self, i: int) -> bool:
        """Makes one move of process `i` that lean exploration makes at once."""
        if self.model.is_still(i, self.ids[i]):
            return False
        mid, down, up, _, flags, _ = self.process(i)
        machine = self.model.machines.values[mid]
        if i == 0 and (down or up):
            self.deliver(i, self.pop(i, bool(up)), bool(up))
        elif flags & STOP and machine.phase in (Phase.ARMED, Phase.GO):
            self.reach(i)
        else:
            self.flag(i, BEGUN)
        return True

    def deliver(self, i: int, message: int, up: bool) -> "Step":
        """Hands a message over that is no longer in a queue: up to the chair or down to member `i`."""
        msg = self.model.messages.values[message]
        if up:
            return self.to_chair(ev.Received(msg, self.model.parties[i].id))
        flags = self.process(i)[4]
        return self.to_member(i, ev.Received(msg, begun=BOUNDARY if flags & BEGUN else BOUNDARY - 1))

    def pop(self, i: int, up: bool) -> int:
        """Takes the oldest message out of a queue."""
        mid, down, ups, channel, flags, epoch = self.process(i)
        rest = (
            (mid, down, ups[1:], channel, flags, epoch) if up else (mid, down[1:], ups, channel, flags, epoch)
        )
        self.put(i, rest)
        return ups[0] if up else down[0]

    def flag(self, i: int, flag: int) -> "Step":
        mid, down, ups, channel, flags, epoch = self.process(i)
        self.put(i, (mid, down, ups, channel, flags | flag, epoch))
        return self

    def reach(self, i: int) -> "Step":
        return self.to_member(i, ev.ReachedBoundary(BOUNDARY))

    def keep(self, bag: tuple[tuple[int, bool, int], ...]) -> None:
        """What copies of messages are under way."""
        self.stale = self.model.stales.number(bag, bag)

    def excuse(self) -> "Step":
        """From here on a member may have to die."""
        self.excused = 1
        return self

    def told(self, i: int, who: int) -> "Step":
        """One end of channel `i` sees that it is broken: nothing more comes out of it there."""
        mid, down, ups, channel, flags, epoch = self.process(i)
        self.put(i, (mid, down, ups, channel | who, flags, epoch))
        name = self.model.parties[i].id
        return self.to_chair(ev.Lost(name)) if who == CHAIR_TOLD else self.to_member(i, ev.Lost())

    def process(self, i: int) -> Process:
        value: Process = self.model.processes.values[self.ids[i]]
        return value

    def put(self, i: int, process: Process) -> None:
        self.ids[i] = self.model.processes.number(process, process)
        self.touched.add(i)

    def to_chair(self, event: Any) -> "Step":
        if self.chair == DEAD:
            return self
        self.chair, effects = self.model.take(self.chair, event)
        for effect in effects:
            match effect:
                case ev.Send(msg, party):
                    self._announced(msg)
                    i = self.model.index[party]
                    mid, down, up, channel, flags, epoch = self.process(i)
                    if not channel & BROKEN:
                        number = self.model.messages.number(msg, msg)
                        self.put(i, (mid, (*down, number), up, channel, flags, epoch))
                case ev.Finished(report):
                    told, kept = report, self.model.fold(self.disk)
                    if (told.outcome, told.epoch, told.owners) != (kept.outcome, kept.epoch, kept.owners):
                        raise Violation(f"the chair reports {told.outcome}, its records say {kept.outcome}")
        return self

    def _announced(self, msg: ms.Message) -> None:
        kinds = [entry.kind for entry in self.model.disks.values[self.disk]]
        kind = ANNOUNCED.get(type(msg))
        if kind is not None and kind not in kinds:
            raise Violation(f"{kind} was sent before its record was durable")
        if isinstance(msg, ms.Arm | ms.Go) and kinds:
            raise Violation(f"{type(msg).__name__} was sent after the outcome")

    def append(self, entry: ms.Entry) -> "Step":
        """The disk has it."""
        entries = (*self.model.disks.values[self.disk], entry)
        kinds = [e.kind for e in entries]
        if sum(k in ("abort", "commit") for k in kinds) > 1 or len(kinds) > 2:
            raise Violation(f"records are not write-once: {kinds}")
        self.disk = self.model.disks.number(tuple(kinds), entries)
        return self

    def to_member(self, i: int, event: Any) -> "Step":
        mid, down, up, channel, flags, epoch = self.process(i)
        if mid == DEAD:
            return self
        mid, effects = self.model.take(mid, event)
        die = False
        for effect in effects:
            match effect:
                case ev.Send(msg):
                    if not channel & BROKEN:
                        up = (*up, self.model.messages.number(msg, msg))
                case ev.Die(why):
                    die = True
                    if not self.excused:
                        raise Violation(
                            f"{self.model.parties[i].id} dies without a kill, break or stall: {why}"
                        )
                case _:
                    flags, epoch = self._act(i, effect, flags, epoch)
        self.put(i, (mid, down, up, channel, flags, epoch))
        return self.kill(i) if die else self

    def _act(self, i: int, effect: ev.Effect, flags: int, epoch: int) -> tuple[int, int]:
        """What the driver does: an effect changes what the training thread may do."""
        target = self.model.parties[i].role == TARGET
        held = bool(flags & STOP) and not flags & BEGUN
        match effect:
            case ev.StopAt(step) if step == BOUNDARY and not flags & BEGUN:
                return flags | STOP, epoch
            case ev.ContinueOld(step) if step == BOUNDARY and not target:
                return flags & ~STOP, epoch
            case ev.StartCapture() if held:
                return flags | CAPTURING, epoch
            case ev.StartRestore():
                return flags | RESTORING, epoch
            case ev.StartGather(1) if held or target:
                return flags | GATHERING, epoch
            case ev.ContinueNew(1) if flags & GOOD if target else held:
                return flags & ~STOP, 1
            case ev.ContinueReturned(2) if held and not target:
                return flags & ~STOP, 2
            case ev.Freeze() if held:
                return flags, epoch
            case ev.Discard() if epoch == 0:
                return flags & ~GOOD, epoch
        raise Violation(
            f"{self.model.parties[i].id}: {effect} at the wrong time (flags {flags:b}, epoch {epoch})"
        )

    def break_channel(self, i: int) -> "Step":
        mid, down, up, channel, flags, epoch = self.process(i)
        self.put(i, (mid, down, up, channel | BROKEN, flags, epoch))
        return self

    def kill(self, i: int) -> "Step":
        """The process ends; what it sent may still arrive. Process 0 takes the chair with it."""
        if i == 0:
            self.chair = DEAD
            for other in range(1, len(self.ids)):
                self.break_channel(other)
        _, _, up, channel, flags, epoch = self.process(i)
        self.put(i, (DEAD, (), up, channel | BROKEN, flags, epoch))
        return self
