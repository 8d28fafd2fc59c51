"""What a killed agent leaves undone, seen from both ends of its socket."""

import signal
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agents import DEADLINE_S, Fleet, Refused, fleet, wait_for

from gridagent import framing, wire
from gridagent.train.link import Link, LinkError


@pytest.fixture
def world() -> Iterator[Fleet]:
    with fleet() as made:
        yield made


def hello() -> wire.Hello:
    return wire.Hello(role="rank", session="s", pid=1)


def messages(connection: socket.socket) -> Iterator[wire.Message]:
    unframer = framing.Unframer(at_agent=True)
    while data := connection.recv(1 << 16):
        yield from unframer.feed(data)


def test_what_a_dying_agent_was_asked_fails_at_once_and_the_link_finds_the_next_agent() -> None:
    with tempfile.TemporaryDirectory(prefix="g") as folder, ThreadPoolExecutor(1) as pool:
        path = Path(folder) / "agent.sock"
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen()
        link = Link(str(path), hello)
        link.start()
        connection, _ = server.accept()
        assert link.connected.wait(DEADLINE_S)
        asked = pool.submit(link.ask, "meet", {}, 10 * DEADLINE_S)
        next(m for m in messages(connection) if isinstance(m, wire.Ask))
        connection.close()
        with pytest.raises(LinkError, match="ended meanwhile"):
            asked.result(DEADLINE_S)
        connection, _ = server.accept()
        assert isinstance(next(messages(connection)), wire.Hello)
        link.close(wire.Farewell(reason="finished"))
        connection.close()
        server.close()


def test_a_new_agent_does_not_say_of_a_session_that_it_is_gone_before_it_can_be_back(world: Fleet) -> None:
    agent = world.agent("n1").start()
    client = agent.client()
    client.lease()
    order = {"session": "elsewhere", "handover": "h1"}
    with pytest.raises(Refused, match="not-found"):
        client.op("handover.release", order)
    peer = world.peer(agent, job="j", rank=0)
    agent.end(signal.SIGKILL)
    agent.start()
    with pytest.raises(Refused, match="starting"):
        client.op("handover.release", order)
    wait_for("the session is back", lambda: [r for r in client.status().ranks if r.session == peer.session])
    assert client.op("handover.release", {**order, "session": peer.session}).state == "done"
