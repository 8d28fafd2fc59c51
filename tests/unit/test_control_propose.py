"""What the controller does about a decision: a plan for its own job, applied where that is automatic."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from runbook_world import fleet, plan_for, rank

from gridctl.control.controller import PROPOSER, Controller
from gridctl.detect.standing import Standing
from gridctl.errors import Refused
from gridctl.model.findings import Decision
from gridctl.model.fleet import jobs
from gridctl.model.plans import Plan, Request
from gridctl.model.policy import Policy
from gridctl.model.runs import Incident

STANDS = {
    "n1": {"ranks": [rank(0, state="standing", ward=2)]},
    "n2": {"ranks": [rank(1, state="lost", mark="50 aa"), rank(0, job="other", world_size=1, session="o")]},
    "n3": {"ranks": [rank(2, state="standing", ward=1)]},
}
INCIDENT = Incident(id="i1", kind="rank_died", state="open", title="t", node="n2", job="lm")


class Seat:
    """A controller's hands: plans are made of a real fleet, applying is written down."""

    def __init__(self, *, automatic: bool = True, refuse: tuple[str, ...] = ()) -> None:
        self.asked: list[Request] = []
        self.applied: list[str] = []
        self.open: Plan | None = None
        self.policy, self.read_only, self._unplanned = Policy(auto=True), "", dict[str, str]()
        self._refuse = list(refuse)
        choice = SimpleNamespace(action="swap_now", automatic=automatic)
        self.assessor = SimpleNamespace(weigh=lambda _: choice)
        self.ledger = SimpleNamespace(
            open_plan=lambda *_: self.open, incident=lambda _: INCIDENT, append=lambda *_: None
        )

    async def plan(self, request: Request) -> Plan:
        self.asked.append(request)
        made = plan_for(fleet(**STANDS), job=request.job)
        self.open = msgspec.structs.replace(made, who=PROPOSER, id=f"p{len(self.asked)}")
        return self.open

    async def apply(self, plan: str, _gate: Any) -> None:
        if self._refuse:
            raise Refused(self._refuse.pop(0), "not now")
        self.applied.append(plan)

    def propose(self) -> bool:
        (decision,) = [
            out for out in Standing().look(jobs(fleet(**STANDS).values()), 1.0) if isinstance(out, Decision)
        ]
        return asyncio.run(Controller._propose(self, INCIDENT, decision))  # type: ignore[arg-type]


def test_the_plan_is_for_the_job_that_stands_also_where_another_one_has_ranks_there() -> None:
    seat = Seat()
    assert seat.propose()
    assert [(request.node, request.job) for request in seat.asked] == [("n2", "lm")]
    assert seat.applied == ["p1"]


def test_what_is_not_automatic_is_planned_and_left_to_a_person() -> None:
    seat = Seat(automatic=False)
    assert seat.propose()
    assert (len(seat.asked), seat.applied) == (1, [])


@pytest.mark.parametrize(("codes", "asked", "applied"), [(("busy",), 1, "p1"), (("stale-plan",), 2, "p2")])
def test_a_plan_that_could_not_be_applied_is_tried_again_and_a_stale_one_made_anew(
    codes: tuple[str, ...], asked: int, applied: str
) -> None:
    seat = Seat(refuse=codes)
    assert not seat.propose()
    assert seat.propose()
    assert (len(seat.asked), seat.applied) == (asked, [applied])
