"""What a run is told (events) and what it wants (effects), both as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gridctl.model.fleet import Node, Sample
from gridctl.model.plans import Call
from gridctl.model.runs import Incident
from gridctl.runbook.watch import Entries


@dataclass(frozen=True)
class Started:
    """A driver takes the run in hand: for the first time, or again after it was interrupted or held.
    `accept`: a person has seen why the run was held in its watch and goes on."""

    who: str
    accept: bool = False


@dataclass(frozen=True)
class Observed:
    """The nodes of the plan, asked just now; what the devices of its node have told last; its incident."""

    nodes: Mapping[str, Node]
    samples: Mapping[str, Sample] = field(default_factory=dict)
    incident: Incident | None = None


@dataclass(frozen=True)
class OpEnded:
    """An operation ended, or its deadline has. `began` False: the agent refused it at the door."""

    op: str
    ok: bool
    value: Any = None
    code: str = ""
    text: str = ""
    began: bool = True


@dataclass(frozen=True)
class Watched:
    """Steps of the job before and after the swap."""

    before: Entries
    after: Entries
    lost: list[int] = field(default_factory=list)  #: ranks whose process is gone


@dataclass(frozen=True)
class Wanting:
    """What a watch still waits for, so that its end can say so."""

    text: str


@dataclass(frozen=True)
class Deadline:
    """The time for `token` (from `Arm`) is over."""

    token: str


@dataclass(frozen=True)
class BackAsked:
    """An operator wants everything undone. `end`: aborted or rolled-back."""

    who: str
    reason: str
    end: str


@dataclass(frozen=True)
class Halted:
    """This driver cannot go on: the journal cannot be written, or the lease is lost."""

    code: str
    text: str


Event = Started | Observed | OpEnded | Watched | Wanting | Deadline | BackAsked | Halted


@dataclass(frozen=True)
class Record:
    """Must be on the disk before any later effect of the same list starts."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Send:
    """Carry out `call` under the id `op` (idempotent: the agent answers a second time from its journal)."""

    op: str
    call: Call


@dataclass(frozen=True)
class Observe:
    """Ask the nodes of the plan for their status after this many seconds."""

    after_s: float = 0.0


@dataclass(frozen=True)
class Watch:
    """Wait until every rank has finished so many steps in the new epoch, or all have ended."""

    steps: int


@dataclass(frozen=True)
class Arm:
    """A deadline; it takes the place of the one before."""

    token: str
    after_s: float


@dataclass(frozen=True)
class Drop:
    """Nobody waits for the calls in flight any more."""


@dataclass(frozen=True)
class Stop:
    """Nothing more to do for this driver: the run has ended or is held."""


Effect = Record | Send | Observe | Watch | Arm | Drop | Stop
