"""The hand-over of ranks as a pure state machine: events and the time in, effects out.

Nothing here reads a clock, touches a file or a socket, or starts a thread; `handover.py` carries out
what these machines say. Two machines: one `Chair` (the arbiter, in the process of one survivor) and
one `Member` in every process of the hand-over, the chair's process included. Their words are in
`transaction_events.py` (phases, events, effects) and
`transaction_messages.py` (plan, messages, records).

The rules:

* All must have armed before Go, and Go and Abort exclude each other.
* A member that has said AtBoundary is *prepared*: only the chair's word lets it train again.
  Before that it may leave (go on alone in the old epoch), and after leaving it never says AtBoundary.
* Outcome (abort or commit) and, after a commit, ending (run, return or dead) are write-once records
  that are durable before anybody is told.
* After Commit a source trains again only in epoch e+2 (Return).

A member's hard deadlines are the chair's own bound plus one `resume_deadline_s` of slack, so a member
ends itself only if its chair is gone or stalled. Every attribute of a machine is immutable: a shallow
copy is a snapshot (tests/unit/transaction_model.py explores all interleavings that way).
"""

from gridagent.train.transaction_events import (
    Cancel,
    CaptureDone,
    CaptureFailed,
    ChairEvent,
    ContinueNew,
    ContinueOld,
    ContinueReturned,
    Die,
    Discard,
    Effect,
    Finished,
    Freeze,
    GatherDone,
    GatherFailed,
    Lost,
    MemberEvent,
    Phase,
    ReachedBoundary,
    Received,
    Record,
    Recorded,
    Refuse,
    RestoreDone,
    RestoreFailed,
    Send,
    Start,
    StartCapture,
    StartGather,
    StartRestore,
    StopAt,
    Tick,
)
from gridagent.train.transaction_messages import (
    SOURCE,
    SURVIVOR,
    TARGET,
    Abort,
    Arm,
    Armed,
    AtBoundary,
    Captured,
    Commit,
    Dead,
    Entry,
    Failed,
    Go,
    Message,
    NotReady,
    Party,
    Plan,
    Ready,
    Restored,
    Return,
    Run,
    TooLate,
    TransactionError,
    fold_records,
    speakers,
)

# --------------------------------------------------------------------------------------------------
# The chair


