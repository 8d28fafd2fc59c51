"""What chair and members of a hand-over say to each other, and what the chair writes down.

Messages and records are frozen data; `to_wire` and `from_wire` turn them into JSON-ready dicts and
back. Who says what when is the matter of `transaction.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Final, TypeAlias

SURVIVOR: Final = "survivor"
SOURCE: Final = "source"
TARGET: Final = "target"
NO_EPOCH: Final = -1  #: epoch of a report when nobody can train on

Owners: TypeAlias = tuple[tuple[int, str], ...]  # (rank, party id) of every moved rank, by rank


class TransactionError(Exception):
    """A plan, message or record that makes no sense, or a party that is not in the plan."""


@dataclass(frozen=True, slots=True)
class Party:
    """One process of a hand-over."""

    role: str
    rank: int

    @property
    def id(self) -> str:
        """Address of this party: "role:rank"."""
        return f"{self.role}:{self.rank}"


@dataclass(frozen=True)
class Plan:
    """What is handed over, by whom, and the bounds (meaning: `wire.HandoverCut`). Raises TransactionError."""

    handover: str
    epoch_from: int
    members: tuple[Party, ...]
    arm_deadline_s: float
    cut_deadline_s: float
    resume_deadline_s: float
    lead_steps: int

    def __post_init__(self) -> None:
        old = [p.rank for p in self.members if p.role in (SURVIVOR, SOURCE)]
        if {p.role for p in self.members} != {SURVIVOR, SOURCE, TARGET}:
            raise TransactionError(f"hand-over {self.handover}: needs survivors, sources and targets only")
        if len(set(old)) != len(old) or self._ranks(SOURCE) != self._ranks(TARGET):
            raise TransactionError(f"hand-over {self.handover}: one process a rank, one target a source")
        if min(self.arm_deadline_s, self.cut_deadline_s, self.resume_deadline_s, self.lead_steps) <= 0:
            raise TransactionError(f"hand-over {self.handover}: deadlines and lead_steps must be positive")

    def _ranks(self, role: str) -> list[int]:
        return sorted(p.rank for p in self.members if p.role == role)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Role of every party id, in the plan's order."""
        return {p.id: p.role for p in self.members}

    def ids(self, *roles: str) -> frozenset[str]:
        """Party ids that have one of `roles`."""
        return frozenset(i for i, role in self.roles.items() if role in roles)

    @cached_property
    def old(self) -> frozenset[str]:
        """Members of epoch e (and of e+2 after Return)."""
        return self.ids(SURVIVOR, SOURCE)

    @cached_property
    def new(self) -> frozenset[str]:
        """Members of epoch e+1."""
        return self.ids(SURVIVOR, TARGET)

    def owners(self, role: str) -> Owners:
        """Owner record that gives every moved rank to its `role` (source or target)."""
        return tuple((rank, Party(role, rank).id) for rank in self._ranks(SOURCE))


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages; those of another hand-over are ignored."""

    handover: str


@dataclass(frozen=True, slots=True)
class Arm(Message):
    """Chair: stop before step `boundary`, and say whether that is still possible."""

    boundary: int  #: S: steps < S in epoch e, steps >= S in e+1


@dataclass(frozen=True, slots=True)
class Go(Message):
    """Chair: all have armed. Stand at S, then say AtBoundary."""


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Chair: nothing changes hands; go on in epoch e."""

    reason: str


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Chair: the owner record is durable; the sources have given their ranks away."""

    epoch: int  #: e+1
    owners: Owners


@dataclass(frozen=True, slots=True)
class Run(Message):
    """Chair: all have gathered; do step S in e+1."""


@dataclass(frozen=True, slots=True)
class Return(Message):
    """Chair: back to the old members, as epoch e+2; nobody has stepped."""

    epoch: int  #: e+2


@dataclass(frozen=True, slots=True)
class Dead(Message):
    """Committed, but a rank has nobody left to train it: end, so that the scheduler requeues the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Armed(Message):
    """Member: the stop before S stands (a target: ready to restore)."""


@dataclass(frozen=True, slots=True)
class TooLate(Message):
    """The member objects: it has begun S, has left, or its process is in no state for a hand-over."""

    why: str


@dataclass(frozen=True, slots=True)
class AtBoundary(Message):
    """Member: stands before step `boundary` and is bound to the chair's word from here on."""

    boundary: int


@dataclass(frozen=True, slots=True)
class Captured(Message):
    """Source: the state was sent; the digest of what was sent."""

    digest: str


@dataclass(frozen=True, slots=True)
class Restored(Message):
    """Target: the state was verified; the digest of what it now holds."""

    digest: str


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """Source or target: the state did not get across whole."""

    found: tuple[str, ...]  #: what capture or verification found, one line each


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """Member of e+1: the gather over `epoch` succeeded."""

    epoch: int  #: e+1


@dataclass(frozen=True, slots=True)
class NotReady(Message):
    """The gather over e+1 failed."""

    why: str


