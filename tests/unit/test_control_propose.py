"""What gridctl does by itself: plans, applied where that is automatic, and its own runs."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from runbook_world import fleet, plan_for, rank

from gridagent.wire import Blocker
from gridctl.control.autopilot import Autopilot
from gridctl.control.ledger import POLICY, Ledger
from gridctl.detect.standing import Standing
from gridctl.errors import Refused
from gridctl.home import Home
from gridctl.model.findings import Decision
from gridctl.model.fleet import Node, jobs
from gridctl.model.plans import PROPOSER, Gate, Plan, Request
from gridctl.model.policy import Policy
from gridctl.model.runs import Run
from gridctl.runbook.gates import seal

STANDS = {
    "n1": {"ranks": [rank(0, state="standing", ward=2)]},
    "n2": {"ranks": [rank(1, state="lost", mark="50 aa"), rank(0, job="other", world_size=1, session="o")]},
    "n3": {"ranks": [rank(2, state="standing", ward=1)]},
}
OPENED = {"incident": "i1", "state": "open", "kind": "rank_died", "title": "t", "node": "n2", "job": "lm"}
RUN = {"incident": "i1", "run": "r1", "plan": "p1", "node": "n2", "job": "lm"}


class Seat:
    """A controller's hands: plans are made of a fleet and journaled, what is applied or resumed is noted."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[Request] = []
        self.applied: list[str] = []
        self.resumed: list[tuple[str, Gate]] = []
        self.refuse: list[str] = []
        self.automatic, self.blockers = True, list[Blocker]()
        self.stands = True
        self.policy, self.read_only = Policy(auto=True, plan_expiry_s=1e12), ""
        self.nodes: dict[str, Node] = fleet()
        self.assessor: Any = SimpleNamespace(weigh=self._weigh)
        self.ledger = Ledger(Home.at(folder), "ann-1")
        if not self.ledger.incidents.all():
            self.ledger.append("incident", OPENED)
        self.autopilot = Autopilot(self)

    def _weigh(self, _: object) -> Any:
        return SimpleNamespace(action="swap_now", automatic=self.automatic, why=["held back: a cap"])

    async def plan(self, request: Request) -> Plan:
        self.asked.append(request)
        made = plan_for(fleet(**STANDS), self.policy, job=request.job)
        name = f"p{len(self.ledger.plans) + 1}"
        changes = {"blockers": self.blockers, "standing": self.stands}
        made = seal(msgspec.structs.replace(made, who=PROPOSER, id=name, **changes))
        self.ledger.append("plan", {"incident": "i1", "plan": msgspec.to_builtins(made)})
        return made

    async def apply(self, plan_id: str, gate: Gate) -> Run:
        if self.refuse:
            raise Refused(self.refuse.pop(0), "not now")
        self.applied.append(plan_id)
        self.ledger.append("run", {**RUN, "plan": plan_id, "state": "running", "who": gate.who})
        return self.ledger.run("r1")

    async def resume(self, run: str, gate: Gate) -> Run:
        if self.refuse:
            raise Refused(self.refuse.pop(0), "not now")
        self.resumed.append((run, gate))
        self.ledger.driven.add(run)
        return self.ledger.run(run)

    def propose(self) -> bool:
        (decision,) = [
            out for out in Standing().look(jobs(fleet(**STANDS).values()), 1.0) if isinstance(out, Decision)
        ]
        return asyncio.run(self.autopilot.propose(self.ledger.incident("i1"), decision))

    def notes(self) -> list[str]:
        return [moment.what for moment in self.ledger.incident("i1").timeline if moment.kind == "note"]

    def interrupted(self, who: str) -> None:
        """A run that its controller has left in its second step, and the next controller."""
        asyncio.run(self.plan(Request(node="n2", job="lm")))
        self.ledger.append("run", {**RUN, "state": "running", "who": who})
        self.ledger.append("step", {**RUN, "step": "preflight", "index": 0, "state": "done"})
        self.ledger.append("step", {**RUN, "step": "engage", "index": 1, "state": "started"})
        self.autopilot = Autopilot(self)

    def take_up(self) -> None:
        asyncio.run(self.autopilot.take_up())


@pytest.fixture
def seat(tmp_path: Path) -> Iterator[Seat]:
    made = Seat(tmp_path)
    yield made
    made.ledger.close()


def test_the_plan_is_for_the_job_that_stands_also_where_another_one_has_ranks_there(seat: Seat) -> None:
    assert seat.propose()
    assert [(request.node, request.job) for request in seat.asked] == [("n2", "lm")]
    assert seat.applied == ["p1"]
    assert seat.notes() == []


def test_what_is_not_automatic_is_planned_and_a_person_is_told_once(seat: Seat) -> None:
    seat.automatic = False
    assert seat.propose()
    assert (len(seat.asked), seat.applied) == (1, [])
    (note,) = seat.notes()
    assert "a person is needed: plan p1 is not applied by itself" in note
    assert "held back: a cap. `gridctl swap apply p1`" in note
    seat.autopilot = Autopilot(seat)  # the next controller
    assert seat.propose()
    assert len(seat.notes()) == 1


