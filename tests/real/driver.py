"""Drives one hand-over over HTTPS, step by step, as the controller does."""

import contextlib
import os
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from agents import DEADLINE_S, Agent, Refused, wait_for

from gridagent import wire

if TYPE_CHECKING:
    from fleet import Holder, Run, TrainingFleet

#: Ranks wait before this step until a hand-over is prepared.
HOLD = 6
#: While one is prepared they train on, slowly, and wait again so many steps later; the boundary follows soon.
AHEAD = 8
PACE_S = 0.01


class OpRefused(Exception):
    """An operation was accepted and failed; the text is the agent's or the session's."""


#: A loaded machine may stall any process for seconds; a test that wants a deadline to pass gives its own.
PATIENT = {"arm_deadline_s": 60.0, "cut_deadline_s": 40.0, "resume_deadline_s": 40.0}


class Handover:
    """One hand-over, step by step. What fails raises `OpRefused` (or `agents.Refused`, before any effect)."""

    def __init__(
        self,
        fleet: "TrainingFleet",
        run: "Run",
        ranks: list[int],
        *,
        damage: str = "",  #: to the sources; or role:damage, e.g. "target:hold:target:1@PREPARED"
        spares: "list[Holder] | None" = None,
        chair: int | None = None,  #: rank of the chair; the lowest survivor by default
        lead_steps: int = 3,
        then: int | None = None,  #: after the cut all wait again before this step
        free: bool = False,  #: the job never waits for the hand-over; give it a pace
        **deadlines: float,  #: arm_deadline_s, cut_deadline_s, resume_deadline_s, ttl_s, frozen_s
    ) -> None:
        self.fleet, self.run, self.ranks = fleet, run, ranks
        self.damage, self.lead_steps = damage, lead_steps
        self.deadlines = {**PATIENT, **deadlines}
        self.then, self.free = then, free
        self.id = f"ho-{os.urandom(8).hex()}"
        fleet.fence += 1
        self.fence = fleet.fence
        self.spares = spares or [fleet.park(run) for _ in ranks]
        self.targets = dict(zip(ranks, self.spares, strict=True))
        run.left += self.spares
        run.wait_sessions()
        self.survivors = [rank for rank in run.ranks if rank not in ranks]
        self.chair = self.survivors[0] if chair is None else chair
        self.reports: dict[int, wire.SessionReport] = {}  #: what the sources say of themselves
        self.warm: dict[int, wire.SessionReport] = {}  #: what the targets say once they are warm
        self.members: list[wire.Member] = []
        self.offer: wire.ChairOffer | None = None
        self.report: wire.CutReport | None = None
        for agent in self.agents():
            agent.client().lease(fence=self.fence, ttl_s=120.0)

    def agents(self) -> list[Agent]:
        """All agents that have a part."""
        holders = [*self.run.ranks.values(), *self.spares]
        return list({holder.agent.name: holder.agent for holder in holders}.values())

    def op(
        self, holder: "Holder", kind: str, args: wire.Message | dict[str, Any], deadline_s: float = 60.0
    ) -> Any:
        """One operation, as the controller posts it; returns its value. Raises `OpRefused`."""
        fields = wire.plain(args) if isinstance(args, wire.Message) else args
        status = holder.agent.client().op(
            kind,
            {**fields, "session": holder.session},
            run=self.id,
            fence=self.fence,
            job=self.run.name,
            deadline_s=deadline_s,
        )
        if status.state != "done":
            raise OpRefused(f"{kind}: {status.error}")
        return status.value

    # --------------------------------------------------------------------------------------- preparation

    def swap(self) -> wire.CutReport:
        """All of it. After a commit the sources are released."""
        self.prepare()
        report = self.cut()
        self.end()
        return report

    def prepare(self) -> None:
        """describe, specialise, open, join. The job trains on meanwhile, up to the hold."""
        self.describe()
        self.specialise()
        self.open()
        self.join()

    def describe(self) -> None:
        """Asks the sources; they must come to a boundary, so the job may train on from here."""
        self.run.wait_step(self.run.held)
        calls = [partial(self.op, self.run.ranks[rank], "job.describe", {}) for rank in self.ranks]
        asked = [self.fleet.pool.submit(call) for call in calls]
        if self.free:
            (self.run.folder / "limit").unlink(missing_ok=True)
        else:
            self._step_until(asked)
        for rank, future in zip(self.ranks, asked, strict=True):
            self.reports[rank] = msgspec.convert(future.result(), wire.SessionReport)

    def _step_until(self, asked: list[Future[Any]]) -> None:
        """The job goes from boundary to boundary until all were asked at one; then on, AHEAD of where it was.

        On a loaded machine a question takes long to come there, and a test may need the exact step.
        """
        ahead, patience_s = self.run.held + AHEAD, 0.05
        pending: set[Future[Any]] = set(asked)
        while pending:
            self.run.limit(self.run.held + 1)
            pending = wait(pending, timeout=patience_s).not_done
            patience_s = min(2 * patience_s, 4.0)
        self.run.pace(PACE_S)
        self.run.limit(max(ahead, self.run.held))

    def launch(self, rank: int) -> wire.LaunchSpec:
        """How a rank was started, from its agent."""
        body = (
            self.run.ranks[rank].agent.client().request("GET", f"/v1/launch?job={self.run.name}&rank={rank}")
        )
        return msgspec.json.decode(body, type=wire.LaunchSpec)

    def specialise(self) -> None:
        """The spares become the ranks and warm up."""

        def one(rank: int) -> wire.SessionReport:
            told = self.reports[rank]
            order = wire.Specialise(
                handover=self.id,
                launch=self.launch(rank),
                epoch=told.epoch,
                step=told.step,
                buckets=told.buckets,
            )
            value = self.op(self.targets[rank], "handover.specialise", order)
            return msgspec.convert(value, wire.SessionReport)

        self.warm = dict(
            zip(self.ranks, self.fleet.all([partial(one, rank) for rank in self.ranks]), strict=True)
        )

    def open(self) -> None:
        """The chair opens."""
        self.members = [self._member("survivor", rank, self.run.ranks[rank]) for rank in self.survivors]
        self.members += [self._member("source", rank, self.run.ranks[rank]) for rank in self.ranks]
        self.members += [self._member("target", rank, self.targets[rank]) for rank in self.ranks]
        order = wire.HandoverOpen(
            handover=self.id,
            job=self.run.name,
            epoch_from=self.run.epoch,
            epoch_to=self.run.epoch + 1,
            members=self.members,
            ttl_s=self.deadlines.get("ttl_s", 120.0),
        )
        value = self.op(self.run.ranks[self.chair], "handover.open", order)
        self.offer = msgspec.convert(value, wire.ChairOffer)

    def join(self) -> None:
        """All members join."""
        self.fleet.all([partial(self.join_one, member) for member in self.members])

    def join_one(self, member: wire.Member) -> None:
        """One member joins; it returns once the groups stand, so all must be told at about the same time."""
        assert self.offer is not None
        chair = next(m for m in self.members if (m.role, m.rank) == ("survivor", self.chair))
        order = wire.HandoverJoin(
            handover=self.id,
            job=self.run.name,
            epoch_from=self.run.epoch,
            epoch_to=self.run.epoch + 1,
            me=member,
            chair=chair,
            members=self.members,
            store=self.offer,
            damage=self._damage_of(member),
            **self.deadlines,
        )
        self.op(self.holder(member), "handover.join", order)

    def holder(self, member: wire.Member) -> "Holder":
        """The process of a member."""
        return self.targets[member.rank] if member.role == "target" else self.run.ranks[member.rank]

    def _member(self, role: str, rank: int, holder: "Holder") -> wire.Member:
        agent = holder.agent
        return wire.Member(role=role, rank=rank, node=agent.name, url=agent.url, session=holder.session)

    def _damage_of(self, member: wire.Member) -> str:
        role, _, damage = self.damage.rpartition("|")
        return damage if member.role == (role or "source") else ""

    # ------------------------------------------------------------------------------------------- the cut

    def start_cut(self) -> "Future[wire.CutReport]":
        """Tells the chair to cut. The job still stands at the hold; see `let_go`."""
        bounds = {key: value for key, value in self.deadlines.items() if key not in ("ttl_s", "frozen_s")}
        order = wire.HandoverCut(handover=self.id, lead_steps=self.lead_steps, **bounds)
        whole_s = sum(bounds.values()) + bounds["resume_deadline_s"]
        chair = self.run.ranks[self.chair]

        def cut() -> wire.CutReport:
            return msgspec.convert(self.op(chair, "handover.cut", order, whole_s), wire.CutReport)

        return self.fleet.pool.submit(cut)

    def cut(self) -> wire.CutReport:
        """Cuts and waits for the report. The job goes on from the hold once all have armed."""
        agent = self.run.ranks[self.chair].agent
        after = agent.client().status().stream_seq
        pending = self.start_cut()
        self.wait_phase(agent, after, "chair", ("go", "decided", "aborted"), pending)
        self.go_on()
        self.report = pending.result(DEADLINE_S)
        if self.report.outcome == "commit":
            self.moved()
        elif self.report.outcome == "returned":
            self.run.epoch = self.report.epoch
        return self.report

    def go_on(self) -> None:
        """Lets the job go on from the hold."""
        if self.then is None:
            self.run.let_run()
        else:
            self.run.limit(self.then)

    def moved(self) -> None:
        """The targets have the ranks now."""
        assert self.report is not None
        for rank, target in self.targets.items():
            self.run.left.append(self.run.ranks[rank])
            self.run.left.remove(target)
            self.run.ranks[rank] = target
        self.run.epoch = self.report.epoch

    def wait_phase(
        self,
        agent: Agent,
        after: int,
        party: str,
        phases: tuple[str, ...],
        unless: "Future[Any] | None" = None,
    ) -> str:
        """Until this party of the hand-over reports one of these phases to `agent`; returns it.

        `unless`: give up once this has ended.
        """
        found: list[str] = []

        def look() -> bool:
            with agent.client().stream(after) as records:
                for record in records:
                    value = record["v"]
                    if record["kind"] == "phase" and (value["handover"], value["detail"]["party"]) == (
                        self.id,
                        party,
                    ):
                        found.append(value["phase"])
                    if found and found[-1] in phases:
                        return True
                    if unless is not None and unless.done():
                        return True
            return False

        wait_for(f"{party} reaches {phases}", look)
        return found[-1] if found else ""

    # -------------------------------------------------------------------------------------------- the end

    def abort(self, reason: str = "a test") -> None:
        """Drops what was prepared, at every member; some have noticed by themselves when they are told."""
        for member in self.members:
            with contextlib.suppress(OpRefused, Refused):
                self.op(self.holder(member), "handover.abort", {"handover": self.id, "reason": reason})

    def end(self) -> None:
        """Releases the sources after a commit; the run lets go of all nodes."""
        if self.report is not None and self.report.outcome == "commit":
            for rank in self.ranks:
                source = next(h for h in self.run.left if h.session == self._source_session(rank))
                self.op(source, "handover.release", {"handover": self.id})
        self.let_go()

    def let_go(self) -> None:
        """The run lets go of all nodes whose agents still serve it."""
        for agent in self.agents():
            if agent.process is not None and agent.process.poll() is None:
                with contextlib.suppress(Refused):  # fenced: a later hand-over has the lease
                    agent.client().op("run.end", run=self.id, fence=self.fence)

    def _source_session(self, rank: int) -> str:
        return next(m.session for m in self.members if (m.role, m.rank) == ("source", rank))
