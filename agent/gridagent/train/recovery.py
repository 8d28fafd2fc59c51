"""A hand-over in a job that stands: what differs from one in a job that trains.

A rank died, or a connection broke, and all who live stand in the step that this has spoilt (`attempt.py`).
For a dead rank one of them, the deputy, speaks: it has the rank's parameters and optimizer in its own
replica and the small rest in its memory (`deputy.py`). In the transaction a deputy is the source; that it
shares a process with a survivor changes nothing there. The boundary is the step in which all stand, or
come to stand here.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.distributed import Store

from gridagent import wire
from gridagent.train.errors import HandoverError
from gridagent.train.rendezvous import await_keys

if TYPE_CHECKING:
    from gridagent.train.session import Session


def deputies(me: wire.Member, members: list[wire.Member]) -> list[wire.Member]:
    """The sources that this process speaks for, besides what it is itself."""
    spoken_for = [member for member in members if member.role == "source" and member.session == me.session]
    return spoken_for if me.role == "survivor" else []


def standing_ranks(members: list[wire.Member]) -> list[int]:
    """The ranks that have a process: survivors, and sources that speak for themselves."""
    survivors = {member.session for member in members if member.role == "survivor"}
    return [
        member.rank
        for member in members
        if member.role == "survivor" or (member.role == "source" and member.session not in survivors)
    ]


def align(session: "Session", store: Store, ranks: list[int], trouble: Callable[[], str]) -> int:
    """All `ranks` come to stand before one step; returns it. Blocks until all have said where they are.

    Whoever has applied a step had the gradients of all: then all have entered its vote, and those that do
    not know yet that it succeeded apply it too. Raises `HandoverError` where that does not hold, and as
    soon as `trouble` returns a reason.
    """
    attempts = session.attempts
    if not attempts.void and not session.standing:
        raise HandoverError(f"rank {session.rank} does not stand: nothing is to be recovered here")
    step, entered = session.step, attempts.void and attempts.entered
    store.set(f"stand/{session.rank}", f"{step} {int(entered)}")
    await_keys(store, [f"stand/{rank}" for rank in ranks], trouble)
    told = {rank: store.get(f"stand/{rank}").decode().split() for rank in ranks}
    boundary = max(int(at) for at, _ in told.values())
    behind = {rank: at for rank, (at, entered) in told.items() if int(at) < boundary}
    for rank in behind:
        at, had_entered = told[rank]
        if int(at) < boundary - 1 or had_entered != "1":
            raise HandoverError(
                f"rank {rank} stands before step {at} and another one before step {boundary}: no vote can"
                " have led there, the job must be requeued"
            )
    if session.rank in behind:
        with session.lock:
            session.stop_at = boundary
            session.attention = True
        attempts.apply()
    return boundary
