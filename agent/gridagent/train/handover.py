"""Carries out a hand-over: sockets, threads, files and groups around the machines of transaction.py.

`Handovers` answers the agent's commands. A `Driver` is one hand-over in this process: a thread that
feeds events to the member (in the chair's process also to the chair) and does what they say. Whatever
touches the rank's state runs in the training thread, which stands at the boundary meanwhile.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.distributed import PrefixStore, TCPStore

from gridagent import wire
from gridagent.train.context import CONTEXT
from gridagent.train.damage import Damage
from gridagent.train.group import node_address
from gridagent.train.link import LinkError
from gridagent.train.records import RecordFile
from gridagent.train.sealed import KeyPair, Listener, SealedError, SealedSocket, connect
from gridagent.train.state import StateError
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
from gridagent.train.transaction_messages import Party, Plan, Report, TransactionError, from_wire, to_wire
from gridagent.train.transfer import TransferError, TransferReport, receive_state, send_state

if TYPE_CHECKING:
    from gridagent.train.session import Session

#: Exit status of a process that ends itself so that its scheduler requeues the job (sysexits EX_TEMPFAIL).
EXIT_REQUEUE = 75
_MEET_TIMEOUT_S = 60.0


class HandoverError(Exception):
    """A hand-over cannot be prepared or has ended; nothing changed unless the text says so."""


class Handovers:
    """What the agent may ask of this process about hand-overs. At most one is live at a time."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._driver: Driver | None = None
        self._changed = threading.Condition()
        self.frozen = False  #: this process gave its rank away and waits to be released
        self.handlers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "open": self._open,
            "meet": self._meet,
            "join": self._join,
            "cut": self._cut,
            "abort": self._abort,
            "release": self._release,
            "retire": self._retire,
        }

    # Called by the training thread.

    def reached(self, step: int) -> None:
        """The training thread stands before `step`."""
        driver = self._driver
        if driver is None or not driver.live:  # dropped in this very moment
            self._session.go_on()
        else:
            driver.reached(step)

    def refuse(self, why: str) -> None:
        """The process is in no state for a hand-over."""
        if self._driver is not None:
            self._driver.post("member", Refuse(why))

    # Called by threads of the link.

    def _start(self, driver: "Driver") -> None:
        with self._changed:
            if self._driver is not None and self._driver.live:
                if self._driver.handover == driver.handover:
                    raise HandoverError(f"hand-over {driver.handover} is prepared in this process already")
                raise HandoverError(f"hand-over {self._driver.handover} is under way in this process")
            self._driver = driver
            self._changed.notify_all()

    def _get(self, handover: str, wait_s: float = 0.0) -> "Driver":
        with self._changed:
            self._changed.wait_for(
                lambda: self._driver is not None and self._driver.handover == handover, timeout=wait_s
            )
            if self._driver is None or self._driver.handover != handover:
                raise HandoverError(f"hand-over {handover} is not known to this process")
            return self._driver

    def _open(self, args: dict[str, Any]) -> Any:
        order = msgspec.convert(args, wire.HandoverOpen)
        self._check_epoch(order.epoch_from)
        driver = Driver(self._session, order.handover, order.epoch_from, order.members, order.ttl_s)
        offer = driver.open_chair()
        try:
            self._start(driver)
        except HandoverError:
            driver.drop()
            raise
        return wire.plain(offer)

    def _meet(self, args: dict[str, Any]) -> Any:
        request = msgspec.convert(args, wire.MeetRequest)
        return wire.plain(self._get(request.handover, wait_s=_MEET_TIMEOUT_S).meet(request))

    def _join(self, args: dict[str, Any]) -> Any:
        order = msgspec.convert(args, wire.HandoverJoin)
        self._check_epoch(order.epoch_from)
        if order.me.session != order.chair.session:
            driver = Driver(self._session, order.handover, order.epoch_from, order.members, order.ttl_s)
            self._start(driver)
        else:
            driver = self._get(order.handover)
        try:
            driver.join(order)
        except (SealedError, LinkError, HandoverError, RuntimeError, ValueError) as error:
            driver.drop()
            raise HandoverError(f"cannot join hand-over {order.handover}: {error}") from error
        return {}

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self._session.epoch:
            raise HandoverError(
                f"this process is in epoch {self._session.epoch}, not {epoch}: make a new plan"
            )
        if self.frozen:
            raise HandoverError("this process has given its rank away and is frozen")

    def _cut(self, args: dict[str, Any]) -> Any:
        order = msgspec.convert(args, wire.HandoverCut)
        return wire.plain(self._get(order.handover).cut(order))

    def _abort(self, args: dict[str, Any]) -> Any:
        self._get(str(args["handover"])).cancel(str(args.get("reason", "aborted")))
        return {}

    def _release(self, args: dict[str, Any]) -> Any:
        if not self.frozen:
            raise HandoverError("this process holds its rank: only a frozen source can be released")
        threading.Timer(0.2, end_process, args=(self._session, "released", 0)).start()
        return {}

    def _retire(self, args: dict[str, Any]) -> Any:
        if self._session.is_owner or self.frozen:
            raise HandoverError("this process is no spare: it holds or held a rank")
        threading.Timer(0.2, end_process, args=(self._session, "retired", 0)).start()
        return {}


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
        self._chair: Chair | None = None
        self._listener: Listener | None = None
        self._met: dict[bytes, str] = {}  #: public key -> party
        self._star: dict[str, SealedSocket] = {}  #: party (or "chair") -> channel
        self._state_channel: SealedSocket | None = None
        self._joined = threading.Condition()
        self._store: Any = None
        self._server: TCPStore | None = None
        self._records: RecordFile | None = None
        self._inners: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._old_store: Any = None
        self._groups_made = -1
        self._damage = Damage("")
        self._me = ""
        self._done = threading.Event()
        self._report: Report | None = None
        self._times: dict[str, float] = {}
        self._parts_ms: dict[str, float] = {}
        self._bytes = 0
        self._digests: dict[str, dict[str, str]] = {}

    # --------------------------------------------------------------------------------- preparation

    def open_chair(self) -> wire.ChairOffer:
        """Listens for the members and hosts the next epoch's store."""
        folder = os.environ.get("GRIDAGENT_HANDOVERS") or "."
        self._records = RecordFile(folder, self.handover)
        self._listen()
        self._server = TCPStore(node_address(), 0, is_master=True, wait_for_workers=False)
        nonce = os.urandom(16).hex()
        self._server.set("gridctl/nonce", nonce)
        self._store = self._server
        return wire.ChairOffer(store_host=node_address(), store_port=self._server.port, nonce=nonce)

    def _listen(self) -> Listener:
        if self._listener is None:
            self._listener = Listener(node_address(), self.handover)
            threading.Thread(target=self._accept, name="gridagent-accept", daemon=True).start()
        return self._listener

    def meet(self, request: wire.MeetRequest) -> wire.MeetReply:
        """Another member wants a channel to us."""
        party = f"{request.role}:{request.rank}"
        known = any((m.role, m.rank) == (request.role, request.rank) for m in self._members)
        if not known or request.purpose not in ("star", "state"):
            raise HandoverError(f"{party} has no part in hand-over {self.handover}")
        listener = self._listen()
        self._met[request.public_key] = f"{request.purpose} {party}"
        public = listener.meet(request.public_key, request.purpose)
        return wire.MeetReply(public_key=public, host=listener.host, port=listener.port)

    def _accept(self) -> None:
        assert self._listener is not None
        while self.live:
            try:
                key, channel = self._listener.accept(1.0)
            except SealedError:
                if not self.live or time.monotonic() > self._expires_s:
                    return
                continue
            purpose, _, party = self._met.pop(key).partition(" ")
            with self._joined:
                if purpose == "state":
                    self._state_channel = channel
                else:
                    self._star[party] = channel
                    self._listen_to(party, channel)
                self._joined.notify_all()

    def join(self, order: wire.HandoverJoin) -> None:
        """Meets the chair (a source also its target) and builds the next epoch's groups. Blocks."""
        members = tuple(Party(m.role, m.rank) for m in order.members)
        plan = Plan(
            self.handover, self._epoch_from, members,
            order.arm_deadline_s, order.cut_deadline_s, order.resume_deadline_s, lead_steps=1,
        )  # fmt: skip
        me = Party(order.me.role, order.me.rank)
        self._me = me.id
        self._damage = Damage(order.damage or os.environ.get("GRIDAGENT_DAMAGE", ""))
        self._member = Member(plan, me)
        registry = CONTEXT.registry
        self._groups_made = registry.created
        if order.me.session != order.chair.session:
            channel = self._call(order.chair, "star", order.me)
            self._star[CHAIR] = channel
            self._listen_to(CHAIR, channel)
            self._store = self._connect_store(order.store)
        if me.role == "source":
            target = next(m for m in order.members if m.role == "target" and m.rank == me.rank)
            self._state_channel = self._call(target, "state", order.me)
        else:
            store = PrefixStore(f"epoch/{order.epoch_to}", self._store)
            self._inners = registry.build(store, timedelta(seconds=order.ttl_s))
            for group in registry.groups():
                self._inners[group.key].set_timeout(group.timeout)
        if not self.live:
            raise HandoverError("it was dropped meanwhile")
        threading.Thread(target=self._run, name="gridagent-handover", daemon=True).start()

    def _call(self, peer: wire.Member, purpose: str, me: wire.Member) -> SealedSocket:
        assert CONTEXT.link is not None
        pair = KeyPair()
        request = wire.MeetRequest(
            handover=self.handover,
            role=me.role,
            rank=me.rank,
            purpose=purpose,
            to_session=peer.session,
            public_key=pair.public,
        )
        answer = CONTEXT.link.ask(
            "meet", {"url": peer.url, "node": peer.node, **wire.plain(request)}, _MEET_TIMEOUT_S
        )
        reply = msgspec.convert(answer, wire.MeetReply)
        return connect(reply.host, reply.port, pair, reply.public_key, self.handover, purpose)

    def _connect_store(self, offer: wire.ChairOffer) -> TCPStore:
        store = TCPStore(offer.store_host, offer.store_port, is_master=False, wait_for_workers=False)
        if store.get("gridctl/nonce") != offer.nonce.encode():
            raise HandoverError(f"the store at {offer.store_host}:{offer.store_port} is not this hand-over's")
        return store

    # --------------------------------------------------------------------------------------- events

    def post(self, machine: str, event: Any) -> None:
        """Queues an event for "member" or "chair"."""
        self._events.put((machine, event))

    def reached(self, step: int) -> None:
        if self._groups_made != CONTEXT.registry.created:
            self.post(
                "member", Refuse("process groups were made or destroyed after the hand-over was prepared")
            )
        self.post("member", ReachedBoundary(step))

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
            with self._joined:
                others = len(plan.members) - 1
                if not self._joined.wait_for(lambda: len(self._star) == others, timeout=order.arm_deadline_s):
                    raise HandoverError(f"only {len(self._star)} of {others} members reached the chair")
            self._chair = Chair(plan)
            self.post("chair", Start(self._session.step))
        bound_s = order.arm_deadline_s + order.cut_deadline_s + 2 * order.resume_deadline_s
        if not self._done.wait(bound_s):
            raise HandoverError(f"hand-over {self.handover} did not end within {bound_s:.0f} s")
        return self._cut_report()

    def cancel(self, reason: str) -> None:
        """Drops the hand-over before it is decided; afterwards nothing happens."""
        member = self._member
        if self._chair is not None:
            self.post("chair", Cancel(reason))
        elif member is None or member.phase == Phase.IDLE:
            self.drop()

    def _listen_to(self, party: str, channel: SealedSocket) -> None:
        def listen() -> None:
            machine = "member" if party == CHAIR else "chair"
            while True:
                try:
                    body = msgspec.msgpack.decode(channel.receive())
                    if "metrics" in body:
                        self._merge_metrics(body["metrics"])
                    else:
                        self.post(machine, Received(from_wire(body), party))
                except (SealedError, msgspec.MsgspecError, TransactionError):
                    self.post(machine, Lost(party))
                    return

        threading.Thread(target=listen, name=f"gridagent-star-{party}", daemon=True).start()

    def _run(self) -> None:
        while self.live:
            try:
                name, event = self._events.get(timeout=max(0.0, self._due_s() - time.monotonic()))
            except queue.Empty:
                if self._idle() and time.monotonic() >= self._expires_s:
                    self.drop()
                    return
                self._feed("member", Tick())
                self._feed("chair", Tick())
            else:
                self._feed(name, event)
            self._end_if_final()

    def _idle(self) -> bool:
        return self._chair is None and (self._member is None or self._member.phase == Phase.IDLE)

    def _due_s(self) -> float:
        machines = [machine for machine in (self._member, self._chair) if machine is not None]
        dues = [due_s for machine in machines if (due_s := machine.deadline()) is not None]
        return min(dues) if dues else self._expires_s if self._idle() else time.monotonic() + 1.0

    def _end_if_final(self) -> None:
        assert self._member is not None
        if self._member.phase >= Phase.RUNNING and (
            self._chair is None or self._chair.phase >= Phase.RUNNING
        ):
            self._close()
            if self._member.phase in (Phase.ABORTED, Phase.LEFT):
                self._forget()

    def _feed(self, name: str, event: Any) -> None:
        machine = self._chair if name == "chair" else self._member
        if machine is None:
            return
        phase = machine.phase
        if name == "member" and isinstance(event, Received):
            # The order matters: first the flag, so that a thread that ends its step from here on
            # comes to the lock; then, under the lock, the step that it is in.
            self._session.attention = True
            with self._session.lock:
                effects = machine.on(Received(event.msg, CHAIR, self._begun()), time.monotonic())
                for effect in effects:
                    if isinstance(effect, StopAt):
                        self._session.stop_at = effect.boundary
        else:
            effects = machine.on(event, time.monotonic())
        if machine.phase != phase:
            self._entered(name, machine.phase)
        for effect in effects:
            self._carry_out(name, effect)

    def _begun(self) -> int:
        return self._session.step if self._session.is_owner else -1

    def _entered(self, name: str, phase: Phase) -> None:
        """A machine changed its phase: noted for the report, the agent's spool and the crash matrix."""
        now_s = time.time()
        self._times.setdefault(f"{name}.{phase.name}", now_s)
        party = CHAIR if name == "chair" else self._me
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
        session = self._session
        match effect:
            case Send(msg, party):
                self._send(name, party, msg)
            case Record(entry):
                assert self._records is not None
                self._records.append(to_wire(entry))
                self.post("chair", Recorded(entry))
            case Finished(report):
                self._report = report
                self._done.set()
            case StartCapture():
                session.jobs.put(self._capture)
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
            case Freeze():
                session.handovers.frozen = True
                session.is_owner = False
                if CONTEXT.link is not None:
                    CONTEXT.link.send(session.hello())
            case Discard():
                end_process(session, "retired", 0)
            case Die(why):
                print(f"gridagent: {why}; ending so that the scheduler can requeue the job", file=sys.stderr)
                end_process(session, "failed", EXIT_REQUEUE)

    def _send(self, name: str, party: str, msg: Any) -> None:
        if name == "chair" and party == self._me:
            self.post("member", Received(msg, CHAIR))
        elif name == "member" and self._chair is not None:
            self.post("chair", Received(msg, self._me))
        elif (channel := self._star.get(party)) is not None:
            try:
                channel.send(msgspec.msgpack.encode(to_wire(msg)))
            except SealedError:
                self.post(name, Lost(party))

    def _tell_metrics(self, report: TransferReport) -> None:
        rank = self._me.partition(":")[2]
        metrics = {
            "rank": rank,
            "parts_ms": report.parts_ms,
            "bytes": report.nbytes,
            "digests": report.digests,
        }
        channel = self._star.get(CHAIR)
        if channel is not None:
            with contextlib.suppress(SealedError):
                channel.send(msgspec.msgpack.encode({"metrics": metrics}))

    def _merge_metrics(self, metrics: dict[str, Any]) -> None:
        for part, value in metrics["parts_ms"].items():
            self._parts_ms[part] = max(self._parts_ms.get(part, 0.0), float(value))
        self._bytes = max(self._bytes, int(metrics["bytes"]))
        self._digests[str(metrics["rank"])] = dict(metrics["digests"])

    # The next five run in the training thread.

    def _channel(self) -> SealedSocket:
        assert self._member is not None
        bound_s = self._member.plan.cut_deadline_s
        with self._joined:
            if not self._joined.wait_for(lambda: self._state_channel is not None, timeout=bound_s):
                raise SealedError("the other end of the transfer never came")
        assert self._state_channel is not None
        self._state_channel.settimeout(bound_s)
        return self._state_channel

    def _capture(self) -> None:
        state = self._session.state
        try:
            channel = self._channel()
            report = send_state(
                channel, self._damage.entries(state.inventory()), state.rng_entries, self._damage.sending
            )
        except Exception as error:  # any defect here aborts the swap; training must not notice
            if self._state_channel is not None:
                self._state_channel.close()
            self.post("member", CaptureFailed(f"capture: {error}"))
            return
        self._tell_metrics(report)
        self.post("member", CaptureDone(json.dumps(report.digests, sort_keys=True)))

    def _restore(self) -> None:
        session = self._session
        assert self._member is not None
        try:
            report = receive_state(self._channel(), session.state, session.reopen_loaders)
            session.take_over(self._member.boundary)
        except TransferError as error:
            self._drop_transfer(tuple(error.found))
            return
        except (SealedError, StateError, RuntimeError) as error:
            self._drop_transfer((f"restore: {error}",))
            return
        self._tell_metrics(report)
        self.post("member", RestoreDone(json.dumps(report.digests, sort_keys=True)))

    def _drop_transfer(self, found: tuple[str, ...]) -> None:
        if self._state_channel is not None:
            self._state_channel.close()
        self.post("member", RestoreFailed(found))

    def _gather(self, epoch: int) -> None:
        """Switches to the new groups and proves that all members stand at the same (epoch, S)."""
        assert self._member is not None
        registry = CONTEXT.registry
        self._before, self._old_store = registry.switch(self._inners, self._store)
        world = registry.groups()[0]
        mine = torch.tensor([epoch, self._member.boundary], dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(world.size())]
        try:
            work = world.inner.allgather([gathered], [mine])
            work.wait(timedelta(seconds=self._member.plan.resume_deadline_s))
        except RuntimeError as error:
            self.post("member", GatherFailed(f"gather over epoch {epoch}: {error}"))
            return
        if any(not torch.equal(other, mine) for other in gathered):
            self.post("member", GatherFailed(f"gather over epoch {epoch}: members stand at different steps"))
            return
        self.post("member", GatherDone())

    def _enter(self, epoch: int) -> None:
        """The new epoch runs: its store is the job's from now on, the old groups go."""
        self._session.stores = [self._store, self._server]  # keeps the server alive where we host it
        host, port = _address(self._store)
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        self._forget()
        self._session.own(epoch)

    def _return(self, epoch: int) -> None:
        """The old members go on, over the old groups, as a new epoch."""
        if self._before:
            CONTEXT.registry.switch(self._before, self._old_store)
        self._forget()
        self._session.handovers.frozen = False
        self._session.own(epoch)

    # ------------------------------------------------------------------------------------ the end

    def drop(self) -> None:
        """Forgets what was prepared; training goes on as if nothing had been."""
        role = self._me.partition(":")[0]
        self._close()
        self._forget()
        if role == "target":
            end_process(self._session, "retired", 0)

    def _forget(self) -> None:
        """Gives back the groups and stores that no epoch uses: they end with their last reference."""
        self._inners, self._before = {}, {}
        self._store = self._server = self._old_store = None

    def _close(self) -> None:
        self.live = False
        if self._listener is not None:
            self._listener.close()
        for channel in [*self._star.values(), self._state_channel]:
            if channel is not None:
                channel.close()
        if self._records is not None:
            self._records.close()

    def _cut_report(self) -> wire.CutReport:
        report = self._report
        assert report is not None and self._chair is not None
        times = self._times
        began_s = min(times.get("member.PREPARED", time.time()), times.get("chair.PREPARED", time.time()))
        ended_s = max(
            times.get(f"chair.{phase}", 0.0) for phase in ("RUNNING", "ABORTED", "RETURNED", "DEAD")
        )
        parts_ms = dict(self._parts_ms)
        if "chair.COMMITTED" in times:
            parts_ms["switch"] = (ended_s - times["chair.COMMITTED"]) * 1e3
        return wire.CutReport(
            handover=self.handover,
            outcome=report.outcome,
            epoch=report.epoch,
            boundary_step=report.boundary,
            reason=report.reason,
            found=list(report.found),
            parts_ms=parts_ms,
            cut_ms=max(0.0, (ended_s - began_s) * 1e3),
            state_bytes=self._bytes,
            digests=self._digests,
            owners={str(rank): self._session_of(party) for rank, party in report.owners},
            t_boundary_unix_s=began_s,
            t_resume_unix_s=ended_s,
        )

    def _session_of(self, party: str) -> str:
        return next((m.session for m in self._members if f"{m.role}:{m.rank}" == party), party)


def _address(store: Any) -> tuple[str, int]:
    return str(store.host), int(store.port)
