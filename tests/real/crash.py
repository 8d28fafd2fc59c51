"""One cell of the crash matrix: a swap under a real controller, held at one point where somebody is killed.

cell = Cell(fleet, POINTS[3], "source")
cell.check()      # raises AssertionError where a promise is broken; cell.seen tells how it ended

Held means: the process stops itself (SIGSTOP, see gridagent.train.damage) as one machine of the
transaction enters a phase, or, in the preparation, the test stops it. Whoever is killed is killed while
it stands so; then the held process goes on. A killed agent is started again on its home, as systemd
would; a killed controller's run is taken up by its successor.
"""

import contextlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from crash_fleet import CrashFleet, no_spare, sockets_of
from fleet import Holder, Job, assert_same
from forkserver import Process
from swap_fleet import wait_for

from gridagent.journal import Record, Tail, verify
from gridctl.control import ensure
from gridctl.errors import Refused
from gridctl.model import fleet as model
from gridctl.model.plans import Gate, Plan, Request
from gridctl.model.runs import ENDS
from gridctl.model.runs import Run as OperatorRun

STEPS = 160
PACE_S = 0.2
#: Ranks wait before this step until the run has ended: what is left is done at full speed.
LIMIT = STEPS - 20
YES = Gate(who="ann", reason="a test", yes=True)

PREPARING, UNDECIDED, DECIDED, COMMITTED, STARTED = range(5)


@dataclass(frozen=True)
class Point:
    """Where a swap is held."""

    phase: str  #: number and name of the phase, or the step of the preparation
    held: str  #: PARTY@PHASE of the machine that stops its process; PARTY in the preparation
    stage: int
    says: str

    @property
    def id(self) -> str:
        return f"{self.phase.split()[-1]}-{self.held.split('@')[0].replace(':', '')}"


POINTS = (
    Point("specialise", "target:1", PREPARING, "the spare is about to warm up"),
    Point("open", "survivor:0", PREPARING, "the chair is about to open"),
    Point("join", "survivor:2", PREPARING, "all join but one"),
    Point("1 ARMED", "survivor:2@ARMED", UNDECIDED, "one vote is outstanding"),
    Point("2 STANDING", "target:1@ARMED", UNDECIDED, "all ranks stand at S and have not heard Go"),
    Point("3 GO", "chair@GO", UNDECIDED, "all have armed, nobody was told Go"),
    Point("4 PREPARED", "source:1@PREPARED", UNDECIDED, "the state is not captured"),
    Point("4 PREPARED", "target:1@PREPARED", UNDECIDED, "the state is restored, the chair does not know"),
    Point("5 DECIDED", "chair@DECIDED", DECIDED, "commit is decided and not yet on the disk"),
    Point("6 COMMITTED", "chair@COMMITTED", COMMITTED, "commit is on the disk, nobody was told"),
    Point("6 COMMITTED", "target:1@COMMITTED", COMMITTED, "the target was told to commit"),
    Point("7 READY", "target:1@READY", COMMITTED, "the target has gathered, the chair does not know"),
    Point("8 ENDING", "chair@ENDING", STARTED, "run is decided and not yet on the disk"),
    Point("9 RUNNING", "chair@RUNNING", STARTED, "run is on the disk, nobody was told"),
    Point("9 RUNNING", "target:1@RUNNING", STARTED, "the target was told to run"),
)

PROCESSES = {"source": "source:1", "target": "target:1", "survivor": "survivor:2", "chair": "survivor:0"}
AGENTS = {f"{name}'s agent": party for name, party in PROCESSES.items()}


