"""The controller as a watchman: findings become incidents and plans; trust is passed on; one steers."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from agents import DEADLINE_S
from swap_fleet import SwapFleet, ended, gate, parked, swap_fleet, training, wait_for

from gridagent.journal import Tail, read
from gridctl.control.client import Client
from gridctl.history import History
from gridctl.history.report.derive import report
from gridctl.history.report.source import read as read_incident
from gridctl.model.fleet import Node
from gridctl.model.plans import Gate, Plan, Request
from gridctl.model.runs import Incident, Run

RECORDING = Path(__file__).parents[2] / "recordings" / "ecc-storm.jsonl.gz"
YES = Gate(who="ann", reason="a test", yes=True)


def proposed(client: Client) -> Plan | None:
    plans = client.view("plans", Plan)
    return plans[0] if plans else None


def said(fleet: SwapFleet) -> list[tuple[str, str]]:
    kinds = ("finding", "decision", "incident", "plan")
    return [(r.kind, str(r.data.get("kind", ""))) for r in read(fleet.home.journal) if r.kind in kinds]


def test_a_failing_node_becomes_an_incident_with_a_plan_that_ends_it() -> None:
    with swap_fleet() as fleet:
        fleet.nodes("n1", "n3", "n4")
        fleet.nodes("n2", config=f'sources = ["replay:{RECORDING}?node=n2&speed=40&start=trigger"]')
        client = fleet.controller()
        fleet.train("n1", "n2", "n3")
        fleet.park("n4")
        training(client)
        parked(client)
        (fleet.agents["n2"].home / "replay.go").touch()
        plan = wait_for("a plan is proposed", lambda: proposed(client))
        assert (plan.node, plan.who) == ("n2", "gridctl")
        incident = client.one("incident", plan.incident, Incident)
        assert incident.state == "open"
        assert incident.findings
        assert incident.decision["decision"] == "swap_now"
        before = said(fleet)
        client = fleet.kill_controller()
        seen = fleet.agents["n2"].client().status().stream_seq
        wait_for("the stream was read again", lambda: client.health()["followed"].get("n2", 0) >= seen)
        assert said(fleet) == before, "nothing is found twice after a restart"
        run = client.apply(plan.id, gate(plan, "memory errors"))
        found = ended(client, run.id)
        assert found.state == "done", found
        wait_for("the incident is closed", lambda: closed(client, plan.incident))
        told = [m.kind for m in client.one("incident", plan.incident, Incident).timeline]
        order = [told.index(k) for k in ("incident", "finding", "decision", "plan", "gate", "run")]
        assert order == sorted(order)
        assert "note" in told, "the phases that the agents told of"
        fleet.finish_job()
        made = report(read_incident(History(fleet.home.journal), plan.incident))
        assert "Xid 48" in " ".join(line for seen in made.evidence for line in seen.lines)
        assert "swap_now" in [decision.decision for decision in made.decisions]
        assert all(
            option.rejected or option.action == made.choices[-1].action for option in made.choices[-1].options
        )
        assert [(g.who, g.reason, g.run) for g in made.gates] == [("ann", "memory errors", run.id)]
        (cut,) = made.cuts
        assert (cut.outcome, cut.ranks, set(cut.digests)) == ("commit", 3, {"1"})
        assert made.cost is not None
        assert made.cost.gpu_h == 3 * cut.pause_s / 3600
        assert {phase.phase for phase in made.phases} >= {"armed", "prepared", "committed", "running"}
        assert made.follow_ups[0].what.startswith("n2 is cordoned")
        assert made.unread == 0


def test_a_site_that_has_armed_it_has_a_failing_node_left_without_a_person() -> None:
    with swap_fleet() as fleet:
        fleet.nodes("n1", "n3", "n4")
        fleet.nodes("n2", config=f'sources = ["replay:{RECORDING}?node=n2&speed=40&start=trigger"]')
        fleet.home.policy_file.write_text("auto = true\n")
        client = fleet.controller()
        fleet.train("n1", "n2", "n3")
        fleet.park("n4")
        training(client)
        parked(client)
        (fleet.agents["n2"].home / "replay.go").touch()
        (run,) = wait_for("a run was begun", lambda: client.view("runs", Run))
        found = ended(client, run.id)
        told = [(step.name, step.state, step.error) for step in found.steps]
        assert (found.state, found.node, found.who) == ("done", "n2", "policy"), (
            found.code,
            found.text,
            told,
        )
        wait_for("the incident is closed", lambda: closed(client, found.incident))
        assert len(client.view("runs", Run)) == 1
        fleet.finish_job()


def test_a_running_controller_takes_up_a_sites_word_on_an_xid() -> None:
    with swap_fleet() as fleet:
        log = fleet.root / "kern.log"
        log.touch()
        fleet.nodes("n1", config=f'sources = ["log:{log}?as=kmsg"]')
        fleet.controller()
        buses = iter(range(0x10, 0x1000))

        def told(rule: str) -> bool:
            """Another GPU falls off the bus; is the rule among those of the findings so far?"""
            with log.open("a") as file:
                bus = next(buses)
                file.write(
                    f"NVRM: Xid (PCI:{bus >> 8:04x}:{bus & 255:02x}:00): 79, pid=1, GPU has fallen off\n"
                )
            return any(r.data.get("rule") == rule for r in read(fleet.home.journal) if r.kind == "finding")

        wait_for("as delivered", lambda: told("xid.79"))
        override = '[xid.79]\nreason = "a test"\npreempt = false\n'
        fleet.home.policy_file.write_text(override)
        wait_for("as the site says", lambda: told("xid.79+site"))
        found = [r.data for r in read(fleet.home.journal) if r.data.get("rule") == "xid.79+site"]
        assert not any(data["preempt_job"] for data in found if data["type"] == "finding")


def closed(client: Client, name: str) -> bool:
    return client.one("incident", name, Incident).state == "closed"


def test_a_controller_that_slept_past_its_lease_does_not_steer_any_more() -> None:
    with swap_fleet() as fleet:
        fleet.nodes("n1", "n2", "n3", "n4")
        client = fleet.controller()
        fleet.train("n1", "n2", "n3")
        fleet.park("n4")
        training(client)
        parked(client)
        plan = client.plan(Request(node="n2", who="ann"))
        tail = Tail(fleet.home.journal, client.health()["journal_seq"])
        run = client.apply(plan.id, gate(plan))
        wait_for("specialise", lambda: any(r.data.get("step") == "specialise" for r in tail.new()))
        os.kill(fleet.controller_pid(), signal.SIGSTOP)
        agents = [agent.client() for agent in fleet.agents.values()]
        wait_for("the lease runs out", lambda: all(a.status().lease_left_s == 0 for a in agents))
        fence = max(agent.status().fence for agent in agents) + 1
        assert all(agent.lease("rival", fence)["granted"] for agent in agents)
        os.kill(fleet.controller_pid(), signal.SIGCONT)
        wait_for("it lets go", lambda: client.one("run", run.id, Run).state == "interrupted")
        timeline = client.one("incident", plan.incident, Incident).timeline
        assert any("was let go" in moment.what and "fence" in moment.what for moment in timeline)
        for agent in agents:
            agent.lease("rival", fence, 0.0)
        client.resume(run.id, YES)
        found = ended(client, run.id)
        assert found.state == "done", found
        fleet.finish_job()


def test_a_revoked_node_is_not_listened_to_and_the_others_learn_of_it() -> None:
    with swap_fleet() as fleet:
        fleet.nodes("n1", "n2")
        client = fleet.controller()
        fleet.authority.revoke("n2", "keyCompromise")
        wait_for("n2 is refused", lambda: "revoked" in state(client, "n2").error)
        listed = (fleet.home.trust / "crl.pem").read_bytes()
        other = fleet.agents["n1"].trust / "crl.pem"
        wait_for("n1 has the list", lambda: other.exists() and other.read_bytes() == listed)
        assert state(client, "n1").reachable


def state(client: Client, name: str) -> Node:
    return next(node for node in client.view("nodes", Node) if node.name == name)


def test_nodes_can_join_where_the_controller_listens() -> None:
    with swap_fleet() as fleet:
        fleet.nodes("n1")
        code = (
            "import sys; from gridctl.control import main; from gridctl.home import Home;"
            "main(Home.at(sys.argv[1]), listen='127.0.0.1:0')"
        )
        with fleet.home.log.open("wb") as log:
            process = subprocess.Popen([sys.executable, "-c", code, str(fleet.root)], stdout=log, stderr=log)
        try:
            url = wait_for("it listens", lambda: text_of(fleet.home.trust / "join.url"))
            assert url.startswith("https://127.0.0.1:")
            client = fleet.controller()
            assert client.health()["pid"] == process.pid
            client.stop()
            assert process.wait(DEADLINE_S) == 0
            assert not (fleet.home.trust / "join.url").exists()
        finally:
            process.kill()
            process.wait(DEADLINE_S)


def text_of(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""
