"""One hand-over in one process: feeds events to the machines of transaction.py and does what they say.

The member's machine runs in every process of the hand-over, the chair's beside it in one. Whatever
touches the rank's state runs in the training thread, which stands at the boundary meanwhile.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from gridagent import wire
from gridagent.train.channels import Channels
from gridagent.train.context import CONTEXT
from gridagent.train.cutlog import CutLog
from gridagent.train.damage import Damage, of_environment
from gridagent.train.deputy import deputy_state, own_state
from gridagent.train.errors import HandoverError
from gridagent.train.membership import NextEpoch
from gridagent.train.records import RecordFile
from gridagent.train.recovery import align, deputies, standing_ranks
from gridagent.train.sealed import PeerGoneError, SealedError, SealedSocket
from gridagent.train.transaction import Chair, Member
from gridagent.train.transaction_events import (
    CHAIR,
    Cancel,
    CaptureDone,
    CaptureFailed,
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
    Entry,
    Party,
    Plan,
    Report,
    TransactionError,
    from_wire,
    to_wire,
)
from gridagent.train.transfer import TransferError, TransferReport, receive_state, send_state

if TYPE_CHECKING:
    from gridagent.train.session import Session

#: Exit status of a process that ends itself so that its scheduler requeues the job (sysexits EX_TEMPFAIL).
EXIT_REQUEUE = 75
#: A channel that ends is told so much later than its end: by then whoever ended it has said why.
_SYMPTOM_S = 0.5


def end_process(session: "Session", reason: str, status: int) -> None:
    """Ends this process at once, without the script's own clean-up: it must have no more effects."""
    if CONTEXT.link is not None:
        CONTEXT.link.close(wire.Farewell(reason=reason, step=session.step, epoch=session.epoch))
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


