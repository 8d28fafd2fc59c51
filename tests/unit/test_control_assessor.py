"""What the controller makes of assessment: from journal, sentinel and poll to a choice in the incident."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from runbook_world import JOB, NOW, fleet, plan_for, rank, spare
from runbook_world import report as session_report
from test_assess_rates import BASE, finding
from test_runbook_reset import plan as reset_plan

from gridagent.wire import Blocker, StreamRecord
from gridctl.assess.forecast import NodeHistory, forecast
from gridctl.assess.outlook import NodeRisk
from gridctl.cli.incidents import _page as incident_page
from gridctl.cli.risk import _page as risk_page
from gridctl.control import assessor as assessor_module
from gridctl.control.assessor import Assessor
from gridctl.control.ledger import Ledger
from gridctl.control.sentinel import Sentinel
from gridctl.control.steplog import StepLog
from gridctl.errors import Refused
from gridctl.home import Home
from gridctl.model.fleet import Node
from gridctl.model.plans import PROPOSER, Request
from gridctl.model.policy import Caps, Policy
from gridctl.runbook.price import price
from gridctl.runbook.selection import select

ONE_GPU = {"gpus": 1, "ranks": [rank(1, gpus=[0])]}


class World:
    """A controller's state: real ledger and sentinel, nodes as a poll would find them."""

    def __init__(self, folder: Path, nodes: dict[str, Node]) -> None:
        async def propose(*_: object) -> bool:
            return True

        self._loop = asyncio.new_event_loop()
        self.home = Home.at(folder)
        self.ledger = Ledger(self.home, "ann-1")
        self.sentinel = Sentinel(self.ledger, StepLog(), propose)
        self.policy, self.read_only = Policy(), ""
        self.nodes = nodes
        self.assessor = Assessor(self)
        self.sentinel.nodes_changed(nodes.values())

    def say(self, node: str, metrics: dict[str, float], t_unix_s: float = NOW, device: str = "gpu:0") -> None:
        v = {"device": device, "v": metrics}
        record = StreamRecord(seq=1, boot="b", t_unix_s=t_unix_s, node=node, kind="sample", v=v)

        async def feed() -> None:
            self.sentinel.feed(record)

        self._loop.run_until_complete(feed())

    def close(self) -> None:
        self._loop.run_until_complete(self.sentinel.close())
        self._loop.close()
        self.ledger.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(assessor_module, "time", SimpleNamespace(time=lambda: NOW + 60))
    made = World(tmp_path, fleet(n2=ONE_GPU, n4={"gpus": 1, "spares": [spare(gpus=[0])]}))
    yield made
    made.close()


def test_a_quiet_node_has_the_base_rate_and_nothing_to_be_done(world: World) -> None:
    world.say("n2", {"temp_c": 40.0})
    found = {its.node: its for its in world.assessor.all()}
    assert set(found) == {"n1", "n2", "n3", "n4"}
    quiet = found["n2"]
    assert (quiet.verdict, quiet.indices[0].index, quiet.choice.action) == ("healthy", 0, "none")
    assert quiet.forecast.basis == "base rate"
    assert quiet.forecast.base_24h == pytest.approx(0.0039 / 8, rel=0.02)  # one GPU, not eight
    assert found["n1"].verdict == "blind"
    assert world.assessor.one("n2") == quiet
    with pytest.raises(Refused, match="has no node"):
        world.assessor.one("n9")
    world.assessor.turn()
    assert not world.ledger.incidents.all()


def test_the_choice_stands_in_the_incident_once_and_again_only_when_it_changes(world: World) -> None:
    world.say("n2", {"remap_pending": 1.0})
    seq = world.ledger.seq
    world.assessor.turn()
    world.assessor.turn()
    assert world.ledger.seq == seq + 1
    (incident,) = world.ledger.incidents.all()
    assert incident.choice["wanted"] in ("reset_after_job", "swap_now")
    assert incident.choice["automatic"] is False
    assert "row_remap_pending" in incident.choice["basis"]
    assert [a["action"] for a in incident.choice["alternatives"]] == [
        "watch", "reset_after_job", "swap_in_window", "swap_now",
    ]  # fmt: skip
    world.say("n2", {"remap_failed": 1.0}, NOW + 1)
    world.assessor.turn()
    (incident,) = world.ledger.incidents.all()
    assert (incident.choice["wanted"], incident.choice["action"]) == ("swap_now", "swap_now")
    assert incident.choice["p_24h"] == 1.0
    told = [moment.what for moment in incident.timeline if "ought to be done" in moment.what]
    assert len(told) == 2
    shown = incident_page(incident).text(None, False)
    assert "once nobody runs there: gridctl reset plan n2 --gpu 0" in shown
    assert "Alternatives, expected within 24 h" in shown
    assert "swap_in_window" in shown
    assert "the fault is there: row_remap_failure" in shown