def test_where_it_is_not_armed_a_plan_is_all_there_is(seat: Seat) -> None:
    seat.policy, seat.automatic = Policy(plan_expiry_s=1e12), False
    assert seat.propose()
    assert (len(seat.asked), seat.applied, seat.notes()) == (1, [], [])


@pytest.mark.parametrize(
    ("code", "stands", "acts"),
    [
        ("driver-differs", False, True),  # the site has accepted that
        ("driver-differs", True, False),
        ("not-proven", True, False),
        ("environment", True, False),
        ("environment", False, False),
        ("torch-differs", False, False),
        ("what a later version finds", False, False),
    ],
)
def test_nothing_is_applied_by_itself_that_is_not_proven_bit_identical(
    seat: Seat, code: str, *, stands: bool, acts: bool
) -> None:
    seat.blockers = [Blocker(code=code, text="this and that", fatal=False)]
    seat.stands = stands
    assert seat.propose()
    assert seat.applied == (["p1"] if acts else [])
    assert [("although `auto` is armed: this and that." in note) for note in seat.notes()] == [True] * (
        not acts
    )


@pytest.mark.parametrize(("codes", "asked", "applied"), [(["busy"], 1, "p1"), (["stale-plan"], 2, "p2")])
def test_a_plan_that_could_not_be_applied_is_tried_again_and_a_stale_one_made_anew(
    seat: Seat, codes: list[str], asked: int, applied: str
) -> None:
    seat.refuse = codes
    assert not seat.propose()
    assert seat.propose()
    assert (len(seat.asked), seat.applied) == (asked, [applied])


def test_an_interrupted_run_of_its_own_is_resumed_once_by_the_next_controller(seat: Seat) -> None:
    seat.interrupted(POLICY)
    seat.take_up()
    ((run, gate),) = seat.resumed
    assert (run, gate.who, gate.reason) == ("r1", POLICY, "the controller that drove run r1 has ended")
    seat.ledger.driven.clear()  # it is let go again, by a lost lease perhaps
    seat.take_up()
    assert len(seat.resumed) == 1


def test_a_run_that_a_person_began_waits_and_says_so_once(seat: Seat) -> None:
    seat.interrupted("ann")
    for _ in range(2):
        seat.take_up()
        seat.autopilot = Autopilot(seat)
    assert seat.resumed == []
    (note,) = seat.notes()
    assert "run r1 of ann was interrupted in step engage by the end of its controller and waits" in note
    assert "`gridctl run resume r1` goes on, `gridctl run rollback r1` undoes it" in note


@pytest.mark.parametrize("what", ["aborted", "rolled-back", "rollback", "resume"])
def test_a_run_in_which_a_person_has_taken_a_hand_is_theirs_although_nothing_followed(
    tmp_path: Path, what: str
) -> None:
    seat = Seat(tmp_path)
    seat.interrupted(POLICY)
    seat.ledger.append("audit", {**RUN, "what": what, "who": "ann", "reason": "no", "text": "ann: no"})
    seat.ledger.close()
    seat = Seat(tmp_path)
    seat.take_up()
    assert seat.resumed == []
    assert "a person has begun or steered it" in seat.notes()[0]
    seat.ledger.close()


def test_a_held_run_is_left_to_a_person(seat: Seat) -> None:
    seat.interrupted(POLICY)
    seat.ledger.append("run", {**RUN, "state": "held", "code": "out-of-band", "text": "nan"})
    seat.take_up()
    assert (seat.resumed, seat.notes()) == ([], [])


@pytest.mark.parametrize(
    "hindrance", ["disarmed", "read-only", "frozen", "frozen there", "silent", "refused"]
)
def test_an_interrupted_run_waits_for_what_hinders_it_and_the_reason_is_told_once(
    seat: Seat, hindrance: str
) -> None:
    seat.interrupted(POLICY)
    policy, nodes = seat.policy, seat.nodes
    freeze = {"what": "freeze", "scope": "lm", "who": "ann", "reason": "look"}
    match hindrance:
        case "disarmed":
            seat.policy, words = Policy(), "`auto` is not armed any more"
        case "read-only":
            seat.read_only = words = "it is read-only"
        case "frozen":
            seat.ledger.append("audit", freeze)
            words = "lm is frozen"
        case "frozen there":
            seat.nodes, words = fleet(n4={"frozen": ["fleet"]}), "fleet is frozen"
        case "silent":
            silent = msgspec.structs.replace(nodes["n4"], reachable=False)
            seat.nodes, words = {**nodes, "n4": silent}, "no answer yet from n4"
        case _:
            seat.refuse, words = ["no-lease", "no-lease"], "not now"
    for _ in range(2):
        seat.take_up()
    assert seat.resumed == []
    (note,) = seat.notes()
    assert words in note
    seat.policy, seat.read_only, seat.nodes = policy, "", nodes
    if hindrance == "frozen":
        seat.ledger.append("audit", {**freeze, "what": "thaw"})
    seat.take_up()
    assert [run for run, _ in seat.resumed] == ["r1"]