class Driver:
    """One hand-over in this process."""

    def __init__(
        self, session: "Session", handover: str, epoch_from: int, members: list[wire.Member], ttl_s: float
    ) -> None:
        self.handover = handover
        self.live = True
        self._session = session
        self._epoch_from = epoch_from
        self._members = members
        self._expires_s = time.monotonic() + ttl_s
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._member: Member | None = None
        self._deputies: dict[str, Member] = {}  #: party -> the machine of a dead rank that we speak for
        self._marks: dict[str, str] = {}  #: the same -> what is known of that rank's last state
        self._boundary = -1  #: where all stand, if the job stands in a spoilt step
        self._chair: Chair | None = None
        self._channels = Channels(handover, members, self._expires_s, self._heard, self._lost)
        self._next = NextEpoch()
        self._records: RecordFile | None = None
        self._groups_made = -1
        self._damage = Damage("")
        self._frozen_s = 0.0
        self._me = ""
        self._gone: list[str] = []  #: parties whose channel broke
        self._done = threading.Event()
        self._report: Report | None = None
        self._log = CutLog()

    # --------------------------------------------------------------------------------- preparation

    def open_chair(self) -> wire.ChairOffer:
        """Listens for the members and hosts the next epoch's store."""
        folder = os.environ.get("GRIDAGENT_HANDOVERS") or "."
        self._records = RecordFile(folder, self.handover)
        self._channels.listen()
        return self._next.host()

    def meet(self, request: wire.MeetRequest) -> wire.MeetReply:
        """Another member wants a channel to us."""
        return self._channels.meet(request)

    def join(self, order: wire.HandoverJoin) -> None:
        """Meets the chair (a source also its target) and builds the next epoch's groups. Blocks."""
        members = tuple(Party(m.role, m.rank) for m in order.members)
        plan = Plan(
            self.handover, self._epoch_from, members,
            order.arm_deadline_s, order.cut_deadline_s, order.resume_deadline_s, lead_steps=1,
        )  # fmt: skip
        me = Party(order.me.role, order.me.rank)
        self._me = me.id
        self._frozen_s = order.frozen_s
        registry, link = CONTEXT.registry, CONTEXT.link
        assert link is not None
        self._damage = Damage(order.damage or of_environment(link))
        self._member = Member(plan, me)
        self._groups_made = registry.created
        if order.me.session != order.chair.session:
            self._channels.call(link, order.chair, "star", order.me)
            self._next.reach(order.store)
        for deputy in deputies(order.me, order.members):
            self._become_deputy(order, plan, deputy)
        if order.standing and me.role != "target":
            store, ranks = self._next.store(order.epoch_to), standing_ranks(order.members)
            self._boundary = align(self._session, store, ranks, self._trouble)
        if me.role == "source":
            self._channels.call(link, _target_of(me.rank, order.members), "state", order.me)
        else:
            self._next.build(order.epoch_to, self._me, plan.new, self._trouble)
        if not self.live:
            raise HandoverError("it was dropped meanwhile")
        threading.Thread(target=self._run, name="gridagent-handover", daemon=True).start()

    def _become_deputy(self, order: wire.HandoverJoin, plan: Plan, me: wire.Member) -> None:
        """This process also speaks for a rank that died: over a channel of its own, as any source does."""
        party = Party(me.role, me.rank)
        assert CONTEXT.link is not None
        self._deputies[party.id], self._marks[party.id] = Member(plan, party), me.mark
        if order.me.session != order.chair.session:
            self._channels.call(CONTEXT.link, order.chair, "star", me, party.id)
        self._channels.call(CONTEXT.link, _target_of(me.rank, order.members), "state", me)

    def _trouble(self) -> str:
        """Why the join cannot come to its end."""
        if not self.live or time.monotonic() > self._expires_s:
            return "it was dropped meanwhile"
        return f"{', '.join(self._gone)} left it" if self._gone else ""

    # --------------------------------------------------------------------------------------- events

    def post(self, machine: str, event: Any) -> None:
        """Queues an event for "member", "chair", or a party that we speak for."""
        self._events.put((machine, event))

    def reached(self, step: int) -> None:
        if self._groups_made != CONTEXT.registry.created:
            self.post(
                "member", Refuse("process groups were made or destroyed after the hand-over was prepared")
            )
        for name in ("member", *self._deputies):
            self.post(name, ReachedBoundary(step))

    def cut(self, order: wire.HandoverCut) -> wire.CutReport:
        """Chair: runs the transaction to its end and reports. Blocks, within the deadlines."""
        if self._member is None or self._records is None:
            raise HandoverError(
                f"hand-over {self.handover}: this process is not its chair, or has not joined"
            )
        if self._chair is None:
            old = self._member.plan
            plan = Plan(
                old.handover, old.epoch_from, old.members,
                order.arm_deadline_s, order.cut_deadline_s, order.resume_deadline_s, order.lead_steps,
            )  # fmt: skip
            others = len(plan.members) - 1 - len(self._deputies)
            if (came := self._channels.wait_star(others, order.arm_deadline_s)) < others:
                raise HandoverError(f"only {came} of {others} members reached the chair")
            self._chair = Chair(plan)
            now = self._boundary - plan.lead_steps if self._boundary >= 0 else self._session.step
            self.post("chair", Start(now))
            for party in self._gone:  # before there was a chair to hear it
                self.post("chair", Lost(party))
        bound_s = order.arm_deadline_s + order.cut_deadline_s + 2 * order.resume_deadline_s
        if not self._done.wait(bound_s):
            raise HandoverError(f"hand-over {self.handover} did not end within {bound_s:.0f} s")
        assert self._report is not None
        return self._log.report(self.handover, self._report, self._session_of)

    def cancel(self, reason: str) -> None:
        """Drops the hand-over before it is decided; afterwards nothing happens."""
        member = self._member
        if self._chair is not None:
            self.post("chair", Cancel(reason))
        elif member is None or member.phase == Phase.IDLE:
            self.drop()

    def _heard(self, party: str, body: dict[str, Any]) -> None:
        if "metrics" in body:
            self._log.measured(body["metrics"])
            return
        try:
            message = from_wire(body)
        except TransactionError:
            self._lost(party)
            return
        self.post(self._at(party), Received(message, party))

    def _lost(self, party: str) -> None:
        self._gone.append(party)
        self.post(self._at(party), Lost(party))

    def _at(self, channel: str) -> str:
        """The machine that hears what comes over a channel: our own ones to the chair, else the chair."""
        return "member" if channel == CHAIR else channel if channel in self._deputies else "chair"

    def _run(self) -> None:
        while self.live:
            try:
                name, event = self._events.get(timeout=max(0.0, self._due_s() - time.monotonic()))
            except queue.Empty:
                if self._idle() and time.monotonic() >= self._expires_s:
                    self.drop()
                    return
                for name in ("member", *self._deputies, "chair"):
                    self._feed(name, Tick())
            else:
                self._feed(name, event)
            self._end_if_final()

    def _idle(self) -> bool:
        return self._chair is None and (self._member is None or self._member.phase == Phase.IDLE)

    def _due_s(self) -> float:
        everybody = (self._member, *self._deputies.values(), self._chair)
        machines = [machine for machine in everybody if machine is not None]
        dues = [due_s for machine in machines if (due_s := machine.deadline()) is not None]
        return min(dues) if dues else self._expires_s if self._idle() else time.monotonic() + 1.0

    def _end_if_final(self) -> None:
        assert self._member is not None
        if self._member.phase >= Phase.RUNNING and (
            self._chair is None or self._chair.phase >= Phase.RUNNING
        ):
            self._close()
            if self._member.phase in (Phase.ABORTED, Phase.LEFT):
                self._next.forget()
            elif self._member.phase == Phase.RUNNING and self._member.me.role == "source":
                self._session.handovers.left(self._frozen_s)

    def _feed(self, name: str, event: Any) -> None:
        machine = {"chair": self._chair, "member": self._member, **self._deputies}[name]
        if machine is None:
            return
        phase = machine.phase
        if isinstance(machine, Member) and isinstance(event, Received):
            # The order matters: first the flag, so that a thread that ends its step from here on
            # comes to the lock; then, under the lock, the step that it is in.
            self._session.attention = True
            with self._session.lock:
                effects = machine.on(Received(event.msg, CHAIR, self._begun()), time.monotonic())
                for effect in effects:
                    if isinstance(effect, StopAt):
                        self._session.stop_at = effect.boundary
            if self._boundary >= 0 and self._session.standing and self._session.step == self._session.stop_at:
                self.post(name, ReachedBoundary(self._session.step))  # it stood there before it was told to
        else:
            effects = machine.on(event, time.monotonic())
        if machine.phase != phase:
            self._entered(name, machine.phase)
        for effect in effects:
            self._carry_out(name, effect)

    def _begun(self) -> int:
        if not self._session.is_owner:
            return -1
        return self._session.step - 1 if self._boundary >= 0 else self._session.step  # a spoilt step is none

    def _entered(self, name: str, phase: Phase) -> None:
        """A machine changed its phase: noted for the report, the agent's spool and the crash matrix."""
        now_s = self._log.entered(name, phase)
        party = {"chair": CHAIR, "member": self._me}.get(name, name)
        if CONTEXT.link is not None:
            CONTEXT.link.send(
                wire.Phase(
                    handover=self.handover,
                    phase=phase.name.lower(),
                    t_unix_s=now_s,
                    detail={"party": party, "number": int(phase)},
                )
            )
        self._damage.hold(party, phase.name)

    # -------------------------------------------------------------------------------------- effects

    def _carry_out(self, name: str, effect: Effect) -> None:
        match effect:
            case Send(msg, party):
                self._send(name, party, msg)
            case Record(entry):
                self._record(entry)
            case Finished(report):
                self._report = report
                self._done.set()
            case Freeze() | ContinueOld() | ContinueReturned() if name in self._deputies:
                pass  # a matter of processes that are the rank; the survivor in this one is told as well
            case Freeze():
                self._freeze()
            case Discard():
                end_process(self._session, "retired", 0)
            case Die(why):
                self._die(why)
            case _:
                self._steer(name, effect)

    def _steer(self, name: str, effect: Effect) -> None:
        """Effects that the training thread carries out."""
        session = self._session
        match effect:
            case StartCapture():
                session.jobs.put(lambda: self._capture(name))
            case StartRestore():
                session.jobs.put(self._restore)
            case StartGather(epoch):
                session.jobs.put(lambda: self._gather(epoch))
            case ContinueOld():
                session.go_on()
            case ContinueNew(epoch):
                session.jobs.put(lambda: self._enter(epoch))
                session.go_on()
            case ContinueReturned(epoch):
                session.jobs.put(lambda: self._return(epoch))
                session.go_on()

    def _record(self, entry: Entry) -> None:
        assert self._records is not None
        try:
            self._records.append(to_wire(entry))
        except OSError as error:  # nobody may be told what is not on disk; see the machine's docstring
            self._die(f"the record of hand-over {self.handover} cannot be written: {error}")
        self.post("chair", Recorded(entry))

    def _freeze(self) -> None:
        session = self._session
        session.handovers.freeze()
        session.is_owner = False
        if CONTEXT.link is not None:
            CONTEXT.link.send(session.hello())

    def _die(self, why: str) -> None:
        print(f"gridagent: {why}; ending so that the scheduler can requeue the job", file=sys.stderr)
        end_process(self._session, "failed", EXIT_REQUEUE)

    def _send(self, name: str, party: str, msg: Any) -> None:
        if name == "chair" and (party == self._me or party in self._deputies):
            self.post("member" if party == self._me else party, Received(msg, CHAIR))
        elif name != "chair" and self._chair is not None:
            self.post("chair", Received(msg, self._me if name == "member" else name))
        else:
            channel = name if name in self._deputies else party
            try:
                self._channels.send(channel, to_wire(msg))
            except SealedError:
                self.post(name, Lost(party))

    def _tell_metrics(self, name: str, report: TransferReport) -> None:
        party = self._me if name == "member" else name
        metrics = {
            "rank": party.partition(":")[2],
            "parts_ms": report.parts_ms,
            "bytes": report.nbytes,
            "digests": report.digests,
        }
        if self._chair is not None:
            self._log.measured(metrics)
            return
        with contextlib.suppress(SealedError):
            self._channels.send(CHAIR, {"metrics": metrics})

    # The next ones run in the training thread.

    def _channel(self) -> SealedSocket:
        assert self._member is not None
        return self._channels.state(self._member.plan.cut_deadline_s)

    def _capture(self, name: str) -> None:
        state = self._session.state
        try:
            channel = self._channel()
            if name in self._deputies:
                entries, rng_entries = deputy_state(self._session, self._boundary, self._marks[name])
            elif self._session.attempts.void:
                entries, rng_entries = own_state(self._session, self._boundary)
            else:
                entries, rng_entries = state.inventory(), state.rng_entries
            report = send_state(channel, self._damage.entries(entries), rng_entries, self._damage.sending)
        except SealedError:
            # The target has closed the channel, or is gone. It says what it found, or the chair misses it:
            # this end knows only the symptom, and must not be heard before the cause.
            self._channels.close_state()
            return
        except Exception as error:  # any defect here aborts the swap; training must not notice
            self.post(name, CaptureFailed(f"capture: {error}"))
            self._channels.close_state()  # after it: the target would tell of this end's silence first
            return
        self._tell_metrics(name, report)
        self.post(name, CaptureDone(json.dumps(report.digests, sort_keys=True)))

    def _restore(self) -> None:
        session = self._session
        assert self._member is not None
        try:
            report = receive_state(self._channel(), session.state, session.feeds.reopen)
            session.take_over(self._member.boundary)
        except TransferError as error:
            self._drop_transfer(tuple(error.found))
            return
        except PeerGoneError as error:  # a symptom: whoever knows the cause is heard first
            threading.Timer(_SYMPTOM_S, self._drop_transfer, ((f"restore: {error}",),)).start()
            return
        except Exception as error:  # also what the script's own loader raises: it aborts the swap
            self._drop_transfer((f"restore: {error}",))
            return
        self._tell_metrics("member", report)
        self.post("member", RestoreDone(json.dumps(report.digests, sort_keys=True)))

    def _drop_transfer(self, found: tuple[str, ...]) -> None:
        self._channels.close_state()
        self.post("member", RestoreFailed(found))

    def _gather(self, epoch: int) -> None:
        assert self._member is not None
        why = self._next.gather(epoch, self._member.boundary, self._member.plan.resume_deadline_s)
        self.post("member", GatherFailed(why) if why else GatherDone())

    def _enter(self, epoch: int) -> None:
        self._session.stores = self._next.enter()
        self._session.own(epoch)

    def _return(self, epoch: int) -> None:
        """The old members go on, over the old groups, as a new epoch."""
        self._next.turn_back()
        self._session.handovers.frozen = False
        self._session.own(epoch)

    # ------------------------------------------------------------------------------------ the end

    def drop(self) -> None:
        """Forgets what was prepared; training goes on as if nothing had been."""
        role = self._me.partition(":")[0]
        self._close()
        self._next.forget()
        if role == "target":
            end_process(self._session, "retired", 0)

    def _close(self) -> None:
        self.live = False
        self._channels.close()
        if self._records is not None:
            self._records.close()

    def _session_of(self, party: str) -> str:
        return next((m.session for m in self._members if f"{m.role}:{m.rank}" == party), party)


def _target_of(rank: int, members: list[wire.Member]) -> wire.Member:
    return next(member for member in members if (member.role, member.rank) == ("target", rank))
