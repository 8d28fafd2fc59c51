"""The agent as its callers see it: real processes, real TLS, a real session on the Unix socket."""

import json
import shutil
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import DEADLINE_S, Agent, Client, Fleet, Refused, fleet, wait_for
from trust_parties import Loop, connected, forge

from gridagent import __version__, identity
from gridctl.trust.join_server import serve_join


@pytest.fixture
def world() -> Iterator[Fleet]:
    with fleet() as made:
        yield made


@pytest.fixture
def agent(world: Fleet) -> Agent:
    return world.agent().start()


def test_status_tells_what_lives_here(world: Fleet, agent: Agent) -> None:
    peer = world.peer(agent, job="j", rank=1, world_size=3)
    peer.send("progress", job="j", rank=1, epoch=0, entries=[[7, 1000.0, 0.25, 2.5, None]])
    wait_for("the step is known", lambda: world.known(agent, peer.session).step == 7)
    status = agent.client().status()
    assert (status.node, status.url, status.wire) == ("n1", agent.url, 1)
    rank = status.ranks[0]
    assert (rank.job, rank.rank, rank.world_size, rank.state, rank.loss) == ("j", 1, 3, "training", 2.5)
    assert rank.pid == peer.process.pid


def test_an_op_is_relayed_to_the_session(world: Fleet, agent: Agent) -> None:
    peer = world.peer(agent, job="j", rank=0, world_size=1)
    agent.client().lease()
    status = agent.client().op("job.describe", {"session": peer.session})
    assert (status.state, status.value) == ("done", {"kind": "describe", "session": peer.session})
    assert peer.event("command")["args"] == {}


def test_sigterm_ends_it_cleanly_and_a_killed_one_starts_again(world: Fleet, agent: Agent) -> None:
    peer = world.peer(agent, job="j", rank=0, world_size=1)
    url = agent.url
    assert agent.end(signal.SIGTERM) == 0
    assert not (agent.home / "agent.sock").exists()
    agent.start()
    agent.end(signal.SIGKILL)
    assert (agent.home / "agent.sock").exists()
    agent.start()
    assert agent.url == url
    assert wait_for("the session is back", lambda: world.known(agent, peer.session)).pid == peer.process.pid


@pytest.mark.parametrize("text", [b"https://127.0.0.1:99999", b"https://127.0.0.1:-1"])
def test_a_spoilt_hint_of_the_port_stops_no_agent(agent: Agent, text: bytes) -> None:
    agent.end(signal.SIGTERM)
    (agent.home / "url").write_bytes(text)
    agent.start()
    assert agent.client().status().node == "n1"


def test_an_agent_does_not_start_on_a_journal_that_somebody_changed(agent: Agent) -> None:
    client = agent.client()
    client.lease()
    client.op("node.cordon", {"reason": "a test"})
    agent.end(signal.SIGTERM)
    (journal,) = (agent.home / "ops").glob("*.jsonl")
    journal.write_bytes(journal.read_bytes().replace(b"a test", b"A test", 1))
    started = run("serve", "--home", str(agent.home))
    assert started.returncode == 1
    assert "record 1 of" in started.stderr
    assert "find out who did that" in started.stderr


def test_only_one_agent_serves_a_home(world: Fleet, agent: Agent) -> None:
    second = run("serve", "--home", str(agent.home))
    assert second.returncode == 1
    assert "another agent serves" in second.stderr
    assert agent.client().status().node == "n1"


def test_who_shows_no_certificate_of_the_fleet_is_not_served(world: Fleet, agent: Agent) -> None:
    with fleet() as strangers:
        strangers.authority.write_identity(strangers.root / "n", "operator", "mallory")
        context = Client(agent.url, strangers.root / "n").context
        context.load_verify_locations(agent.trust / "ca.crt")
        stranger = Client(agent.url, None, agent.trust / "ca.crt")
        for client in (stranger, Client(agent.url, strangers.root / "n")):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                client.status()
        stranger.context = context
        with pytest.raises((ssl.SSLError, ConnectionError)):
            stranger.status()
    assert agent.client().status().node == "n1"


@pytest.mark.parametrize("who", ["viewer", "n1"])
def test_only_an_operator_may_act(world: Fleet, agent: Agent, who: str) -> None:
    client = agent.client(who)
    assert client.status().node == "n1"
    for call in (client.lease, lambda: client.op("node.cordon", {"reason": "r"})):
        with pytest.raises(Refused, match="forbidden"):
            call()
    assert not agent.client().status().cordoned


def test_it_renews_its_certificate_before_it_ends(world: Fleet) -> None:
    loop = Loop()
    try:
        url, stop = loop.run(serve_join(world.authority, "127.0.0.1", 0))
        agent = world.agent()
        shutil.rmtree(agent.trust)
        forge(
            agent.trust,
            world.authority,
            "gridctl://testfleet/node/n1",
            file_name="node",
            addresses=[agent.address],
            role="node",
            made_days_ago=25.0,
        )
        (agent.trust / "controller.url").write_text(url)
        before = identity.own_identity(agent.trust)
        known = world.authority.crl_pem()
        world.authority.write_identity(world.root / "eve", "viewer", "eve")
        world.authority.revoke("viewer/eve")
        newer = world.authority.crl_pem()
        (agent.trust / "crl.pem").write_bytes(newer)
        (world.authority.trust_dir / "crl.pem").write_bytes(known)  # as of a controller from a backup
        agent.start()
        wait_for(
            "it is renewed", lambda: agent.client().status().cert_not_after_unix_s > before.not_after_unix_s
        )

        def shown() -> bool:
            with connected(agent.client().context, agent.client().port, agent.address) as connection:
                return identity.peer_of(connection.sock, world.trust_of("operator")).serial != before.serial

        wait_for("new connections see it", shown)
        assert (agent.trust / "crl.pem").read_bytes() == newer, "what is newer here stays in force"
        loop.run(stop())
    finally:
        loop.close()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gridagent", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_the_command_line_says_what_is_wrong(world: Fleet, agent: Agent, tmp_path: Path) -> None:
    status = run("status", "--home", str(agent.home))
    assert json.loads(status.stdout)["node"] == "n1"
    assert run("version").stdout.strip() == __version__
    assert run().returncode == 2
    for arguments, words in (
        (("serve", "--home", str(tmp_path)), "agent.toml is missing"),
        (("status", "--home", str(tmp_path)), "is it running?"),
        (("park", "--home", str(tmp_path)), "agent.toml is missing"),
        (("exec", "--home", str(tmp_path), "--job", "j", "--", "true"), "agent.toml is missing"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_a_home_of_another_node_is_not_served(world: Fleet) -> None:
    agent = world.agent()
    config = agent.home / "agent.toml"
    config.write_text(config.read_text().replace('"n1"', '"n2"'))
    done = run("serve", "--home", str(agent.home))
    assert done.returncode == 1
    assert "n2" in done.stderr
    assert "node n1" in done.stderr