@pytest.fixture
def _failed(world: World) -> None:
    world.say("n2", {"remap_failed": 1.0})


@pytest.mark.usefixtures("_failed")
def test_only_an_armed_site_acts_by_itself_and_no_further_than_its_caps(world: World) -> None:
    (incident,) = world.ledger.incidents.all()
    assert not world.assessor.weigh(incident).automatic
    world.policy = Policy(auto=True)
    assert world.assessor.weigh(incident).automatic
    world.policy = Policy(auto=True, caps=Caps(node_day=0))
    held_back = world.assessor.weigh(incident)
    assert (held_back.action, held_back.automatic) == ("ask", False)
    assert "node n2: 0 hand-overs within 24 hours, the limit is 0" in held_back.why[0]


@pytest.mark.usefixtures("_failed")
def test_a_reset_leaves_no_node_and_counts_in_no_cap(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assessor_module, "time", time)  # that of the journal's records
    (incident,) = world.ledger.incidents.all()
    world.policy = Policy(auto=True)
    made = reset_plan("gpu:1", waiver="it burns")
    for plan in (made, plan_for(fleet())):
        run = f"r-{plan.runbook}"
        about = {"incident": incident.id, "run": run, "plan": plan.id, "node": plan.node, "job": plan.job}
        plan = msgspec.structs.replace(plan, id=run, node="n2")
        world.ledger.append("plan", {"incident": incident.id, "plan": msgspec.to_builtins(plan)})
        world.ledger.append("run", {**about, "plan": run, "state": "running"})
        automatic = world.assessor.weigh(incident).automatic
        assert automatic == (plan.runbook == "reset"), "a hand-over counts"
    shown = world.ledger.incident(incident.id)
    assert "plan r-reset: gpu:1 is reset, without evidence: it burns" in [m.what for m in shown.timeline]
    late = made.created_unix_s - 1e9
    assert world.ledger.open_plan(incident.id, late) is None, "no rank leaves by a reset, and one was used"


@pytest.mark.usefixtures("_failed")
@pytest.mark.parametrize(
    ("status", "action", "why"),
    [
        (
            {"cordoned": True, "cordon_owner": "bob", "cordon_reason": "dimm"},
            "watch",
            "cordoned by bob: dimm",
        ),
        ({"frozen": [JOB]}, "watch", f"frozen: {JOB}"),
        ({"frozen": ["another"]}, "swap_now", "remap_failed"),
        ({"cordoned": True, "cordon_owner": "gridctl"}, "swap_now", "remap_failed"),
    ],
)
def test_whoever_holds_the_node_decides(world: World, status: dict[str, Any], action: str, why: str) -> None:
    world.policy = Policy(auto=True)
    before = world.nodes["n2"]
    assert before.status is not None
    changed = msgspec.structs.replace(before.status, **status)
    world.nodes["n2"] = msgspec.structs.replace(before, status=changed)
    found = world.assessor.one("n2").choice
    assert (found.wanted, found.action) == ("swap_now", action)
    assert why in found.why[0]


@pytest.mark.usefixtures("_failed")
def test_without_a_spare_a_person_is_asked(world: World) -> None:
    world.nodes.update(fleet(n4={"spares": []}, n2=ONE_GPU))
    found = world.assessor.one("n2").choice
    assert found.action == "ask"
    assert "1 ranks would move, and spares take 0" in found.why[0]


@pytest.mark.usefixtures("_failed")
def test_a_node_without_ranks_is_quarantined(world: World) -> None:
    world.nodes.update(fleet(n2={"ranks": []}))
    assert world.assessor.one("n2").choice.action == "quarantine"


def test_history_outlives_the_controller(world: World, tmp_path: Path) -> None:
    world.say("n2", {"remap_failed": 1.0}, NOW - 7200)
    world.ledger.append("audit", {"what": "uncordon", "node": "n2", "who": "ann", "reason": "new GPU"})
    world.ledger.close()
    again = Ledger(Home.at(tmp_path), "ann-1")
    later = again.record.node("n2", NOW)
    assert (later.faults, round(later.watched_h)) == (1, 2)
    assert later.repaired_h_ago is not None
    again.close()
    world.ledger = Ledger(Home.at(tmp_path), "ann-1")


def test_every_answer_goes_through_json(world: World) -> None:
    world.say("n2", {"remap_failed": 1.0})
    found = world.assessor.all()
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[NodeRisk]) == found
    page = risk_page(next(its for its in found if its.node == "n2"))
    shown = page.text(None, False)
    for word in ("risk index: ", "By class", "gpu_memory", "row_remap_failure (fatal, decisive)", "swap_now"):
        assert word in shown


