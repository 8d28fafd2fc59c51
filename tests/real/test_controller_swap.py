"""The controller with real agents and a real job: a rank leaves its node and the job trains on."""

import pytest
from swap_fleet import ended, gate, parked, swap_fleet, training, wait_for

from gridagent.journal import verify
from gridctl.control.client import Client
from gridctl.model.fleet import Node
from gridctl.model.plans import Request
from gridctl.model.runs import Incident


def closed(client: Client, name: str) -> Incident | None:
    incident = client.one("incident", name, Incident)
    return incident if incident.state == "closed" else None


def test_a_node_leaves_its_job_and_everything_is_in_the_journal() -> None:
    with swap_fleet() as fleet:
        fleet.nodes("n1", "n2", "n3", "n4")
        client = fleet.controller()
        fleet.train("n1", "n2", "n3")
        fleet.park("n4")
        job = training(client)
        parked(client)
        assert (job.epoch, job.world_size) == (0, 3)
        plan = client.plan(Request(node="n2", who="ann"))
        assert [(move.rank, move.target.node) for move in plan.moves] == [(1, "n4")]
        assert plan.chair.node in ("n1", "n3")
        assert plan.bit_identical, plan.blockers
        run = client.apply(plan.id, gate(plan))
        done = ended(client, run.id)
        assert (done.state, done.text) == ("done", ""), done
        nodes = {node.name: node.status for node in client.view("nodes", Node)}
        job = training(client, step=job.step + 5)
        assert (job.epoch, job.ranks[1].node) == (1, "n4")
        cordoned = nodes["n2"]
        assert cordoned is not None
        assert (cordoned.cordoned, cordoned.cordon_owner) == (True, "gridctl")
        incident = wait_for("the incident is closed", lambda: closed(client, plan.incident))
        assert (incident.kind, incident.runs) == ("manual", [run.id])
        told = [moment.kind for moment in incident.timeline]
        assert [kind for kind in told if kind not in ("note", "lease")][:4] == [
            "incident",
            "plan",
            "gate",
            "run",
        ]
        fleet.finish_job()
        client.stop()
        assert verify(fleet.home.journal).ok


def test_a_spare_that_was_parked_without_the_jobs_variables_is_no_bit_identical_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with swap_fleet(execute=True) as fleet:  # what a process was started with, a fork has not
        fleet.nodes("n1", "n2", "n3", "n4", config='env_allow = ["MYJOB_*"]')
        client = fleet.controller()
        with monkeypatch.context() as job:
            job.setenv("LOSS_SCALE", "0.7")
            job.setenv("MYJOB_LR", "0.003")
            job.setenv("GRIDAGENT_HOLD_S", "60")
            fleet.train("n1", "n2")
            job.delenv("MYJOB_LR")
            fleet.park("n3")
        fleet.park("n4")
        training(client)
        parked(client, 2)
        alike = client.plan(Request(node="n2", to="n3", who="ann"))
        assert alike.bit_identical, alike.blockers
        other = client.plan(Request(node="n2", to="n4", who="ann"))
        assert [(blocker.code, blocker.fatal) for blocker in other.blockers] == [("environment", False)]
        assert "than in the job: LOSS_SCALE (values" in other.blockers[0].text
        assert not other.bit_identical
        launch = fleet.agents["n2"].client().get("/v1/launch?job=lm&rank=1")
        assert launch["env"]["GRIDAGENT_HOLD_S"] == "60"
        run = client.apply(alike.id, gate(alike))
        assert ended(client, run.id).state == "done"
        again = client.plan(Request(node="n3", to="n4", who="ann"))
        assert "than in the job: LOSS_SCALE (values" in again.blockers[0].text, (
            "it tells what its script found"
        )
        (fleet.out / "stop").touch()