@dataclass(frozen=True, slots=True)
class Entry(Message):
    """One durable record of the chair. The first of each slot counts: abort|commit, then run|return|dead."""

    kind: str
    epoch: int  #: the epoch that trains on by this record
    boundary: int
    reason: str
    found: tuple[str, ...]
    owners: Owners


_SPEAKS: Final[dict[type[Message], tuple[str, ...]]] = {  # who may say what to the chair
    Armed: (SURVIVOR, SOURCE, TARGET),
    TooLate: (SURVIVOR, SOURCE, TARGET),
    AtBoundary: (SURVIVOR, SOURCE),
    Captured: (SOURCE,),
    Restored: (TARGET,),
    Failed: (SOURCE, TARGET),
    Ready: (SURVIVOR, TARGET),
    NotReady: (SURVIVOR, TARGET),
}
_KINDS: Final[dict[str, type[Message]]] = {
    kind.__name__: kind for kind in (*_SPEAKS, Arm, Go, Abort, Commit, Run, Return, Dead, Entry)
}


def speakers(msg: Message) -> tuple[str, ...]:
    """Roles of the members that may say `msg` to the chair."""
    return _SPEAKS.get(type(msg), ())


def _integer(value: Any) -> int:
    if type(value) is not int or not -1 <= value < 1 << 63:
        raise ValueError("not a count")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError("not text")
    return value


def _lines(value: Any) -> tuple[str, ...]:
    if type(value) is not list:
        raise ValueError("not a list")
    return tuple(_text(line) for line in value)


def _owners(value: Any) -> Owners:
    if type(value) is not dict or any(str(int(_text(rank))) != rank for rank in value):
        raise ValueError("not an object of ranks")
    return tuple(sorted((_integer(int(rank)), _text(owner)) for rank, owner in value.items()))


_READ: Final[dict[Any, Callable[[Any], Any]]] = {
    int: _integer,
    str: _text,
    tuple[str, ...]: _lines,
    Owners: _owners,
}


def to_wire(msg: Message) -> dict[str, Any]:
    """A message or record as a JSON-ready dict: its fields and "type"."""
    wire: dict[str, Any] = {"type": type(msg).__name__}
    for field in fields(msg):
        value = getattr(msg, field.name)
        if field.type == Owners:
            value = {str(rank): owner for rank, owner in value}
        wire[field.name] = list(value) if isinstance(value, tuple) else value
    return wire


def from_wire(wire: Any) -> Message:
    """The message or record that `to_wire` wrote. Raises TransactionError on anything else."""
    kind = _KINDS.get(str(wire.get("type"))) if isinstance(wire, dict) else None
    if kind is None:
        raise TransactionError("hand-over message of unknown type: the peer speaks another version")
    readers = {field.name: _READ[field.type] for field in fields(kind)}
    if wire.keys() != readers.keys() | {"type"}:
        raise TransactionError(f"hand-over message {kind.__name__}: wrong fields")
    values = {}
    for name, read in readers.items():
        try:
            values[name] = read(wire[name])
        except ValueError as error:
            raise TransactionError(f"hand-over message {kind.__name__}: {name}: {error}") from None
    msg: Message = kind(**values)
    return msg


@dataclass(frozen=True, slots=True)
class Report:
    """How a hand-over ended."""

    outcome: str  #: "commit", "abort", "returned" or "dead"
    epoch: int  #: the epoch that trains on; NO_EPOCH when dead
    boundary: int  #: S, -1 if none was set
    reason: str = ""  #: why not commit
    found: tuple[str, ...] = ()
    owners: Owners = ()  #: who owns the moved ranks now


def fold_records(entries: Iterable[Entry], epoch_from: int) -> Report:
    """What the chair's records alone say; the first of each slot counts.

    No record: nobody was ever told to commit, so epoch e is the only one. A commit without an ending:
    nobody was told Run, so no step >= S was done in any epoch and the job starts from its checkpoint.
    Raises TransactionError when an ending stands without a commit.
    """
    outcome: Entry | None = None
    ending: Entry | None = None
    for entry in entries:
        if entry.kind in ("abort", "commit"):
            outcome = outcome or entry
        elif outcome is None or outcome.kind != "commit" or entry.kind not in ("run", "return", "dead"):
            raise TransactionError(f"hand-over {entry.handover}: record {entry.kind!r} out of place")
        else:
            ending = ending or entry
    if outcome is None:
        return Report("abort", epoch_from, -1, "the chair ended before it decided anything")
    if ending is None and outcome.kind == "commit":
        reason = "the chair ended after the commit and before anybody was told to run"
        return Report("dead", NO_EPOCH, outcome.boundary, reason)
    last = ending or outcome
    name = {"abort": "abort", "run": "commit", "return": "returned", "dead": "dead"}[last.kind]
    return Report(name, last.epoch, last.boundary, last.reason, last.found, last.owners)
