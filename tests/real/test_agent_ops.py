"""Operations: fenced, frozen, one run at a time, journaled before the effect, the same after a crash."""

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agents import DEADLINE_S, Agent, Client, Fleet, Refused, SessionPeer, fleet, wait_for

from gridagent import journal
from gridagent.wire import OpStatus

CUT = {"handover": "h1"}


@pytest.fixture
def world() -> Iterator[Fleet]:
    with fleet() as made:
        yield made


@pytest.fixture
def agent(world: Fleet) -> Agent:
    return world.agent().start()


class Background:
    """An operation that is waited for in a thread."""

    def __init__(self, client: Client, kind: str, args: dict[str, Any], **fields: Any) -> None:
        self.result: OpStatus | Exception | None = None
        self._thread = threading.Thread(target=self._call, args=(client, kind, args, fields))
        self._thread.start()

    def _call(self, client: Client, kind: str, args: dict[str, Any], fields: dict[str, Any]) -> None:
        try:
            self.result = client.op(kind, args, **fields)
        except Exception as error:
            self.result = error

    def end(self) -> Any:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        return self.result


def refusal(call: Any) -> str:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.code


def journaled(agent: Agent) -> list[dict[str, Any]]:
    return [record.data for record in journal.read(agent.home / "ops") if record.kind == "step"]


def held_cut(world: Fleet, agent: Agent, op: str = "op-1") -> tuple[SessionPeer, Background]:
    """A cut that runs in a session until it is let."""
    peer = world.peer(agent, job="j", rank=0, world_size=1)
    peer.order(hold="cut")
    agent.client().lease()
    running = Background(agent.client(), "handover.cut", {"session": peer.session, **CUT}, id=op)
    peer.event("command", kind="cut")
    return peer, running


def test_only_the_holder_of_the_newest_fence_acts(world: Fleet, agent: Agent) -> None:
    client = agent.client()
    cordon = {"reason": "r"}
    assert refusal(lambda: client.op("node.cordon", cordon)) == "no-lease"
    assert client.lease("a", 5) == {
        "granted": True,
        "fence": 5,
        "holder": "a",
        "left_s": pytest.approx(60, abs=5),
    }
    assert client.lease("b", 6)["granted"] is False
    assert client.lease("b", 5)["granted"] is False
    assert refusal(lambda: client.op("node.cordon", cordon, holder="b", fence=6)) == "fenced"
    assert refusal(lambda: client.op("node.cordon", cordon, holder="a", fence=4)) == "fenced"
    assert client.op("node.cordon", cordon, holder="a", fence=5).state == "done"
    client.lease("a", 5, ttl_s=0)
    assert client.lease("b", 5)["granted"] is False
    assert client.lease("b", 6)["granted"] is True
    assert refusal(lambda: client.op("node.uncordon", holder="a", fence=5)) == "fenced"


def test_lease_and_fence_outlive_the_agent(world: Fleet, agent: Agent) -> None:
    agent.client().lease("a", 9)
    agent.end(signal.SIGKILL)
    client = agent.start().client()
    status = client.status()
    assert (status.fence, status.lease_holder) == (9, "a")
    assert client.lease("b", 10)["granted"] is False
    assert client.lease("a", 9)["granted"] is True
    client.lease("a", 9, ttl_s=0)
    agent.end(signal.SIGKILL)
    assert agent.start().client().lease("b", 9)["granted"] is False


def test_while_frozen_only_the_way_back_is_open(world: Fleet, agent: Agent) -> None:
    client = agent.client()
    peer = world.peer(agent, job="j", rank=0, world_size=1)
    client.lease()
    client.post("/v1/freeze", {"scope": "j", "frozen": True, "who": "ann", "reason": "storm"})
    agent.end(signal.SIGKILL)
    client = agent.start().client()
    wait_for("the session is back", lambda: world.known(agent, peer.session))
    assert client.status().frozen == ["j"]
    session = {"session": peer.session}
    assert refusal(lambda: client.op("handover.cut", {**session, **CUT})) == "frozen"
    assert client.op("node.cordon", {"reason": "another scope"}).state == "done"
    client.post("/v1/freeze", {"scope": "fleet", "frozen": True, "who": "ann", "reason": "storm"})
    assert refusal(lambda: client.op("node.uncordon")) == "frozen"
    assert client.op("job.describe", session, holder="nobody", fence=0).state == "done"
    abort = {**session, "handover": "h1", "reason": "freeze"}
    assert client.op("handover.abort", abort).state == "done"
    assert client.op("handover.retire", abort).state == "done"
    for scope in ("j", "fleet"):
        client.post("/v1/freeze", {"scope": scope, "frozen": False, "who": "ann", "reason": "over"})
    assert client.op("handover.cut", {**session, **CUT}).state == "done"


