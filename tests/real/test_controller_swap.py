"""The controller with real agents and a real job: a rank leaves its node and the job trains on."""

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
