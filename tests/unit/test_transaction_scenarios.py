"""Hand-overs as text: tests/scenarios/transaction/*.txt hold commands and every effect that they must have.

A block is one or more commands, a line `----` and the effects, up to an empty line. After a change that is
meant, `GRIDCTL_UPDATE_SCENARIOS=1 pytest tests/unit/test_transaction_scenarios.py` writes the effects anew;
read the difference before you commit it. Commands (PARTY is role:rank):

    plan SURVIVORS PAIRS        deadlines 20 s (arm), 10 s (cut), 5 s (resume), lead 3 steps
    start STEP                  the chair begins
    to PARTY | from PARTY       one message arrives
    deliver                     every message under way arrives, and what it causes, until all is quiet
    durable                     the chair's pending record is on disk
    time S                      the clock says S seconds
    tick chair | tick PARTY     the clock moves on to that deadline
    cancel REASON               the operator wants an abort
    kill PARTY                  the process dies and its channel with it
    cut PARTY                   the channel breaks, both ends see it
    PARTY reaches STEP          also: began STEP, captured DIGEST, capture-failed WHY, restored DIGEST,
                                restore-failed LINE, gathered, gather-failed WHY, refuses WHY
    fold                        what the records alone say
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from gridagent.train import transaction_events as ev
from gridagent.train.transaction import Chair, Member
from gridagent.train.transaction_events import CHAIR, ChairEvent, Effect, MemberEvent
from gridagent.train.transaction_messages import (
    SOURCE,
    SURVIVOR,
    TARGET,
    Entry,
    Message,
    Party,
    Plan,
    fold_records,
    from_wire,
    to_wire,
)

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios" / "transaction").glob("*.txt"))

REPORTS: dict[str, Callable[[str], MemberEvent]] = {
    "reaches": lambda step: ev.ReachedBoundary(int(step)),
    "captured": ev.CaptureDone,
    "capture-failed": ev.CaptureFailed,
    "restored": ev.RestoreDone,
    "restore-failed": lambda line: ev.RestoreFailed((line,)),
    "gathered": lambda _: ev.GatherDone(),
    "gather-failed": ev.GatherFailed,
    "refuses": ev.Refuse,
}


def shown(value: object) -> str:
    """An effect or message without what is the same everywhere."""
    if isinstance(value, ev.Send):
        return f"send {value.party} {shown(value.msg)}"
    if not is_dataclass(value):
        return repr(value)
    parts = [f"{f.name}={shown(getattr(value, f.name))}" for f in fields(value) if f.name != "handover"]
    return f"{type(value).__name__}({', '.join(parts)})"


class Stage:
    """Machines, queues and a clock, driven by commands; every effect becomes a line."""

    def __init__(self, survivors: int, pairs: int) -> None:
        ranks = range(survivors + pairs)
        members = [Party(SURVIVOR if rank < survivors else SOURCE, rank) for rank in ranks]
        members += [Party(TARGET, rank) for rank in ranks[survivors:]]
        self.plan = Plan("h1", 4, tuple(members), 20.0, 10.0, 5.0, 3)
        self.chair: Chair | None = Chair(self.plan)
        self.members = {party.id: Member(self.plan, party) for party in members}
        self.begun = dict.fromkeys(self.members, 9)
        self.down: dict[str, list[Message]] = {name: [] for name in self.members}
        self.up: dict[str, list[Message]] = {name: [] for name in self.members}
        self.broken: set[str] = set()
        self.writing: list[Entry] = []
        self.disk: list[Entry] = []
        self.now_s = 0.0
        self.lines: list[str] = []

    def command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word in self.members:
            self._report(word, *rest.partition(" ")[::2])
        else:
            handlers: dict[str, Callable[[str], None]] = {
                "start": lambda step: self._chair(ev.Start(int(step))),
                "to": self._to,
                "from": self._from,
                "deliver": lambda _: self._deliver(),
                "durable": lambda _: self._durable(),
                "time": self._time,
                "tick": self._tick,
                "cancel": lambda reason: self._chair(ev.Cancel(reason)),
                "kill": self._kill,
                "cut": self._cut,
                "fold": lambda _: self.lines.append(f"records: {shown(fold_records(self.disk, 4))}"),
            }
            handlers[word](rest)

    def _chair(self, event: ChairEvent) -> None:
        if self.chair is None:
            return
        effects = self.chair.on(event, self.now_s)
        self._note(CHAIR, self.chair.phase, effects)
        for effect in effects:
            if isinstance(effect, ev.Send) and effect.party not in self.broken:
                self.down[effect.party].append(effect.msg)
            elif isinstance(effect, ev.Record):
                self.writing.append(effect.entry)

    def _member(self, name: str, event: MemberEvent) -> None:
        effects = self.members[name].on(event, self.now_s)
        self._note(name, self.members[name].phase, effects)
        sends = [effect.msg for effect in effects if isinstance(effect, ev.Send)]
        self.up[name] += [] if name in self.broken else sends
        if any(isinstance(effect, ev.Die) for effect in effects):
            self._kill(name)

    def _note(self, name: str, phase: ev.Phase, effects: list[Effect]) -> None:
        self.lines += [f"{name} {phase.name}: {shown(effect)}" for effect in effects]
        if not effects:
            self.lines.append(f"{name} {phase.name}: -")

    def _report(self, name: str, kind: str, detail: str) -> None:
        if kind == "began":
            self.begun[name] = int(detail)
        else:
            self._member(name, REPORTS[kind](detail))

    def _to(self, name: str) -> None:
        msg = from_wire(to_wire(self.down[name].pop(0)))
        self._member(name, ev.Received(msg, begun=self.begun[name]))

    def _from(self, name: str) -> None:
        self._chair(ev.Received(from_wire(to_wire(self.up[name].pop(0))), name))

    def _deliver(self) -> None:
        while any(self.down.values()) or any(self.up.values()):
            for name in self.members:
                for queue, take in ((self.down, self._to), (self.up, self._from)):
                    while queue[name]:
                        take(name)

    def _durable(self) -> None:
        self.disk.append(self.writing.pop(0))
        self._chair(ev.Recorded(self.disk[-1]))

    def _time(self, now_s: str) -> None:
        self.now_s = float(now_s)

    def _tick(self, name: str) -> None:
        machine = self.chair if name == CHAIR else self.members[name]
        due_s = machine.deadline() if machine else None
        assert due_s is not None, f"{name} waits for nothing"
        self.now_s = max(self.now_s, due_s)
        self.lines.append(f"clock: {self.now_s:g} s")
        if name == CHAIR:
            self._chair(ev.Tick())
        else:
            self._member(name, ev.Tick())

    def _kill(self, name: str) -> None:
        if name == self.plan.members[0].id:
            self.chair = None
            for other in self.members:
                if other != name:
                    self._break(other)
                    self._member(other, ev.Lost())
        self._break(name)
        self._chair(ev.Lost(name))

    def _cut(self, name: str) -> None:
        self._break(name)
        self._member(name, ev.Lost())
        self._chair(ev.Lost(name))

    def _break(self, name: str) -> None:
        self.broken.add(name)
        self.down[name].clear()
        self.up[name].clear()


def blocks(text: str) -> Iterator[str]:
    """The same text with the effects that the commands have now."""
    stage: Stage | None = None
    for block in text.strip().split("\n\n"):
        commands = block.partition("\n----")[0].splitlines()
        if all(line.startswith("#") for line in commands):
            yield block
            continue
        for line in commands:
            word, _, rest = line.partition(" ")
            if word == "plan":
                survivors, pairs = map(int, rest.split())
                stage = Stage(survivors, pairs)
            elif not line.startswith("#"):
                assert stage is not None, "a scenario begins with its plan"
                stage.command(line)
        assert stage is not None, "a scenario begins with its plan"
        yield "\n".join([*commands, "----", *stage.lines])
        stage.lines = []


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    now = "\n\n".join(blocks(text)) + "\n"
    if os.environ.get("GRIDCTL_UPDATE_SCENARIOS") == "1":
        path.write_text(now, encoding="utf-8")
    assert now == path.read_text(encoding="utf-8")


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 7