def test_a_freeze_and_a_thaw_are_in_force_also_where_they_cannot_be_written(
    world: Fleet, agent: Agent
) -> None:
    """And are written, without anybody's doing, once that is possible."""
    client = agent.client()
    client.lease()
    file = agent.home / "freeze.json"
    (file / "in the way").mkdir(parents=True)
    freeze = {"scope": "fleet", "frozen": True, "who": "ann", "reason": "storm"}
    for frozen in (True, False, True):
        reply = client.post("/v1/freeze", {**freeze, "frozen": frozen})
        assert reply["durable"] is False
        assert "a restart of this agent would undo it" in reply["text"]
        assert client.status().frozen == ["fleet"] * frozen
    assert refusal(lambda: client.op("node.cordon", {"reason": "a test"})) == "frozen"
    shutil.rmtree(file)
    wait_for("the freeze is on the disk", file.exists)
    agent.end(signal.SIGKILL)
    client = agent.start().client()
    assert client.status().frozen == ["fleet"]
    assert client.post("/v1/freeze", {**freeze, "frozen": False}) == {}
    assert client.status().frozen == []


def test_a_run_has_the_node_until_it_lets_go(world: Fleet, agent: Agent) -> None:
    peer, running = held_cut(world, agent)
    client = agent.client()
    assert client.status().running_op == "op-1"
    with pytest.raises(Refused, match="run-1") as caught:
        client.op("node.cordon", {"reason": "r"}, run="run-2")
    assert caught.value.code == "busy"
    assert client.op("job.describe", {"session": peer.session}, run="run-2").state == "done"
    peer.order(let="cut")
    assert running.end().state == "done"
    assert refusal(lambda: client.op("node.cordon", {"reason": "r"}, run="run-2")) == "busy"
    agent.end(signal.SIGKILL)
    client = agent.start().client()
    wait_for("the session is back", lambda: world.known(agent, peer.session))
    assert refusal(lambda: client.op("node.cordon", {"reason": "r"}, run="run-2")) == "busy"
    release = {"session": peer.session, "handover": "h1"}
    assert client.op("handover.release", release).state == "done"
    assert client.op("node.cordon", {"reason": "r"}, run="run-2").state == "done"


def test_run_end_frees_the_node(world: Fleet, agent: Agent) -> None:
    peer, running = held_cut(world, agent)
    peer.order(let="cut")
    running.end()
    client = agent.client()
    assert client.op("run.end", run="run-3").state == "done"
    assert refusal(lambda: client.op("node.cordon", {"reason": "r"}, run="run-2")) == "busy"
    assert client.op("run.end", run="run-1").state == "done"
    assert client.op("node.cordon", {"reason": "r"}, run="run-2").state == "done"


def test_an_operation_that_outlives_its_run_does_not_take_the_node_back(world: Fleet, agent: Agent) -> None:
    peer, running = held_cut(world, agent)
    client = agent.client()
    assert client.op("run.end", run="run-1").state == "done"
    peer.order(let="cut")
    assert running.end().state == "done"
    assert client.op("node.cordon", {"reason": "r"}, run="run-2").state == "done"
    cut = {"session": peer.session, "handover": "h1"}
    assert refusal(lambda: client.op("handover.cut", cut, run="run-1")) == "run-over"  # on its way until now
    agent.end(signal.SIGKILL)
    client = agent.start().client()
    wait_for("the session is back", lambda: world.known(agent, peer.session))
    assert refusal(lambda: client.op("handover.cut", cut, run="run-1")) == "run-over"
    assert client.op("node.uncordon", run="run-1").state == "done"


def test_the_same_id_acts_once(world: Fleet, agent: Agent) -> None:
    peer, running = held_cut(world, agent)
    args = {"session": peer.session, **CUT}
    again = Background(agent.client(), "handover.cut", args, id="op-1")
    assert agent.client().get("/v1/ops/op-1?wait_s=0")["state"] == "accepted"
    peer.order(let="cut")
    assert running.end() == again.end()
    client = agent.client()
    assert client.op("handover.cut", args, id="op-1") == running.end()
    assert refusal(lambda: client.op("handover.cut", {**args, "lead_steps": 9}, id="op-1")) == "bad-request"
    agent.end(signal.SIGKILL)
    assert agent.start().client().op("handover.cut", args, id="op-1") == running.end()
    assert [data["event"] for data in journaled(agent)] == ["accepted", "done"]
    assert refusal(lambda: agent.client().get("/v1/ops/op-2")) == "not-found"


def test_an_op_that_the_agent_died_in_is_interrupted(world: Fleet, agent: Agent) -> None:
    peer, running = held_cut(world, agent)
    agent.end(signal.SIGKILL)
    assert isinstance(running.end(), OSError)
    client = agent.start().client()
    wait_for("the session is back", lambda: world.known(agent, peer.session))
    status = client.op("handover.cut", {"session": peer.session, **CUT}, id="op-1")
    assert status.state == "interrupted"
    assert "look at the effect" in status.error
    assert client.get("/v1/ops/op-1")["state"] == "interrupted"
    peer.order(let="cut")  # the late reply answers nobody
    assert client.op("job.describe", {"session": peer.session}).value["kind"] == "describe"
    assert journal.verify(agent.home / "ops").ok


