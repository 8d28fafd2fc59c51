"""A controller beside nodes that do not answer: real agents, and listeners that accept and never speak."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from command_line import data, gridctl
from swap_fleet import SwapFleet, swap_fleet, wait_for

from gridctl.cli.exits import Exit
from gridctl.control.client import Client
from gridctl.control.poll import pause_s
from gridctl.errors import Refused
from gridctl.model.fleet import Node
from gridctl.model.plans import Gate, Request

YES = Gate(who="ann", reason="a test", yes=True)


class Mute:
    """Accepts connections, says nothing, and remembers when each came."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self._kept: list[socket.socket] = []
        self.url = f"https://{host}:{self._server.getsockname()[1]}"
        self.came_s: list[float] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._kept.append(self._server.accept()[0])
                self.came_s.append(time.monotonic())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        for open_socket in (self._server, *self._kept):
            open_socket.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[SwapFleet]:
    with swap_fleet() as made:
        made.nodes("n1")
        yield made


@contextlib.contextmanager
def beside(fleet: SwapFleet, **urls: str) -> Iterator[Client]:
    """The controller of a fleet that has these nodes too."""
    fleet.write_fleet_file()
    text = fleet.home.fleet_file.read_text()
    more = "".join(f'[[node]]\nname = "{name}"\nurl = "{url}"\n' for name, url in urls.items())
    fleet.home.fleet_file.write_text(text + more)
    try:
        yield fleet.controller()
    finally:
        fleet.home.fleet_file.write_text(text)


def node(client: Client, name: str) -> Node:
    return next(node for node in client.view("nodes", Node) if node.name == name)


def test_a_node_that_never_speaks_is_asked_ever_more_rarely_and_holds_up_nobody(fleet: SwapFleet) -> None:
    mute = Mute("127.0.0.201")
    with contextlib.closing(mute), beside(fleet, x1=mute.url) as client:
        for attempts in (1, 2, 3):
            wait_for(f"it was asked {attempts} times", lambda n=attempts: len(mute.came_s) >= n)
            seen = node(client, "n1").seen_unix_s
            wait_for("n1 is asked meanwhile", lambda seen=seen: node(client, "n1").seen_unix_s > seen)
        came_s = list(mute.came_s)
        shortest_s = [pause_s(silences, 1.0) for silences in range(1, len(came_s))]
        pauses_s = [later - earlier for earlier, later in pairwise(came_s)]
        assert all(pause >= least for pause, least in zip(pauses_s, shortest_s, strict=True)), pauses_s
        assert not node(client, "x1").reachable
        with pytest.raises(Refused) as caught:
            client.plan(Request(node="x1"))
        assert caught.value.code == "node-unreachable"
        assert len(mute.came_s) > len(came_s), "a plan asks at once"


def test_a_node_that_cannot_be_asked_at_all_says_why_and_the_others_are_asked(fleet: SwapFleet) -> None:
    with beside(fleet, x1="https://[::1", x2="https://127.0.0.9:99999", x3="nowhere") as client:
        for name in ("x1", "x2", "x3"):
            found = wait_for(f"{name} was asked", lambda name=name: asked(client, name))
            assert not found.reachable
            assert found.error
        seen = node(client, "n1").seen_unix_s
        wait_for("n1 is asked", lambda: node(client, "n1").seen_unix_s > seen)


def asked(client: Client, name: str) -> Node | None:
    found = node(client, name)
    return found if found.asked else None


def test_a_node_that_comes_back_is_found_and_one_that_is_taken_out_is_forgotten(fleet: SwapFleet) -> None:
    with beside(fleet) as client:
        wait_for("n1 answers", lambda: node(client, "n1").reachable)
        fleet.agents["n1"].end()
        wait_for("n1 is silent", lambda: not node(client, "n1").reachable)
        last = node(client, "n1").status
        assert last is not None, "what it said last is kept"
        fleet.agents["n1"].start()
        wait_for("n1 is back", lambda: node(client, "n1").reachable)
        wait_for("its stream is read", lambda: client.health()["followed"].get("n1", 0) > last.stream_seq)
    with beside(fleet, x1="https://127.0.0.9:9") as client:
        assert node(client, "x1").status is None
    assert [found.name for found in client.view("nodes", Node)] == ["n1"]


def test_a_certificate_that_cannot_be_read_lets_nothing_begin_until_it_can(fleet: SwapFleet) -> None:
    client = fleet.controller()
    certificate = fleet.home.trust / "operator.crt"
    before = certificate.read_bytes()
    certificate.write_text("half of one")
    try:
        wait_for("it is said", lambda: "operator.crt" in said(client))
        assert [found.name for found in client.view("nodes", Node)] == ["n1"]
        client.freeze("fleet", YES)  # with the certificate that it has
        assert fleet.agents["n1"].client("viewer").status().frozen == ["fleet"]
    finally:
        certificate.write_bytes(before)
    wait_for("it plans again", lambda: "operator.crt" not in said(client))
    client.thaw("fleet", YES)


def said(client: Client) -> str:
    try:
        client.plan(Request(node="n9"))
    except Exception as error:
        return str(error)
    return ""


def test_a_node_that_was_enrolled_a_moment_ago_is_known(fleet: SwapFleet) -> None:
    gridctl(fleet.root, "fleet")
    gridctl(fleet.root, "nodes", "n7", expect=Exit.NOT_FOUND)
    where = ["--address", "127.0.0.207:7001", "--controller", "https://127.0.0.1:7000"]
    gridctl(fleet.root, "enroll", "n7", *where)
    (found,) = data(fleet.root, "nodes", "n7")
    assert (found["name"], found["url"], found["reachable"]) == ("n7", "https://127.0.0.207:7001", False)
    shown = gridctl(fleet.root, "nodes", "n7").stdout
    assert "unknown" in shown or "unreachable" in shown
    fleet.write_fleet_file()
