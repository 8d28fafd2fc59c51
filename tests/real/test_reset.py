"""`gridctl reset` with a real controller and real agents. What resets or reboots is a script on the node that
writes down what it was called with: hardware that nobody has here begins behind it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Client, fleet
from agents import Refused as Turned
from command_line import data, gridctl
from nvml_stub import Stub, library, stub
from swap_fleet import SwapFleet, ended, gate, swap_fleet, wait_for
from test_agent_ops import Background

from gridagent.journal import read
from gridctl.errors import Refused
from gridctl.model.fleet import Node
from gridctl.model.plans import Plan, Request
from gridctl.model.runs import Incident

__all__ = ["library", "stub"]  # fixtures

#: What the site has put on the node. It tells of itself, waits while it is held, and heals the GPU.
SCRIPT = """#!/bin/sh
cd {folder}
echo "$*" >> called
cat /proc/$(cat pid)/task/$(cat pid)/children > children; echo $$ > own
while [ -e hold ]; do sleep 0.02; done
printf 'api_key=hunter2 \\033[31mred\\n'
[ -e fails ] && exit 3
[ "$1" = reboot ] && echo boot-2 > proc/sys/kernel/random/boot_id && kill -9 $(cat pid) && exit 0
echo 0 > {stub}/new && mv {stub}/new {stub}/1/field230
"""


class Site:
    """A node with two GPUs, of which the driver wants one to be reset."""

    def __init__(self, fleet: SwapFleet, stub: Stub) -> None:
        self.fleet, self.folder, self.stub = fleet, fleet.root / "site", stub
        boot = self.folder / "proc/sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        boot.write_text("boot-1\n")
        script = self.folder / "reset.sh"
        script.write_text(SCRIPT.format(folder=self.folder, stub=stub.root))
        script.chmod(0o700)
        stub.set("count", 2)
        stub.set("1/field230", 1)
        config = f'sources = ["nvml"]\nsysroot = "{self.folder}"\n'
        config += f'reset_gpu = ["{script}", "-i", "{{uuid}}"]\nreboot = ["{script}", "reboot"]'
        (self.agent,) = fleet.nodes("n1", config=config)
        self.started()
        self.client = fleet.controller()
        wait_for("the incident", lambda: self.client.view("incidents", Incident))

    def started(self) -> Agent:
        assert self.agent.process
        (self.folder / "pid").write_text(str(self.agent.process.pid))
        return self.agent

    def plan(self, *devices: str, waiver: str = "") -> Plan:
        wish = Request(node="n1", devices=[*devices], who="ann", runbook="reset", waiver=waiver)
        return self.client.plan(wish)

    def hold(self) -> None:
        (self.folder / "hold").touch()

    def let(self) -> None:
        (self.folder / "hold").unlink()

    @property
    def calls(self) -> list[str]:
        called = self.folder / "called"
        return called.read_text().splitlines() if called.exists() else []

    def is_called(self) -> None:
        wait_for("the script runs", lambda: (self.folder / "own").exists())

    def journal(self) -> list[dict[str, Any]]:
        return [{"kind": record.kind, **record.data} for record in read(self.fleet.home.journal)]


@pytest.fixture
def site(stub: Stub) -> Iterator[Site]:
    with swap_fleet() as fleet:
        yield Site(fleet, stub)


def test_a_gpu_is_reset_once_evidence_was_taken_and_the_node_stays_cordoned(site: Site) -> None:
    root = site.fleet.root
    (incident,) = site.client.view("incidents", Incident)
    assert "gridctl reset plan n1 --gpu 1" in gridctl(root, "incident", "show", incident.id).stdout
    plan = data(root, "reset", "plan", "n1", "--gpu", "1")
    assert plan["incident"] == incident.id
    assert any("no way back" in note and "error counters" in note for note in plan["notes"])
    assert site.calls == []
    assert f"gridctl reset apply {plan['id']}" in gridctl(root, "swap", "apply", plan["id"], expect=3).stderr
    dry = data(root, "reset", "apply", plan["id"], "--dry-run")
    kinds = [(call["when"], call["kind"]) for call in dry if call["method"] == "POST" and call["kind"]]
    assert kinds == [
        ("do", "node.cordon"),
        ("do", "evidence.collect"),
        ("do", "node.reset"),
        ("do", "run.end"),
        ("undo", "node.uncordon"),
        ("undo", "run.end"),
    ]
    assert site.calls == []
    run = data(root, "reset", "apply", plan["id"], "--yes", "--reason", "the driver asks for it")
    assert run["state"] == "done"
    assert site.calls == ["-i GPU-00000000-0000-4000-8000-000000000001"]
    assert (site.folder / "children").read_text().split() == [(site.folder / "own").read_text().strip()]
    told = site.journal()
    begun = next(i for i, d in enumerate(told) if (d.get("step"), d.get("state")) == ("reset", "started"))
    taken = next(
        i for i, d in enumerate(told) if (d.get("what"), d.get("state")) == ("evidence", "collected")
    )
    assert taken < begun
    assert Path(told[taken]["file"]).parent == root / "evidence"
    (value,) = next(step for step in run["steps"] if step["name"] == "reset")["values"]
    assert (value["status"], "hunter2" in value["text"]) == (0, False)
    assert "\x1b" not in gridctl(root, "run", "show", run["id"]).stdout
    status = site.agent.client().status()
    assert (status.cordoned, status.running_op) == (True, "")
    assert site.client.one("incident", incident.id, Incident).state == "closed"
    with pytest.raises(Refused, match="its evidence is of then"):
        site.client.plan(
            Request(node="n1", devices=["gpu:1"], who="ann", runbook="reset", incident=incident.id)
        )


def test_without_evidence_nothing_is_reset_but_on_a_persons_word(site: Site) -> None:
    (site.agent.home / "evidence").write_text("no folder")
    plan = site.plan("gpu:1")
    run = ended(site.client, site.client.apply(plan.id, gate(plan)).id)
    assert (run.state, run.code) == ("aborted", "evidence-failed"), run
    assert "gridctl reset plan n1 --gpu 1 --without-evidence WHY" in run.text
    assert site.calls == []
    assert not site.agent.client().status().cordoned
    (site.folder / "fails").touch()
    plan = site.plan("gpu:1", waiver="it burns")
    run = ended(site.client, site.client.apply(plan.id, gate(plan)).id)
    assert (run.state, run.code) == ("aborted", "reset-failed"), run
    assert "ended with status 3: api_key=[redacted]" in run.text
    assert len(site.calls) == 1
    assert site.agent.client().status().cordoned, "nobody knows what the command has done to the GPU"
    assert [d["plan"]["waiver"] for d in site.journal() if d["kind"] == "plan"] == ["", "it burns"]
    peer = site.fleet.peer(site.agent, role="spare")
    with pytest.raises(Refused, match="a spare is parked on n1") as refused:
        site.plan("gpu:1")
    assert refused.value.code == "not-idle"
    peer.end()
    wait_for("the spare is gone", lambda: not site.agent.client().status().spares)
    with pytest.raises(Refused, match="tells nothing of gpu:7"):
        site.plan("gpu:7")


def test_another_gpu_that_has_got_the_number_since_is_not_reset(site: Site) -> None:
    plan = site.plan("gpu:0", waiver="a drill")
    assert any("gpu:0 is GPU-00000000-0000-4000-8000-000000000000" in note for note in plan.notes)
    site.agent.end()
    site.stub.set("0/bus", 0x2A)  # the first has fallen off the bus, and the driver counts anew
    site.stub.set("0/uuid", 1)
    site.stub.set("count", 1)
    site.agent.start()
    wait_for("it knows its processes", lambda: site.agent.client().status().complete)
    run = ended(site.client, site.client.apply(plan.id, gate(plan)).id)
    assert (run.state, run.code) == ("aborted", "bad-request"), run
    assert "meant was" in run.text
    assert site.calls == []
    assert not site.agent.client().status().cordoned


def test_neither_the_end_of_the_controller_nor_that_of_the_agent_resets_twice(site: Site) -> None:
    site.hold()
    plan = site.plan("gpu:1", waiver="a drill")
    run = site.client.apply(plan.id, gate(plan)).id
    site.is_called()
    site.client = site.fleet.kill_controller()
    assert ended(site.client, run).state == "interrupted"
    site.client.resume(run, gate(plan))
    with pytest.raises(Refused, match="may have destroyed already"):
        site.client.rollback(run, gate(plan))
    site.agent.end(signal.SIGKILL)
    site.agent.start()
    site.let()
    held = ended(site.client, run)
    assert (held.state, held.code) == ("held", "outcome-unknown"), held
    assert "whether gpu:1 of n1 was reset is not known" in held.text
    site.client.resume(run, gate(plan))
    done = ended(site.client, run)
    assert done.state == "done", done
    assert "accepted by ann" in next(step.error for step in done.steps if step.name == "reset")
    assert len(site.calls) == 1


def test_a_reboot_is_done_when_the_node_answers_in_another_boot(site: Site) -> None:
    site.fleet.nodes("n2", "n3")  # the lease is of a majority, which must outlive the node
    wait_for("they answer", lambda: all(node.reachable for node in site.client.view("nodes", Node)))
    site.hold()
    plan = site.plan(waiver="a drill")
    run = site.client.apply(plan.id, gate(plan)).id
    site.is_called()
    site.client = site.fleet.kill_controller()
    site.let()
    assert site.agent.process
    assert site.agent.process.wait(60) == -signal.SIGKILL
    site.client.resume(run, gate(plan))
    site.agent.start()
    done = ended(site.client, run)
    assert done.state == "done", done
    node = next(node for node in site.client.view("nodes", Node) if node.name == "n1")
    assert node.status
    assert (node.status.boot_id, node.status.cordoned) == ("boot-2", True)
    site.agent.end(signal.SIGKILL)
    op = site.agent.start().client().get(f"/v1/ops/{run}.reset.0?wait_s=0")
    assert (op["state"], op["value"]["text"]) == ("done", "the node has booted since")
    assert site.calls == ["reboot"]


def test_the_agent_itself_refuses_while_anything_is_there_and_acts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "ipmitool"  # which collections ask
    slow.write_text(
        f"#!/bin/sh\ntouch {tmp_path}/asked\nwhile ! [ -e {tmp_path}/told ]; do sleep 0.02; done\n"
    )
    slow.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = tmp_path / "reset.sh"
    script.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/called\n[ $1 = sleeps ] && sleep 600\nexit 7\n")
    script.chmod(0o700)
    with fleet() as world:
        bare = world.agent("n2").start().client()
        assert bare.status().resets == []
        bare.lease()
        assert refusal(bare, boot=bare.status().boot_id) == "no-command"
        agent = world.agent(
            config=f'reset_gpu = ["{script}", "sleeps", "{{index}}"]\nreboot = ["{script}", "now"]'
        )
        client = agent.start().client()
        client.lease()
        args = {"boot": client.status().boot_id}
        assert client.status().resets == ["gpu", "reboot"]
        assert refusal(client, **args) == "not-idle", "it is not cordoned"
        client.op("node.cordon", {"reason": "r"})
        peer = world.peer(agent, role="rank", job="j", rank=0, world_size=1)
        assert refusal(client, **args) == "not-idle", "a rank is there"
        peer.send("farewell", reason="finished")
        wait_for("it has ended", lambda: client.status().ranks[0].state == "finished")
        assert refusal(client, boot="another") == "bad-request"
        assert refusal(client, **args, device="nic:0") == "bad-request"
        client.post("/v1/freeze", {"scope": "fleet", "frozen": True, "who": "ann", "reason": "storm"})
        assert refusal(client, **args) == "frozen"
        client.post("/v1/freeze", {"scope": "fleet", "frozen": False, "who": "ann", "reason": "over"})
        collecting = Background(
            client, "evidence.collect", {}, run="ev-1", holder="", fence=0, deadline_s=90.0
        )
        wait_for("it collects", (tmp_path / "asked").exists)
        assert refusal(client, **args) == "busy", "it would destroy what is collected"
        (tmp_path / "told").touch()
        assert collecting.end().state == "done"
        once = client.op("node.reset", args, id="op-1")
        assert (once.state, once.value["status"]) == ("done", 7)
        assert client.op("node.reset", args, id="op-1") == once
        assert refusal(client, run="run-2", **args) == "busy"
        late = client.op("node.reset", {**args, "device": "gpu:3"}, deadline_s=0.5)
        assert (late.state, "was killed: what it has done is not known" in late.error) == ("failed", True)
        assert (tmp_path / "called").read_text().splitlines() == ["now", "sleeps 3"]


def refusal(client: Client, run: str = "run-1", **args: str) -> str:
    with pytest.raises(Turned) as caught:
        client.op("node.reset", args, run=run)
    return caught.value.code