def test_an_op_is_in_the_journal_before_its_effect(world: Fleet, agent: Agent) -> None:
    peer, running = held_cut(world, agent)
    assert [data["event"] for data in journaled(agent)] == ["accepted"]
    peer.order(fail="cut", error="no luck")
    peer.order(let="cut")
    status = running.end()
    assert (status.state, status.error) == ("failed", "no luck")
    assert [(data["event"], data.get("error")) for data in journaled(agent)[1:]] == [("failed", "no luck")]


def test_sigterm_lets_a_running_op_end(world: Fleet, agent: Agent) -> None:
    peer, running = held_cut(world, agent)
    assert agent.process
    agent.process.send_signal(signal.SIGTERM)
    wait_for("nothing new is accepted", lambda: stopping(agent))
    peer.order(let="cut")
    assert running.end().state == "done"
    assert agent.process.wait(DEADLINE_S) == 0


def stopping(agent: Agent) -> bool:
    try:
        return refusal(lambda: agent.client().op("node.cordon", {"reason": "r"})) == "stopping"
    except pytest.fail.Exception:
        return False


def test_a_full_disk_refuses_and_nothing_is_done(world: Fleet) -> None:
    agent = world.agent()
    with tiny_disk(agent.home / "ops"):
        client = agent.start().client()
        client.lease()
        filler = agent.home / "ops" / "filler"
        with pytest.raises(OSError, match="No space"):
            fill(filler)
        with pytest.raises(Refused, match="disk-full"):
            cordon_for_ever(client)
        before = client.status()
        assert (
            refusal(lambda: client.op("node.cordon", {"reason": "r" * 9000, "owner": "bob"})) == "disk-full"
        )
        assert client.status().cordon_owner == before.cordon_owner
        filler.unlink()
        assert client.op("run.end").state == "done"
        agent.end()
        assert journal.verify(agent.home / "ops").ok


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)


def cordon_for_ever(client: Client) -> None:
    while True:
        client.op("node.cordon", {"reason": "r" * 900, "owner": "ann"})
        client.op("node.uncordon", {"owner": "ann"})


@contextmanager
def tiny_disk(folder: Path) -> Iterator[None]:
    """A file system of 64 KiB. Needs the right to mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_only_who_cordoned_uncordons(world: Fleet, agent: Agent) -> None:
    client = agent.client()
    client.lease()
    assert client.op("node.cordon", {"reason": "broken fan", "owner": "ann"}).state == "done"
    kept = client.op("node.cordon", {"reason": "xid 79"})
    assert kept.value["now"]["owner"] == "ann"
    assert refusal(lambda: client.op("node.uncordon")) == "not-owner"
    agent.end(signal.SIGKILL)
    client = agent.start().client()
    status = client.status()
    assert (status.cordoned, status.cordon_owner, status.cordon_reason) == (True, "ann", "broken fan")
    assert client.op("node.uncordon", {"owner": "ann"}).state == "done"
    assert not client.status().cordoned


def test_what_cannot_be_done_is_refused_and_not_journaled(world: Fleet, agent: Agent) -> None:
    client = agent.client()
    peer = world.peer(agent, role="spare")
    client.lease()
    session = {"session": peer.session}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("node.explode", {}, "unknown-op"),
        ("node.cordon", {}, "bad-request"),
        ("handover.cut", {"session": "nobody", **CUT}, "not-found"),
        ("handover.cut", {**session, "handover": 7}, "bad-request"),
        ("handover.join", {**session, "damage": "bit"}, "forbidden"),
        ("spare.park", {"count": 0}, "bad-request"),
        ("spare.park", {"count": 2, "gpus": [0, 1, 2]}, "bad-request"),
    ]
    for kind, args, code in cases:
        assert refusal(lambda kind=kind, args=args: client.op(kind, args)) == code
    for body in (b"", b"{", b"[]", b'{"id": 1}', b"\xff\xfe", b"[" * 5000):
        with pytest.raises(Refused, match="bad-request"):
            client.request("POST", "/v1/ops", body)
    assert refusal(lambda: client.op("node.cordon", {"reason": "r"}, deadline_s=-1)) == "bad-request"
    assert refusal(lambda: client.request("POST", "/v1/ops", b"x" * (2 << 20))) == "bad-request"
    assert refusal(lambda: client.get("/v1/nothing")) == "not-found"
    assert refusal(lambda: client.request("DELETE", "/v1/status")) == "bad-request"
    assert refusal(lambda: client.get("/v1/stream?after=x")) == "bad-request"
    assert journaled(agent) == []


def test_an_op_on_a_process_that_dies_fails_at_once(world: Fleet, agent: Agent) -> None:
    peer, running = held_cut(world, agent)
    peer.process.kill()
    peer.process.wait(DEADLINE_S)
    status = running.end()
    assert (status.state, "gone" in status.error) == ("failed", True)
