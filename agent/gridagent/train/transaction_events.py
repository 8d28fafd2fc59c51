"""Phases, events and effects of the hand-over's two machines (`transaction.py`)."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from gridagent.train.transaction_messages import Entry, Message, Report

CHAIR: Final = "chair"  #: address of the chair's machine; members are addressed by their party id


class Phase(IntEnum):
    """Where a machine stands. The numbers are part of journals and of the crash matrix: never renumber."""

    IDLE = 0  #: nothing said yet
    ARMED = 1  #: chair: waits for votes. member: has voted; stops before S
    STANDING = 2  #: member: at S without having heard Go; may still leave
    GO = 3  #: all armed. member: on its way to S. target: restores
    PREPARED = 4  #: member: said AtBoundary (target: Restored). chair: every rank stands at S
    DECIDED = 5  #: chair: the outcome record is being written
    COMMITTED = 6  #: the commit record is durable; e+1 gathers, sources are frozen
    READY = 7  #: member: gathered in e+1, waits for Run
    ENDING = 8  #: chair: the ending record is being written
    RUNNING = 9  #: final: e+1 trains (a source stays frozen until it is released)
    ABORTED = 10  #: final: e trains on at S
    RETURNED = 11  #: final: e+2, the old members, trains on at S
    DEAD = 12  #: final: nobody can go on; the process ends so that its scheduler requeues it
    LEFT = 13  #: final, member only: went on alone in e (target: dropped its state) before it was bound


# --------------------------------------------------------------------------------------------------
# Events


@dataclass(frozen=True, slots=True)
class Start:
    """Chair: begin. `step_now`: the step that the chair's training thread is in or about to begin."""

    step_now: int


@dataclass(frozen=True, slots=True)
class Received:
    """A message came in: at the chair from `party`, at a member from the chair.

    `begun` (members with a rank): the last step that the training thread was let into. The driver must
    read it, deliver this event and carry out `StopAt` under the lock that the thread takes at a boundary.
    """

    msg: Message
    party: str = CHAIR
    begun: int = -1


@dataclass(frozen=True, slots=True)
class Lost:
    """The channel broke or the process behind it died: `party` at the chair, the chair at a member."""

    party: str = CHAIR


@dataclass(frozen=True, slots=True)
class Recorded:
    """Chair: `entry` is durable. A write that fails is never reported: the chair's process must end."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Cancel:
    """Chair: the operator wants an abort. Ignored once an outcome was decided."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; counts only when the machine's `deadline()` has been reached."""


@dataclass(frozen=True, slots=True)
class ReachedBoundary:
    """Member: the training thread is about to begin `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class CaptureDone:
    """Source: all of the state was handed to the channel; its digest."""

    digest: str


@dataclass(frozen=True, slots=True)
class CaptureFailed:
    """Source: the state could not be captured or sent."""

    why: str


@dataclass(frozen=True, slots=True)
class RestoreDone:
    """Target: the state is in place and verified; the digest of what is in place."""

    digest: str


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """Target: what verification found, one line each."""

    found: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GatherDone:
    """Member of e+1: all answered over the new groups, and with the same (epoch, S, digests)."""


@dataclass(frozen=True, slots=True)
class GatherFailed:
    """Member of e+1: the gather broke, or somebody answered otherwise."""

    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Member: its process is in no state for a hand-over (groups changed, collectives in flight)."""

    why: str


ChairEvent: TypeAlias = Start | Received | Lost | Recorded | Cancel | Tick
MemberEvent: TypeAlias = (
    Received
    | Lost
    | Tick
    | ReachedBoundary
    | CaptureDone
    | CaptureFailed
    | RestoreDone
    | RestoreFailed
    | GatherDone
    | GatherFailed
    | Refuse
)


# --------------------------------------------------------------------------------------------------
# Effects: what the driver must do, in the order given


@dataclass(frozen=True, slots=True)
class Send:
    """Send `msg` to `party`; a member only ever sends to the chair. To a lost party: nothing happens."""

    msg: Message
    party: str = CHAIR


@dataclass(frozen=True, slots=True)
class Record:
    """Chair: append `entry` and flush it to disk, then deliver `Recorded(entry)`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Finished:
    """Chair: the hand-over has ended; all messages were handed out before this."""

    report: Report


@dataclass(frozen=True, slots=True)
class StopAt:
    """The training thread must not begin step `boundary` until Continue..., or end with Die."""

    boundary: int


@dataclass(frozen=True, slots=True)
class StartCapture:
    """Source: stream the state to the target, then CaptureDone or CaptureFailed."""


@dataclass(frozen=True, slots=True)
class StartRestore:
    """Target: take the state from the source and verify it, then RestoreDone or RestoreFailed."""


@dataclass(frozen=True, slots=True)
class StartGather:
    """Gather (epoch, S, digests) over the groups of `epoch`; e's groups stay until ContinueNew."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ContinueOld:
    """Lift the stop: `boundary` and all later steps are done in epoch e."""

    boundary: int


@dataclass(frozen=True, slots=True)
class ContinueNew:
    """Do the boundary step in e+1; e's groups may go."""

    epoch: int


@dataclass(frozen=True, slots=True)
class ContinueReturned:
    """Do the boundary step in e+2: the old members over e's groups."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """Source: the rank is given away; stay blocked until released (or ContinueReturned)."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Target: drop what was restored; this process owns no rank."""

    why: str


@dataclass(frozen=True, slots=True)
class Die:
    """End the process, so that its scheduler requeues it."""

    why: str


Effect: TypeAlias = (
    Send
    | Record
    | Finished
    | StopAt
    | StartCapture
    | StartRestore
    | StartGather
    | ContinueOld
    | ContinueNew
    | ContinueReturned
    | Freeze
    | Discard
    | Die
)