class Chair:
    """The arbiter of one hand-over. All times are seconds of one monotonic clock, given with each event."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.phase = Phase.IDLE
        self.boundary = -1
        self.reason = ""  # the first trouble, which is why there is no commit or no run
        self.found: tuple[str, ...] = ()
        self._armed: frozenset[str] = frozenset()
        self._standing: frozenset[str] = frozenset()
        self._ready: frozenset[str] = frozenset()
        self._lost: frozenset[str] = frozenset()
        self._captured: frozenset[tuple[int, str]] = frozenset()  # (rank, digest)
        self._restored: frozenset[tuple[int, str]] = frozenset()
        self._entries: tuple[Entry, ...] = ()  # durable
        self._writing: Entry | None = None
        self._due_s: float | None = None
        self._cut_due_s: float | None = None

    def deadline(self) -> float | None:
        """When Tick must be delivered next; None: nothing to wait for."""
        return self._due_s

    def on(self, event: ChairEvent, now_s: float) -> list[Effect]:
        """Take one event. Raises TransactionError for a party that is not in the plan."""
        if isinstance(event, Received | Lost) and event.party not in self.plan.roles:
            raise TransactionError(f"hand-over {self.plan.handover}: no party {event.party!r}")
        if self.phase >= Phase.RUNNING:
            return []
        match event:
            case Start(step_now) if self.phase == Phase.IDLE:
                self.phase = Phase.ARMED
                self.boundary = step_now + self.plan.lead_steps
                self._due_s = now_s + self.plan.arm_deadline_s
                return self._tell(Arm(self.plan.handover, self.boundary))
            case Received(msg, party) if msg.handover == self.plan.handover:
                return self._heard(party, msg, now_s)
            case Lost(party):
                return self._lose(party)
            case Recorded(entry) if entry == self._writing:
                return self._recorded(entry, now_s)
            case Cancel(reason) if self.phase < Phase.DECIDED:
                return self._trouble(f"cancelled: {reason}")
            case Tick() if self._due_s is not None and now_s >= self._due_s:
                return self._trouble(f"deadline passed in phase {self.phase.name}")
        return []

    def _tell(self, msg: Message) -> list[Effect]:
        return [Send(msg, party) for party in self.plan.roles if party not in self._lost]

    def _heard(self, party: str, msg: Message, now_s: float) -> list[Effect]:
        role = self.plan.roles[party]
        if role not in speakers(msg):
            return self._trouble(f"{party} said {type(msg).__name__}, which no {role} says")
        rank = int(party.partition(":")[2])
        match msg:
            case Armed():
                self._armed |= {party}
            case AtBoundary(boundary=step) if step != self.boundary:
                return self._trouble(f"{party} stands before step {step} instead of {self.boundary}")
            case AtBoundary():
                self._standing |= {party}
            case Captured(digest=digest):
                self._captured |= {(rank, digest)}
            case Restored(digest=digest):
                self._restored |= {(rank, digest)}
            case Ready(epoch=epoch) if epoch == self.plan.epoch_from + 1:
                self._ready |= {party}
            case TooLate(why=why) | NotReady(why=why):
                return self._trouble(f"{party}: {why}")
            case Failed(found=found):
                return self._trouble(f"{party}: {'; '.join(found[:1])}", found)
        return self._advance(now_s)

    def _advance(self, now_s: float) -> list[Effect]:
        if self.phase == Phase.ARMED and self._armed == self.plan.roles.keys():
            self.phase = Phase.GO
            return self._tell(Go(self.plan.handover))
        if self.phase == Phase.GO and self._standing:
            self._pause_began(now_s)
        if self.phase == Phase.PREPARED:
            return self._compare()
        if self.phase == Phase.COMMITTED:
            return self._end()
        return []

    def _pause_began(self, now_s: float) -> None:
        if self._cut_due_s is None:
            self._cut_due_s = now_s + self.plan.cut_deadline_s
        if self._standing == self.plan.old:
            self.phase = Phase.PREPARED
            self._due_s = self._cut_due_s
        elif self._due_s is not None:
            self._due_s = min(self._due_s, self._cut_due_s)

    def _compare(self) -> list[Effect]:
        captured, restored = self._captured, self._restored
        ranks = {rank for rank, _ in captured} & {rank for rank, _ in restored}
        spoilt = sorted(ranks & {rank for rank, _ in captured ^ restored})
        if spoilt:
            found = tuple(f"rank {rank}: restored state differs from the captured one" for rank in spoilt)
            return self._trouble(found[0], found)
        moved = {rank for rank, _ in self.plan.owners(TARGET)}
        return self._write("commit") if ranks == moved else []

    def _lose(self, party: str) -> list[Effect]:
        self._lost |= {party}
        if self.plan.roles[party] == SOURCE and (self.phase >= Phase.DECIDED or self._gave(party)):
            return []  # its rank is given away: what is lost is only the way back
        return self._trouble(f"{party} is gone")

    def _gave(self, party: str) -> bool:
        """Has this source captured it all? Then its death stops nothing: the target has it, or fails."""
        return any(f"{SOURCE}:{rank}" == party for rank, _ in self._captured)

    def _trouble(self, why: str, found: tuple[str, ...] = ()) -> list[Effect]:
        """Anything that stands in the way: before the outcome it aborts, after a commit it returns."""
        if self._writing is not None and self._writing.kind != "commit":
            return []
        if not self.reason:
            self.reason, self.found = why, found
        if self.phase < Phase.DECIDED:
            return self._write("abort")
        return self._end() if self.phase == Phase.COMMITTED else []

    def _end(self) -> list[Effect]:
        if self._lost & self.plan.ids(SURVIVOR):
            return self._write("dead")
        if self.reason:
            return self._write("dead" if self._lost & self.plan.ids(SOURCE) else "return")
        return self._write("run") if self._ready == self.plan.new else []

    def _write(self, kind: str) -> list[Effect]:
        epoch = {"abort": 0, "commit": 1, "run": 1, "return": 2}
        owner = {"abort": SOURCE, "commit": TARGET, "run": TARGET, "return": SOURCE}
        self.phase = Phase.DECIDED if self.phase < Phase.DECIDED else Phase.ENDING
        self._due_s = None
        self._writing = Entry(
            handover=self.plan.handover,
            kind=kind,
            epoch=self.plan.epoch_from + epoch[kind] if kind in epoch else -1,
            boundary=self.boundary,
            reason=self.reason,
            found=self.found,
            owners=self.plan.owners(owner[kind]) if kind in owner else (),
        )
        return [Record(self._writing)]

    def _recorded(self, entry: Entry, now_s: float) -> list[Effect]:
        self._entries += (entry,)
        self._writing = None
        handover = self.plan.handover
        msg: Message
        match entry.kind:
            case "commit":
                self.phase = Phase.COMMITTED
                self._due_s = now_s + self.plan.resume_deadline_s
                return self._tell(Commit(handover, entry.epoch, entry.owners)) + self._end()
            case "abort":
                self.phase, msg = Phase.ABORTED, Abort(handover, entry.reason)
            case "run":
                self.phase, msg = Phase.RUNNING, Run(handover)
            case "return":
                self.phase, msg = Phase.RETURNED, Return(handover, entry.epoch)
            case _:
                self.phase, msg = Phase.DEAD, Dead(handover, entry.reason)
        report = fold_records(self._entries, self.plan.epoch_from)
        return [*self._tell(msg), Finished(report)]


# --------------------------------------------------------------------------------------------------
# The members


class Member:
    """One process of a hand-over. Once its phase is final it takes no event any more."""

    def __init__(self, plan: Plan, me: Party) -> None:
        if plan.roles.get(me.id) != me.role:
            raise TransactionError(f"hand-over {plan.handover}: no party {me.id!r}")
        self.plan = plan
        self.me = me
        self.phase = Phase.IDLE
        self.boundary = -1
        self._moved = False  # source: captured, target: restored (or failed to)
        self._alone = False  # the channel to the chair is gone
        self._due_s: float | None = None

    def deadline(self) -> float | None:
        """When Tick must be delivered next; None: nothing to wait for."""
        return self._due_s

    def on(self, event: MemberEvent, now_s: float) -> list[Effect]:
        """Take one event."""
        if self.phase >= Phase.RUNNING:
            return []
        match event:
            case Received(msg=msg, begun=begun) if msg.handover == self.plan.handover:
                return self._heard(msg, begun, now_s)
            case ReachedBoundary(step):
                return self._reached(step, now_s)
            case Lost():
                return self._lose_chair()
            case Refuse(why):
                return self._refuse(why)
            case Tick() if self._due_s is not None and now_s >= self._due_s:
                return self._late()
            case CaptureDone() | CaptureFailed() | RestoreDone() | RestoreFailed():
                return self._state_moved(event)
            case GatherDone() if self.phase == Phase.COMMITTED and self.me.role != SOURCE:
                self.phase = Phase.READY
                return [Send(Ready(self.plan.handover, self.plan.epoch_from + 1))]
            case GatherFailed(why):
                return self._refuse(why) if self.phase >= Phase.COMMITTED else []
        return []

    def _heard(self, msg: Message, begun: int, now_s: float) -> list[Effect]:
        match msg:
            case Arm(boundary=boundary) if self.phase == Phase.IDLE:
                return self._arm(boundary, begun, now_s)
            case Go() if self.phase in (Phase.ARMED, Phase.STANDING):
                return self._go(now_s)
            case Abort(reason=reason) if self.phase < Phase.COMMITTED:
                return self._go_on(Phase.ABORTED, reason)
            case Commit(epoch=epoch) if self.phase == Phase.PREPARED and epoch == self.plan.epoch_from + 1:
                self.phase = Phase.COMMITTED
                self._due_s = now_s + 2 * self.plan.resume_deadline_s
                return [Freeze() if self.me.role == SOURCE else StartGather(epoch)]
        if self.phase in (Phase.COMMITTED, Phase.READY):
            return self._heard_ending(msg)
        return []

    def _heard_ending(self, msg: Message) -> list[Effect]:
        match msg:
            case Run() if self.me.role == SOURCE:
                self._final(Phase.RUNNING)
                return []
            case Run() if self.phase == Phase.READY:
                self._final(Phase.RUNNING)
                return [ContinueNew(self.plan.epoch_from + 1)]
            case Return(epoch=epoch) if epoch == self.plan.epoch_from + 2:
                self._final(Phase.RETURNED)
                returned = "the old members go on"
                return [Discard(returned) if self.me.role == TARGET else ContinueReturned(epoch)]
            case Dead(reason=reason):
                self._final(Phase.DEAD)
                return [Die(reason)]
        return []

    def _arm(self, boundary: int, begun: int, now_s: float) -> list[Effect]:
        if begun >= boundary:
            self._final(Phase.LEFT)
            return [Send(TooLate(self.plan.handover, f"has begun step {begun}, the boundary was {boundary}"))]
        self.phase = Phase.ARMED
        self.boundary = boundary
        self._due_s = now_s + self.plan.arm_deadline_s
        armed = Send(Armed(self.plan.handover))
        return [armed] if self.me.role == TARGET else [StopAt(boundary), armed]

    def _go(self, now_s: float) -> list[Effect]:
        standing = self.phase == Phase.STANDING
        self.phase = Phase.GO
        if self.me.role == TARGET:
            plan = self.plan
            self._due_s = now_s + plan.arm_deadline_s + plan.cut_deadline_s + plan.resume_deadline_s
            return [StartRestore()]
        return self._prepare(now_s) if standing else []

    def _reached(self, step: int, now_s: float) -> list[Effect]:
        if self.phase not in (Phase.ARMED, Phase.GO) or step < self.boundary:
            return []
        if step > self.boundary:
            return self._leave(f"ran past the boundary to step {step}")
        if self.phase == Phase.GO:
            return self._prepare(now_s)
        self.phase = Phase.STANDING
        return []

    def _prepare(self, now_s: float) -> list[Effect]:
        """From here on only the chair's word lets this process train again."""
        self.phase = Phase.PREPARED
        self._due_s = now_s + self.plan.cut_deadline_s + self.plan.resume_deadline_s
        standing = Send(AtBoundary(self.plan.handover, self.boundary))
        return [standing, StartCapture()] if self.me.role == SOURCE else [standing]

    def _state_moved(self, event: MemberEvent) -> list[Effect]:
        expected = Phase.GO if self.me.role == TARGET else Phase.PREPARED
        if self.phase != expected or self._moved:
            return []
        handover = self.plan.handover
        self._moved = True
        match self.me.role, event:
            case "source", CaptureDone(digest):
                return [Send(Captured(handover, digest))]
            case "source", CaptureFailed(why):
                return [Send(Failed(handover, (why,)))]
            case "target", RestoreDone(digest):
                self.phase = Phase.PREPARED
                return [Send(Restored(handover, digest))]
            case "target", RestoreFailed(found):
                return [Send(Failed(handover, found))]
        raise TransactionError(f"hand-over {handover}: {event!r} at {self.me.id}")

    def _bound(self) -> bool:
        """Is it only the chair that may let this process go on? A target owns nothing before Commit."""
        return self.phase >= (Phase.COMMITTED if self.me.role == TARGET else Phase.PREPARED)

    def _lose_chair(self) -> list[Effect]:
        self._alone = True
        return [] if self._bound() else self._leave("the channel to the chair is gone")

    def _refuse(self, why: str) -> list[Effect]:
        if not self._bound():
            return self._leave(why)
        handover = self.plan.handover
        if self.phase == Phase.PREPARED:
            return [Send(TooLate(handover, why))]
        return [] if self.me.role == SOURCE else [Send(NotReady(handover, why))]

    def _late(self) -> list[Effect]:
        if not self._bound():
            return self._leave(f"deadline passed in phase {self.phase.name}")
        heard = "the channel to the chair is gone" if self._alone else "the chair said nothing"
        why = f"{heard} and the hard deadline of phase {self.phase.name} passed"
        self._final(Phase.DEAD)
        return [Die(why)]

    def _leave(self, why: str) -> list[Effect]:
        return [Send(TooLate(self.plan.handover, why)), *self._go_on(Phase.LEFT, why)]

    def _go_on(self, phase: Phase, why: str) -> list[Effect]:
        stopped = self.phase != Phase.IDLE
        self._final(phase)
        if self.me.role == TARGET:
            return [Discard(why)]
        return [ContinueOld(self.boundary)] if stopped else []

    def _final(self, phase: Phase) -> None:
        self.phase = phase
        self._due_s = None
