"""The Unix socket and what follows from it: hostile bytes, lost processes, meetings, launches, spares."""

import base64
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents import DEADLINE_S, Agent, Fleet, Refused, SessionPeer, fleet, wait_for

from gridagent import framing, wire

KEY = base64.b64encode(b"k" * 32).decode()


@pytest.fixture
def world() -> Iterator[Fleet]:
    with fleet() as made:
        yield made


@pytest.fixture
def agent(world: Fleet) -> Agent:
    return world.agent().start()


def records(agent: Agent, kind: str) -> list[dict[str, Any]]:
    """The values of all records of a kind that are in the spool by now."""
    lines = [
        line for path in sorted(agent.home.glob("spool/*.jsonl")) for line in path.read_bytes().splitlines()
    ]
    return [record["v"] for record in map(json.loads, lines) if record["kind"] == kind]


def hello(**fields: Any) -> bytes:
    return framing.frame(wire.Hello(**{"role": "spare", "session": "s", "pid": os.getpid(), **fields}))


GARBAGE = {
    "no frame": b"GET / HTTP/1.1\r\n\r\n" * 100,
    "huge frame": b"\xff\xff\xff\xff",
    "not msgpack": b"\x00\x00\x00\x02\xc1\xc1",
    "another message": b"\x00\x00\x00\x01\x80",
    "deeply nested": (100_000).to_bytes(4, "big") + b"\x91" * 100_000,
    "no hello first": framing.frame(wire.Farewell(reason="finished")),
    "newer wire": hello(wire=99),
    "unknown role": hello(role="root"),
    "a path as its id": hello(session="../../etc/passwd"),
    "another session later": hello() + hello(session="t"),
    "no plain value": hello()
    + framing.frame(
        wire.Phase(handover="h", phase="p", t_unix_s=0.0, detail={"x": msgspec.msgpack.Ext(5, b"")})
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_its_own_connection_only(world: Fleet, agent: Agent, name: str) -> None:
    good = world.peer(agent, job="j", rank=0, world_size=1)
    with socket.socket(socket.AF_UNIX) as bad:
        bad.settimeout(DEADLINE_S)
        bad.connect(str(agent.home / "agent.sock"))
        bad.sendall(GARBAGE[name])
        try:
            assert bad.recv(1) == b""
        except ConnectionResetError:
            pass  # closed with our bytes unread
    assert world.known(agent, good.session)
    assert "was closed" in agent.log
    assert "Traceback" not in agent.log


def test_odd_values_do_no_harm(world: Fleet, agent: Agent) -> None:
    entry = wire.StepEntry(1, float("nan"), float("inf"), float("nan"))
    with socket.socket(socket.AF_UNIX) as odd:
        odd.connect(str(agent.home / "agent.sock"))
        odd.sendall(hello(role="rank", job="a:b", rank=-7, facts={"a": "\n"}))
        odd.sendall(framing.frame(wire.Progress(job="x", rank=2**60, epoch=-1, entries=[entry])))
        odd.sendall(framing.frame(wire.Reply(id=12345, ok=True)))
        odd.sendall(framing.frame(wire.Farewell(reason="released")))
        wait_for("its farewell is told", lambda: [r for r in records(agent, "session") if r.get("reason")])
    assert agent.client().status().ranks == []
    with agent.client().stream(0) as stream:
        progress = next(record for record in stream if record["kind"] == "progress")
    assert progress["v"]["loss"] is None
    assert progress["t_unix_s"] > 1e9
    assert "Traceback" not in agent.log


@pytest.mark.parametrize("name", ["../x\x1b[2J", "", "a b", "x" * 10_000])
@pytest.mark.parametrize("at", ["hello", "progress"])
def test_what_is_no_name_of_a_job_is_no_session(world: Fleet, agent: Agent, name: str, at: str) -> None:
    odd = [hello(role="rank", job=name)]
    if at == "progress":
        odd = [
            hello(role="rank", job="j"),
            framing.frame(wire.Progress(job=name, rank=0, epoch=0, entries=[])),
        ]
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as bad:
            bad.settimeout(DEADLINE_S)
            bad.connect(str(agent.home / "agent.sock"))
            bad.sendall(b"".join(odd))
            try:
                assert bad.recv(1) == b""
            except ConnectionResetError:
                pass  # closed with our bytes unread
    assert name not in [rank.job for rank in agent.client().status().ranks]
    assert agent.log.count("is no name of a job") == 1, "it tries again and again, and is told of once"
    assert len(agent.log) < 2_000


def test_the_socket_is_its_owners_only(agent: Agent) -> None:
    assert stat.S_IMODE((agent.home / "agent.sock").stat().st_mode) == 0o600
    if os.geteuid() == 0:
        agent.home.chmod(0o755)
        agent.home.parent.chmod(0o755)
        (agent.home / "agent.sock").chmod(0o666)
        script = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
            "s.connect(sys.argv[1]); s.settimeout(60); sys.exit(s.recv(1) != b'')"
        )
        command = [sys.executable, "-c", script, str(agent.home / "agent.sock")]
        assert subprocess.run(command, timeout=DEADLINE_S).returncode == 0
        assert "user 65534 may not be a session" in agent.log


def test_a_process_that_dies_is_lost_and_one_that_reconnects_is_not(world: Fleet, agent: Agent) -> None:
    peer = world.peer(agent, job="j", rank=0, world_size=2)
    other = world.peer(agent, job="j", rank=1, world_size=2)
    agent.end(signal.SIGKILL)
    agent.start()
    for each in (peer, other):
        wait_for("it is back", lambda each=each: world.known(agent, each.session))
    peer.process.kill()
    wait_for(
        "the zombie is lost", lambda: [r.state for r in agent.client().status().ranks] == ["lost", "training"]
    )
    assert wait_for("it is told", lambda: [r for r in records(agent, "session") if r["event"] == "lost"])


def test_a_new_agent_tells_what_processes_wrote_down_that_it_never_met(world: Fleet, agent: Agent) -> None:
    peer = world.peer(agent, job="j", rank=0, world_size=1)
    folder = agent.home / "marks"
    folder.mkdir(exist_ok=True)
    mark = f"9 {'ab' * 32}"
    (folder / peer.session).write_text(f"{mark}\n".ljust(96))
    assert agent.client().status().marks == {}, "it knows this one"
    peer.process.kill()
    agent.end(signal.SIGKILL)
    for number in range(40):
        (folder / f"s{number}").write_text(mark)
        os.utime(folder / f"s{number}", (0, time.time() - 3600 - number))
    (folder / "old").write_text(mark)
    (folder / "odd").write_text("9 \x1b[2J")
    (folder / "bad name").write_text(mark)
    os.mkfifo(folder / "pipe")
    agent.start()
    os.utime(folder / "old", (0, 0))
    marks = agent.client().status().marks
    assert marks.pop(peer.session) == mark
    assert set(marks) < {f"s{number}" for number in range(32)}
    assert set(marks.values()) == {mark}


def test_one_that_stays_away_is_lost_until_it_is_back(agent: Agent) -> None:
    def states() -> list[str]:
        return [spare.state for spare in agent.client().status().spares]

    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as spare:
            spare.connect(str(agent.home / "agent.sock"))
            spare.sendall(hello())
            wait_for("it is known", lambda: states() == ["parked"])
        wait_for("it is lost, though its process lives", lambda: states() == [])
    assert wait_for(
        "both are told", lambda: [r["event"] for r in records(agent, "session")] == ["hello", "lost"] * 2
    )


def test_a_farewell_leaves_the_proof_of_the_final_state(world: Fleet, agent: Agent) -> None:
    peer = world.peer(agent, job="j", rank=0, world_size=1)
    peer.send("farewell", reason="finished", step=40, epoch=1, digests={"parameters": "abc"})
    wait_for("it has finished", lambda: agent.client().status().ranks[0].state == "finished")
    peer.end()
    rank = wait_for("it is gone", lambda: [r for r in agent.client().status().ranks if not r.connected])[0]
    assert (rank.state, rank.step, rank.epoch, rank.digests) == ("finished", 40, 1, {"parameters": "abc"})
    event = wait_for(
        "it is told", lambda: [r for r in records(agent, "session") if r["event"] == "finished"]
    )[0]
    assert event["digests"] == {"parameters": "abc"}


def member(agent: Agent, peer: SessionPeer, role: str, rank: int) -> dict[str, Any]:
    return {"role": role, "rank": rank, "node": agent.name, "url": agent.url, "session": peer.session}


def meeting(world: Fleet) -> tuple[Agent, Agent, SessionPeer, SessionPeer, dict[str, Any]]:
    """Two nodes of a hand-over: the source on n1, the chair on n2, both told by their operations."""
    first, second = world.agent("n1").start(), world.agent("n2").start()
    source = world.peer(first, job="j", rank=1, world_size=2)
    chair = world.peer(second, job="j", rank=0, world_size=2)
    members = [member(first, source, "source", 1), member(second, chair, "survivor", 0)]
    opened = {"handover": "h1", "job": "j", "epoch_from": 0, "epoch_to": 1, "members": members}
    store = {"store_host": "127.0.0.1", "store_port": 1, "nonce": "n"}
    joined = {**opened, "me": members[0], "chair": members[1], "store": store}
    for agent, session, kind, args in (
        (second, chair, "handover.open", opened),
        (first, source, "handover.join", joined),
    ):
        agent.client().lease()
        assert agent.client().op(kind, {"session": session.session, **args}, job="j").state == "done"
    request = {"handover": "h1", "role": "source", "rank": 1, "purpose": "star", "to_session": chair.session}
    return first, second, source, chair, {**request, "public_key": KEY}


def test_two_sessions_meet_through_their_agents(world: Fleet) -> None:
    _, second, source, chair, request = meeting(world)
    source.send("ask", id=1, kind="meet", args={**request, "url": second.url})
    answer = source.event("answer")
    assert answer["ok"], answer
    assert (answer["value"]["host"], answer["value"]["port"]) == ("127.0.0.1", 4711)
    asked = chair.event("command", kind="meet")["args"]
    assert (asked["role"], asked["rank"], asked["purpose"]) == ("source", 1, "star")
    second.end(signal.SIGKILL)  # the members are known again after a restart
    second.start()
    wait_for("the chair is back", lambda: world.known(second, chair.session))
    source.send("ask", id=2, kind="meet", args={**request, "url": second.url})
    assert source.event("answer")["ok"]


def test_a_stranger_meets_nobody(world: Fleet) -> None:
    _, second, source, chair, request = meeting(world)
    third = world.agent("n3").start()

    def call(who: str, **changed: Any) -> str:
        with pytest.raises(Refused) as caught:
            second.client(who).post("/v1/meet", {"request": {**request, **changed}})
        return caught.value.code

    assert call("n3") == "forbidden"  # a node of the fleet, but not of this hand-over
    assert call("operator") == "forbidden"
    assert call("viewer") == "forbidden"
    assert call("n1", role="survivor", rank=0) == "forbidden"
    assert call("n1", handover="h2") == "starting"
    assert call("n1", to_session=source.session) == "forbidden"
    for wrong in ({"url": third.url}, {"to_session": "x"}, {"rank": 0}, {"handover": "h2"}):
        source.send("ask", id=3, kind="meet", args={**request, "url": second.url, **wrong})
        assert not source.event("answer")["ok"]
    source.send("ask", id=4, kind="shell", args={})
    assert not source.event("answer")["ok"]
    met = [event for event in seen_by(chair) if event.get("kind") == "meet"]
    assert met == []


def seen_by(peer: SessionPeer) -> Iterator[dict[str, Any]]:
    """What the session has seen by now, up to an answer that it is sure to get."""
    peer.send("ask", id=99, kind="nothing", args={})
    while (event := peer.events.get(timeout=DEADLINE_S))["event"] != "answer":
        yield event


def run_exec(
    agent: Agent, environment: dict[str, str], *argv: str, job: str = "j"
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "gridagent",
        "exec",
        "--home",
        str(agent.home),
        "--job",
        job,
        "--",
        *argv,
    ]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=DEADLINE_S
    )