def promised(point: Point, victim: str) -> tuple[str, ...]:
    """How a cell must end; several where two messages race to the chair.

    new: the target has the rank in epoch 1. old: the source has it in epoch 0. returned: the source has it
    again, in epoch 2. recovered: the others stood, and a second plan gave the rank to a fresh spare, in the
    next epoch. requeued: a process died without which the job cannot go on; all others end.
    """
    stage = point.stage
    if victim == "chair":
        return ("requeued",)
    if victim == "survivor":
        return ("recovered",) if stage < DECIDED else ("requeued",)
    if victim == "source" and point.held == "target:1@PREPARED":
        return ("new",)  # the chair has the digest of all that was captured, the target has the state
    if victim == "source":
        return ("recovered",) if stage < DECIDED else ("new",)
    if victim == "target":
        return (("old", "old", "returned", "returned", "recovered")[stage],)
    if victim == "controller, rolled back":
        return ("old",) if stage == PREPARING else ("new",)
    asked = {"specialise": ("target's agent",), "open": ("chair's agent",), "join": tuple(AGENTS)}
    return ("old",) if victim in asked.get(point.phase, ()) else ("new",)


class Cell:
    """A swap of rank 1, held at `point`, where `victim` is killed."""

    def __init__(self, fleet: CrashFleet, point: Point, victim: str) -> None:
        self.fleet, self.point, self.victim = fleet, point, victim
        self.seen = ""  #: how it ended: see `promised`
        self.run_state = ""  #: of the controller's run
        self.took_s = 0.0  #: from the kill to the end of the run
        job = Job("ddp", ("attempt",), steps=STEPS)
        self.control = fleet.control(Job("ddp", steps=STEPS))
        env = (("GRIDAGENT_DAMAGE", f"hold:{point.held}"),) if "@" in point.held else ()
        self.job = fleet.start(replace(job, env=env))
        self.job.pace(PACE_S)
        self.job.limit(LIMIT)
        self.home = fleet.home()
        self.client = ensure(self.home)
        self.spare = fleet.park(self.job)
        self.job.left = [self.spare]
        self.plan: Plan | None = None
        self.dead = 2 if victim == "survivor" else 1  #: the rank without a process, if the others stand
        self.fresh: Holder | None = None  #: the spare of the second plan, if there was one
        self.second: Plan | None = None
        self.run_id = ""
        self.held = self._party(point.held.split("@")[0])

    def check(self) -> None:
        """Goes through the cell. Raises AssertionError."""
        left = ""
        try:
            self._check()
        except BaseException:
            left = self.run_id
            print(self.logs())
            raise
        finally:
            self._clear(left)

    def _check(self) -> None:
        self._start()
        before = self._sockets()
        journal = self._apply()
        self._until_held(journal)
        began_s = time.monotonic()
        self._kill()
        self._go_on()
        self._restart()
        self._until_ended()
        self.took_s = time.monotonic() - began_s
        self._look()
        if self.seen == "stands":
            self._recover()
        assert self.seen in promised(self.point, self.victim), self.seen
        self._check_records()
        if self.seen == "requeued":
            self._check_requeued()
        else:
            self._check_one_owner()
            self._check_sockets(before)
            assert_same(self.job, self._finish(), self.control)
        self.client.stop()
        assert verify(self.home.journal).ok

    # ------------------------------------------------------------------------------- up to the kill

    def _party(self, party: str) -> Holder:
        """The process of a party of the hand-over; the chair's machine lives in survivor 0."""
        role, _, rank = "survivor:0".partition(":") if party == "chair" else party.partition(":")
        return self.spare if role == "target" else self.job.ranks[int(rank)]

    def _start(self) -> None:
        self.job.wait_sessions()
        self.job.wait_step(4)

        def ready() -> bool:
            jobs = [j for j in self.client.view("jobs", model.Job) if j.name == self.job.name]
            spares = [s.session for s in self.client.view("spares", model.Spare) if s.state == "parked"]
            return bool(jobs and jobs[0].state == "training" and self.spare.session in spares)

        wait_for("the controller sees job and spare", ready)

    def _apply(self) -> "Iterator[Record]":
        """Starts the run; returns the journal's records from there on."""
        self.plan = plan = self.client.plan(Request(node="n2", job=self.job.name, who="ann"))
        assert (plan.chair.session, plan.moves[0].target.session) == (
            self.job.ranks[0].session,
            self.spare.session,
        )
        tail = Tail(self.home.journal, self.client.health()["journal_seq"])
        if self.point.stage == PREPARING:
            self.spare.process.send_signal(signal.SIGSTOP)
        gate = Gate(digest=plan.digest, who="ann", reason="a test", typed="n2")
        self.run_id = self.client.apply(plan.id, gate).id
        return self._records(tail)

    def _records(self, tail: Tail) -> "Iterator[Record]":
        while True:
            found: list[Record] = wait_for("the journal grows", lambda: list(tail.new()))
            for record in found:
                state = record.data.get("state", "")
                ended = record.kind == "run" and state in (*ENDS, "held", "turning-back")
                assert not ended, f"the run was never held at {self.point.held}: {record.data}"
                yield record

    def _until_held(self, journal: "Iterator[Record]") -> None:
        if self.point.stage == PREPARING:
            self._until_step(journal, "specialise")
            if self.held is not self.spare:
                self.held.process.send_signal(signal.SIGSTOP)
                self.spare.process.send_signal(signal.SIGCONT)
                self._until_step(journal, self.point.phase)
            op = f"{self.run_id}.{self.point.phase}"
            accepted = lambda: self.held.agent.client().status().running_op.startswith(op)  # noqa: E731
            wait_for("the agent has the operation", accepted)
        if self.point.phase == "2 STANDING":
            standing = {"survivor:0", "survivor:2", "source:1"}
            while standing:
                record = next(journal)
                if record.data.get("phase") == "standing":
                    standing.discard(record.data["detail"]["party"])
        wait_for(f"{self.point.held} is held", self._is_held)

    def _until_step(self, journal: "Iterator[Record]", step: str) -> None:
        next(
            r for r in journal if r.kind == "step" and (r.data["step"], r.data["state"]) == (step, "started")
        )

    def _is_held(self) -> bool:
        assert self.held.process.poll() is None, "the process to be held has ended"
        run = self.client.one("run", self.run_id, OperatorRun)
        assert run.state == "running", f"the run was never held at {self.point.held}: {run}"
        stat = Path(f"/proc/{self.held.process.pid}/stat").read_text(errors="replace")
        return stat.rpartition(")")[2].split()[0] == "T"

    # ------------------------------------------------------------------------------------- the kill

    def _kill(self) -> None:
        if self.victim in PROCESSES:
            process = self._party(PROCESSES[self.victim]).process
            process.kill()
            assert process.wait(60) == -signal.SIGKILL
        elif self.victim in AGENTS:
            self._party(AGENTS[self.victim]).agent.end(signal.SIGKILL)
        else:
            pid = int(self.home.lock.read_text())
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.client.close()

    def _go_on(self) -> None:
        for holder in (self.held, self.spare):
            holder.process.send_signal(signal.SIGCONT)

    def _restart(self) -> None:
        """A new agent on the old home, whose sessions come back, or a new controller that goes on."""
        if self.victim in AGENTS:
            holder = self._party(AGENTS[self.victim])
            holder.agent.start("--allow-damage")
            wait_for("its sessions are back", lambda: self._is_back(holder))
        elif self.victim not in PROCESSES:
            self.client = ensure(self.home)
            assert self.client.one("run", self.run_id, OperatorRun).state == "interrupted"
            if self.victim == "controller":
                self.client.resume(self.run_id, YES)
                return
            if self.point.stage == PREPARING:
                self.client.rollback(self.run_id, YES)
                return
            with pytest.raises(Refused, match="in its cut"):
                self.client.rollback(self.run_id, YES)
            self.client.resume(self.run_id, YES)

    def _is_back(self, holder: Holder) -> bool:
        if holder.process.poll() is not None:
            return True
        return bool(self.fleet.known(holder.agent, holder.session))

    # ------------------------------------------------------------------------------------ afterwards

    def _until_ended(self) -> None:
        """The run comes to its end; where it is held for a person, the person lets it go on."""
        held = 0
        while True:
            run = wait_for("the run ends", self._stopped)
            self.run_state = run.state if not held else f"{run.state}, resumed {held} x"
            if run.state in ENDS:
                return
            assert held < 3, f"the run is held again and again: {run}"
            held += 1
            self.client.resume(self.run_id, YES)

    def _stopped(self) -> OperatorRun | None:
        run = self.client.one("run", self.run_id, OperatorRun)
        return run if run.state in (*ENDS, "held", "interrupted") else None

    def _look(self) -> None:
        """Who trains now; waits until that is certain: three more steps of all, or all have ended."""
        start = min(self.job.steps(rank) for rank in range(3))
        self.job.limit(LIMIT + 5)

        def look() -> str:
            if all(min(LIMIT, start) + 3 <= self.job.steps(rank) for rank in range(3)):
                return self._training()
            if self._stand():
                return "stands"
            trainers = [h for h in (*self.job.ranks.values(), self.spare) if h.process.poll() is None]
            return "" if trainers else "requeued"

        self.seen = wait_for("the job trains on, stands or has ended", look)

    def _stand(self) -> bool:
        """Do all but the dead rank stand, and does the controller know?"""
        state = {r.rank: r.state for r in self.fleet.ranks(self.job.name) if r.state not in model.GIVEN_UP}
        state.pop(self.dead, None)
        jobs = [j.state for j in self.client.view("jobs", model.Job) if j.name == self.job.name]
        return (list(state.values()), jobs) == (["standing"] * 2, ["standing"])

    def _recover(self) -> None:
        """A second plan for the node: a fresh spare takes the dead rank over."""
        wait_for("no spare is left", partial(no_spare, self.spare.agent.client()))
        self.fresh = self.fleet.park(self.job)
        self.job.left = [self.fresh]
        fresh = self.fresh.session

        def known() -> bool:
            return fresh in [
                s.session for s in self.client.view("spares", model.Spare) if s.state == "parked"
            ]

        wait_for("the controller sees the fresh spare", known)
        node = f"n{self.dead + 1}"
        self.second = plan = self.client.plan(Request(node=node, job=self.job.name, who="ann"))
        gate = Gate(digest=plan.digest, who="ann", reason="a test", typed=node)
        self.run_id = self.client.apply(plan.id, gate).id

        def ended() -> OperatorRun | None:
            for holder in self._processes():  # whoever is held at the cell's point once more
                holder.process.send_signal(signal.SIGCONT)
            return self._stopped()

        run = wait_for("the recovery ends", ended)
        assert run.state == "done", run
        self.run_state = f"{self.run_state}, recovery {run.state}"
        self._look()
        assert self.seen == "recovered", self.seen

    def _training(self) -> str:
        dead = self.dead if self.fresh else 1
        found = [r for r in self.fleet.ranks(self.job.name) if r.rank == dead and r.state == "training"]
        names = {(self.spare.session, 1): "new"}
        names |= {(self.job.ranks[1].session, 0): "old", (self.job.ranks[1].session, 2): "returned"}
        if self.fresh and self.second:
            names |= {(self.fresh.session, self.second.epoch_to): "recovered"}
        return ", ".join(names.get((r.session, r.epoch), f"{r.session} in {r.epoch}") for r in found)

    def _check_records(self) -> None:
        """The chair's records alone say the same; "first write wins" left one outcome and one ending."""
        records = self._records_of(self.plan)
        kinds = [record["kind"] for record in records]
        owner = {"new": "target:1", "old": "source:1", "returned": "source:1"}.get(self.seen)
        allowed = {
            "new": [["commit", "run"]],
            "old": [[], ["abort"]],
            "returned": [["commit", "return"]],
            "recovered": [[], ["abort"], ["commit", "run"]],
            "requeued": [[], ["abort"], ["commit"], ["commit", "dead"], ["commit", "run"]],
        }
        assert kinds in allowed[self.seen], kinds
        if self.second:
            assert [record["kind"] for record in self._records_of(self.second)] == ["commit", "run"]
        owners = [record["owners"] for record in records if record["owners"]]
        assert all(owner in (None, last["1"]) for last in owners[-1:]), (self.seen, records)

    def _records_of(self, plan: Plan | None) -> list[dict[str, Any]]:
        assert plan is not None
        path = self.fleet.agents[plan.chair.node].home / "handovers" / f"{plan.handover}.jsonl"
        lines = path.read_bytes().split(b"\0", 1)[0].splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def _claims(self) -> list[Any]:
        """Who says that it trains, or holds what it trained (RankStatus)."""
        return [r for r in self.fleet.ranks(self.job.name) if r.state in ("training", "frozen")]

    def _check_one_owner(self) -> None:
        """Every rank is trained by one process, all are in one epoch, and nobody else claims it."""
        found = self._claims()
        assert sorted((r.rank, r.state) for r in found) == [(rank, "training") for rank in range(3)], found
        assert len({r.epoch for r in found}) == 1, found

    def _check_requeued(self) -> None:
        """Every process has ended by itself, those that trained with a status that has them requeued."""
        status = {rank: holder.process.poll() for rank, holder in self.job.ranks.items()}
        assert status[0], status
        assert status[2], status
        assert status[1] or self.spare.process.poll(), status
        wait_for("the agents know that nobody is left", lambda: not self._claims())
        losses = self.job.trace().losses
        done = [len(lines) for lines in losses.values()]
        assert max(done) - min(done) <= 1, done
        for rank, lines in losses.items():
            assert lines == self.control.losses[rank][: len(lines)], f"rank {rank} went another way"

    def _finish(self) -> Any:
        """The job's end; whoever has no rank any more has ended with status 0, unless it was killed."""
        source, victim = self.job.ranks[1], self._process_killed()
        if self.seen == "new":
            self.job.ranks[1], self.job.left = self.spare, [source]
        if self.fresh:
            self.job.left = [self.job.ranks[self.dead], self.spare]
            self.job.ranks[self.dead] = self.fresh
        self.job.left = [h for h in self.job.left if h.process is not victim]
        return self.job.finish()

    def _process_killed(self) -> Process | None:
        return self._party(PROCESSES[self.victim]).process if self.victim in PROCESSES else None

    # ------------------------------------------------------------------------------------- sockets

    def _sockets(self) -> "dict[int, Counter[str]]":
        """TCP sockets of every rank's process, by their state."""
        return {rank: sockets_of(holder.process.pid) for rank, holder in self.job.ranks.items()}

    def _check_sockets(self, before: "dict[int, Counter[str]]") -> None:
        """Of the hand-over and of the groups that went nothing is left."""
        for rank in (0, 1 if self.dead == 2 else 2):
            pid = self.job.ranks[rank].process.pid

            def clean(rank: int = rank, pid: int = pid) -> bool:
                return sockets_of(pid) == before[rank]

            try:
                wait_for(f"rank {rank} has the sockets of before the hand-over", clean)
            except AssertionError as error:
                raise AssertionError(f"{error}: {before[rank]}, now {sockets_of(pid)}") from None

    # ------------------------------------------------------------------------------------- the end

    def logs(self) -> str:
        """What all processes said, for a cell that fails."""
        agents = "\n".join(f"== {a.name}\n{a.log[-1500:]}" for a in self.fleet.agents.values())
        run = ""
        with contextlib.suppress(Exception):
            run = str(self.client.one("run", self.run_id, OperatorRun))
        state = {h.process.pid: h.process.poll() for h in self._processes()}
        controller = self.home.log.read_text(errors="replace")[-3000:]
        return f"{self.job.logs()}\n{agents}\n== controller\n{controller}\n== run\n{run}\n== ended\n{state}"

    def _processes(self) -> list[Holder]:
        return [*self.job.ranks.values(), self.spare, *filter(None, [self.fresh])]

    def _clear(self, left: str) -> None:
        with contextlib.suppress(Exception):
            self.client.close()
        with contextlib.suppress(OSError, ValueError):
            pid = int(self.home.lock.read_text())
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for agent in self.fleet.agents.values():
            if agent.process is not None and agent.process.poll() is not None:
                agent.start("--allow-damage")
        for holder in self._processes():
            holder.process.send_signal(signal.SIGKILL)
        self.fleet.let_go(left)
        self.fleet.check_and_clear()