def test_a_plan_weighs_the_forecast_of_both_nodes() -> None:
    nodes = fleet(n4={"spares": [spare()]})
    policy = Policy(window_h=12.0, recovery_h=2.0)
    selection = select(Request(node="n2", who="ann"), nodes, policy)
    reports = [session_report(1)]
    leaves = forecast(BASE, [finding("row_remap_pending")])
    takes = forecast(BASE, node=NodeHistory(repaired_h_ago=1.0))
    found = price(selection, reports, policy, (), {"n2": leaves, "n4": takes})
    assert (found.defer_h, found.p_fault) == (12.0, pytest.approx(leaves.p(12)))
    assert "row_remap_pending" in found.p_fault_basis
    pause_gpu_h = 3 * found.pause_s / 3600
    assert found.now_gpu_h == pytest.approx(pause_gpu_h + takes.p(12) * 2 * 3)
    assert found.deferred_gpu_h == pytest.approx(leaves.p(12) * 2 * 3 + (1 - leaves.p(12)) * pause_gpu_h)
    assert any(
        "recovery if the spare fails" in line and "repaired 1 h ago" in line for line in found.comparison
    )
    bare = price(selection, reports, Policy(), (), {})
    assert bare.p_fault_basis.startswith("base rate")
    assert bare.defer_h == 24.0


STANDS = {"n1": {"ranks": [rank(0, state="standing")]}, "n3": {"ranks": [rank(2, state="standing", ward=1)]}}


def stand(world: World, **more: Any) -> None:
    """Rank 1 on n2 has died and the others stand."""
    world.nodes.update(fleet(**{**STANDS, "n2": {"ranks": [rank(1, state="lost")], **more}}))

    async def told() -> None:
        world.sentinel.nodes_changed(world.nodes.values())

    world._loop.run_until_complete(told())


def test_while_a_job_stands_its_node_is_not_one_of_which_nothing_is_known(world: World) -> None:
    world.policy = Policy(auto=True, caps=Caps(node_day=0, fleet_hour_min=0))
    stand(world)
    world.assessor.turn()
    (incident,) = world.ledger.incidents.all()
    assert (incident.kind, incident.job) == ("rank_died", "lm")
    assert (incident.choice["action"], incident.choice["automatic"]) == ("swap_now", True)
    assert incident.choice["basis"] == "base rate", "the death says nothing of the node"
    shown = incident_page(incident).text(None, False)
    assert "ought to be done: swap_now, by itself" in " ".join(shown.split())
    assert "nothing that weighs is known" not in shown
    (told,) = [line for line in shown.splitlines() if "finding rank_died" in line]
    assert "GRIDAGENT_HOLD_S" in told
    assert "gridctl swap plan n2" in told
    assert world.assessor.one("n2").verdict == "blind"
    world.nodes.update(fleet(n4={"spares": []}, **STANDS, n2={"ranks": [rank(1, state="lost")]}))
    held = world.assessor.one("n2").choice
    assert (held.action, held.automatic) == ("ask", False)
    assert "park one" in held.why[0]
    world.nodes.update(fleet())
    world.sentinel.nodes_changed(world.nodes.values())
    assert world.assessor.one("n2").choice.action != "swap_now"
    assert world.ledger.incidents.all()[0].state == "closed"


def test_nothing_is_said_to_be_done_by_itself_that_waits_for_a_person(world: World) -> None:
    world.policy = Policy(auto=True)
    stand(world)
    (incident,) = world.ledger.incidents.all()
    world.assessor.turn()
    assert world.ledger.incident(incident.id).choice["automatic"]
    unproven = Blocker(code="not-proven", text="rank 1 died too early", fatal=False)
    spoken = {"who": PROPOSER, "blockers": [unproven], "standing": True}
    nodes = fleet(**STANDS, n2={"ranks": [rank(1, state="lost", mark="50 aa")]})
    plan = msgspec.structs.replace(plan_for(nodes), incident=incident.id, **spoken)
    world.ledger.append("plan", {"incident": incident.id, "plan": msgspec.to_builtins(plan)})
    world.assessor.turn()
    choice = world.ledger.incident(incident.id).choice
    assert (choice["action"], choice["automatic"]) == ("swap_now", False)
    assert choice["why"][0] == "a person applies the plan: rank 1 died too early"
    shown = " ".join(incident_page(world.ledger.incident(incident.id)).text(None, False).split())
    assert "ought to be done: swap_now because: a person applies" in shown
    world.read_only = "it is read-only"
    assert not world.assessor.one("n2").choice.automatic


def test_a_person_s_cordon_holds_a_recovery_as_well(world: World) -> None:
    world.policy = Policy(auto=True)
    stand(world, cordoned=True, cordon_owner="bob", cordon_reason="dimm")
    found = world.assessor.one("n2").choice
    assert (found.action, found.automatic) == ("watch", False)
    assert "cordoned by bob: dimm" in found.why[0]