SECRETS = {"HF_TOKEN": "hush-1", "MY_API_KEY": "hush-2", "TORCH_PASSWORD": "hush-3", "NCCL_SECRET": "hush-4"}


def registered(agent: Agent) -> dict[str, Any]:
    """Rank 1 of job j, as `gridagent exec` leaves it. Returns the launch spec."""
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "2",
        "HUSH": "hush-5",
    }
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    done = run_exec(agent, {**environment, **SECRETS}, sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["GRIDAGENT_SOCKET"] == str(agent.home / "agent.sock")
    assert (seen["GRIDAGENT_JOB"], seen["GRIDAGENT_ADDR"]) == ("j", "127.0.0.11")
    assert seen["HF_TOKEN"] == "hush-1"  # the process itself keeps all that it had
    spec: dict[str, Any] = agent.client().get("/v1/launch?job=j&rank=1")
    return spec


def test_exec_registers_the_launch_and_becomes_the_process(world: Fleet, agent: Agent) -> None:
    spec = registered(agent)
    assert (spec["job"], spec["rank"], spec["world_size"]) == ("j", 1, 3)
    assert spec["argv"][:2] == [sys.executable, "-c"]
    assert spec["cwd"] == os.getcwd()
    assert spec["env"]["OMP_NUM_THREADS"] == "2"
    assert not SECRETS.keys() & spec["env"].keys()
    assert stat.S_IMODE((agent.home / "launch" / "j-1.json").stat().st_mode) == 0o600
    for query in ("job=j&rank=2", "job=k&rank=1"):
        with pytest.raises(Refused, match="not-found"):
            agent.client().get(f"/v1/launch?{query}")
    with pytest.raises(Refused, match="bad-request"):
        agent.client().get("/v1/launch?job=..%2F..%2Fetc&rank=1")
    for job in ("../j", "x" * 65, "fleet"):
        wrong = run_exec(agent, {"RANK": "1", "WORLD_SIZE": "3"}, "true", job=job)
        assert (wrong.returncode, "is no name of a job" in wrong.stderr) == (1, True)
    missing = run_exec(agent, {"RANK": "x"}, "true")
    assert (missing.returncode, "RANK" in missing.stderr) == (1, True)


def specialise(spec: dict[str, Any], spare: SessionPeer) -> dict[str, Any]:
    return {"session": spare.session, "handover": "h1", "launch": spec, "epoch": 0, "step": 5}


def test_the_launch_goes_with_the_rank(world: Fleet) -> None:
    first, second = world.agent("n1").start(), world.agent("n2").start()
    spec = registered(first)
    source = world.peer(first, job="j", rank=1, world_size=3)
    spare = world.peer(second, role="spare")
    client = second.client()
    client.lease()
    spare.order(hold="specialise")
    request = specialise(spec, spare)
    with pytest.raises(Refused, match="API_KEY"):
        client.op("handover.specialise", {**request, "launch": {**spec, "env": {"MY_API_KEY": "hush-2"}}})
    assert world.known(second, spare.session).state == "parked"
    spare.order(let="specialise")
    assert client.op("handover.specialise", request).state == "done"
    assert world.known(second, spare.session).state == "warm"
    with pytest.raises(Refused, match="no parked spare"):
        client.op("handover.specialise", request)
    with pytest.raises(Refused, match="not-found"):
        client.get("/v1/launch?job=j&rank=1")
    second.end(signal.SIGKILL)
    second.start()
    wait_for("the spare is back", lambda: world.known(second, spare.session))
    spare.send("hello", role="rank", session=spare.session, pid=1, job="j", rank=1, world_size=3, epoch=1)
    wait_for("it holds the rank", lambda: [r.rank for r in second.client().status().ranks] == [1])
    assert second.client().get("/v1/launch?job=j&rank=1")["argv"] == spec["argv"]
    assert second.client().status().spares == []
    source.send("hello", role="rank", session=source.session, pid=1, job="j", rank=1, state="frozen")
    wait_for("the source is frozen", lambda: first.client().status().ranks[0].state == "frozen")
    source.send("farewell", reason="released")
    wait_for("the source is gone", lambda: first.client().status().ranks == [])
    with pytest.raises(Refused, match="not-found"):
        first.client().get("/v1/launch?job=j&rank=1")


def retire(spare: Any, handover: str) -> dict[str, Any]:
    return {"session": spare.session, "handover": handover, "reason": "it ended"}


def test_a_spare_is_ended_only_for_the_hand_over_that_it_was_specialised_for(
    world: Fleet, agent: Agent
) -> None:
    spec = registered(agent)
    spare = world.peer(agent, role="spare")
    client = agent.client()
    client.lease()
    with pytest.raises(Refused, match="bad-request"):
        client.op("handover.retire", {"session": spare.session, "reason": "an older controller"})
    for _ in range(2):
        with pytest.raises(Refused, match="parked: it is not hand-over h2's to end"):
            client.op("handover.retire", retire(spare, "h2"))
        agent.end(signal.SIGKILL)
        client = agent.start().client()
        wait_for("the spare is back", lambda: world.known(agent, spare.session))
    assert client.op("handover.specialise", specialise(spec, spare)).state == "done"
    for _ in range(2):
        with pytest.raises(Refused, match="specialised for hand-over h1") as caught:
            client.op("handover.retire", retire(spare, "h2"))
        assert caught.value.code == "not-taken"
        assert world.known(agent, spare.session).state in ("warm", "specialising")  # to a new agent
        agent.end(signal.SIGKILL)
        client = agent.start().client()
        wait_for("the spare is back", lambda: world.known(agent, spare.session))
    assert client.op("handover.retire", retire(spare, "h1")).state == "done"


def test_a_spare_that_fails_is_spent(world: Fleet, agent: Agent) -> None:
    spec = registered(agent)
    spare = world.peer(agent, role="spare")
    spare.order(fail="specialise", error="ImportError: no module named train")
    agent.client().lease()
    status = agent.client().op("handover.specialise", specialise(spec, spare))
    assert (status.state, status.error) == ("failed", "ImportError: no module named train")
    assert world.known(agent, spare.session).state == "spent"
    assert not list(agent.home.glob("launch/*.promise"))


def test_a_quarantined_node_gives_no_spare(world: Fleet, agent: Agent) -> None:
    spec = registered(agent)
    spare = world.peer(agent, role="spare")
    client = agent.client()
    client.lease()
    assert client.op("node.cordon", {"reason": "flaky memory", "quarantine": True}).state == "done"
    assert client.status().quarantined
    with pytest.raises(Refused, match="flaky memory") as caught:
        client.op("handover.specialise", specialise(spec, spare))
    assert caught.value.code == "quarantined"
    assert client.op("node.uncordon").state == "done"
    assert client.op("handover.specialise", specialise(spec, spare)).state == "done"


def test_no_secret_reaches_the_disk(world: Fleet, agent: Agent) -> None:
    spec = registered(agent)
    spare = world.peer(agent, role="spare")
    client = agent.client()
    client.lease()
    with pytest.raises(Refused, match="secrets never travel"):
        client.op("handover.specialise", specialise({**spec, "env": SECRETS}, spare))
    order = specialise({**spec, "argv": [*spec["argv"], "--token=hush-5"]}, spare)
    assert client.op("handover.specialise", order, id="s1").state == "done"
    assert client.op("handover.specialise", order, id="s1").state == "done"
    wait_for("it is told", lambda: len(records(agent, "op")) == 2)
    agent.end()
    for path in agent.home.rglob("*"):
        if path.is_file() and path.parent.name != "launch":  # a command line is kept where it is needed
            assert b"hush-" not in path.read_bytes(), path
    agent.start()
    assert agent.client().op("handover.specialise", order, id="s1").state == "done"
    with pytest.raises(Refused, match="another operation"):
        agent.client().op("handover.specialise", specialise(spec, spare), id="s1")


def test_parked_spares_report_and_outlive_the_agent(world: Fleet, agent: Agent) -> None:
    pytest.importorskip("torch")
    client = agent.client()
    client.lease()
    status = client.op("spare.park", {"count": 1}, deadline_s=DEADLINE_S)
    assert status.state == "done", (status.error, agent.log)
    pid = status.value["pids"][0]
    try:
        assert os.getsid(pid) == pid
        agent.end(signal.SIGKILL)
        agent.start()
        spare = wait_for("it is back", lambda: world.known(agent, status.value["sessions"][0]))
        assert (spare.pid, spare.state) == (pid, "parked")
        with pytest.raises(Refused, match="parked") as caught:
            agent.client().op("handover.retire", retire(spare, "h1"))
        assert caught.value.code == "not-taken"
        os.kill(pid, signal.SIGKILL)
        wait_for("it has ended", lambda: not agent.client().status().spares)
        wait_for("its process has ended", lambda: not Path(f"/proc/{pid}").exists() or zombie(pid))
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_spare_that_cannot_start_says_why(world: Fleet) -> None:
    agent = world.agent()
    broken = agent.home / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('no torch on this node')")
    os.environ["PYTHONPATH"] = str(broken)
    try:
        agent.start()
    finally:
        del os.environ["PYTHONPATH"]
    agent.client().lease()
    status = agent.client().op("spare.park", {"count": 1}, deadline_s=DEADLINE_S)
    assert (status.state, "no torch on this node" in status.error) == ("failed", True)
