"""Enrolment and renewal against the real join endpoint, and what happens when they are interrupted."""

import contextlib
import json
import os
import shutil
import signal
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trust_parties import HOST, Loop, ask, connected, forge, node_server

from gridagent import enrolment, identity
from gridagent.enrolment import JoinToken, join, renew
from gridagent.identity import IdentityError
from gridctl.trust import Authority, TrustError, client_context, serve_join, tokens


class Controller:
    """An authority and its join endpoint, served by a loop of its own."""

    def __init__(self, trust_dir: Path, loop: Loop) -> None:
        self.authority = Authority.ephemeral(trust_dir, "lab")
        self.events: list[dict[str, Any]] = []
        self.url, self._stop = loop.run(serve_join(self.authority, HOST, 0, self.events.append))
        self._loop = loop

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def token(self, node: str = "n1") -> JoinToken:
        return self.authority.enroll(node, HOST)

    def stop(self) -> None:
        async def act() -> None:
            await self._stop()

        self._loop.run(act())


@contextlib.contextmanager
def controller_at(trust_dir: Path) -> Iterator[Controller]:
    loop = Loop()
    try:
        controller = Controller(trust_dir, loop)
        try:
            yield controller
        finally:
            controller.stop()
    finally:
        loop.close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with controller_at(tmp_path / "op" / "trust") as controller:
        yield controller


def refused(controller: Controller, token: JoinToken | str, home: Path) -> str:
    """Joins in vain: nothing may be left behind. Returns the reason."""
    with pytest.raises(IdentityError) as caught:
        join(token if isinstance(token, str) else token.encode(), home)
    assert not (home / "trust").exists()
    assert not (home / "trust.joining").exists()
    return str(caught.value)


def test_a_node_joins_and_speaks_with_the_fleet(controller: Controller, tmp_path: Path) -> None:
    home = tmp_path / "n1"
    peer = join(controller.token().encode(), home)
    trust = home / "trust"
    assert (peer.fleet, peer.role, peer.name, peer.addresses) == ("lab", "node", "n1", (HOST,))
    assert sorted(path.name for path in trust.iterdir()) == [
        "ca.crt",
        "controller.url",
        "crl.pem",
        "node.crt",
        "node.key",
    ]
    assert stat.S_IMODE((trust / "node.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(trust.stat().st_mode) == 0o700
    assert identity.permission_warnings(trust) == []
    assert (home / "agent.toml").read_text() == 'node = "n1"\nlisten = "127.0.0.1:7443"\n'
    assert 29.9 < (peer.not_after_unix_s - time.time()) / 86400 <= 30
    operator = controller.authority.trust_dir
    with node_server(trust) as server, connected(client_context(operator), server.port) as connection:
        assert ask(connection)[0] == 200
        assert identity.peer_of(connection.sock, operator, node="n1") == peer
    assert controller.events == [{"what": "join", "from": HOST, "node": "n1", "serial": peer.serial}]
    key = (trust / "node.key").read_bytes()
    for path in (tmp_path / "op").rglob("*"):
        assert path.is_dir() or key not in path.read_bytes(), "the node's key never leaves the node"


def test_the_command_joins_with_the_token_from_stdin(controller: Controller, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gridagent", "join", "-", "--home", str(tmp_path / "n1")],
        input=controller.token().encode() + "\n",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "joined as node n1 of fleet lab" in done.stderr
    assert identity.own_identity(tmp_path / "n1" / "trust").name == "n1"


def test_a_token_works_once(controller: Controller, tmp_path: Path) -> None:
    token = controller.token()
    join(token.encode(), tmp_path / "n1")
    assert "was used before" in refused(controller, token, tmp_path / "replay")
    assert [("refused" in event) for event in controller.events] == [False, True]


def test_a_token_ends_after_an_hour(
    controller: Controller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TTL_S", -1.0)
    assert "has expired" in refused(controller, controller.token(), tmp_path / "n1")


def test_a_token_is_for_one_node(controller: Controller, tmp_path: Path) -> None:
    token = controller.token("n1")
    assert "is for node n1, not for 'n2'" in refused(controller, replace(token, node="n2"), tmp_path / "n2")
    join(token.encode(), tmp_path / "n1")  # and that did not use it up


def test_a_made_up_token_is_refused(controller: Controller, tmp_path: Path) -> None:
    assert "unknown here" in refused(
        controller, replace(controller.token(), secret="x" * 43), tmp_path / "n1"
    )
    whole = controller.token().encode()
    for text in ("", "gridjoin1.", whole[:-9], whole[9:], "gridjoin1.e30"):
        assert "no whole token" in refused(controller, text, tmp_path / "n1")


def test_revoking_a_node_withdraws_its_open_token(controller: Controller, tmp_path: Path) -> None:
    join(controller.token().encode(), tmp_path / "n1")
    second = controller.token()
    controller.authority.revoke("n1")
    assert "was withdrawn" in refused(controller, second, tmp_path / "again")
    join(controller.token().encode(), tmp_path / "again")  # a token made afterwards is good


def test_a_man_in_the_middle_learns_no_secret(controller: Controller, tmp_path: Path) -> None:
    token = controller.token()
    with controller_at(tmp_path / "mallory" / "trust") as mallory:
        reason = refused(controller, replace(token, url=mallory.url), tmp_path / "n1")
        assert "The secret was not sent" in reason
        assert mallory.events == []
    join(token.encode(), tmp_path / "n1")  # the token is unspent


def test_a_node_of_the_fleet_cannot_pose_as_the_controller(controller: Controller, tmp_path: Path) -> None:
    """It has a certificate for this very address, and passes on the true root certificate."""
    from aiohttp import web

    controller.authority.write_identity(tmp_path / "evil", "node", "evil", [HOST])
    ca_pem = (tmp_path / "evil" / "ca.crt").read_text()
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"ca": ca_pem})

    loop = Loop()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    context = identity.server_context(tmp_path / "evil")
    context.verify_mode = ssl.CERT_NONE
    try:
        loop.run(runner.setup())
        loop.run(web.TCPSite(runner, HOST, 0, ssl_context=context).start())
        url = f"https://{HOST}:{runner.addresses[0][1]}"
        reason = refused(controller, replace(controller.token(), url=url), tmp_path / "n1")
        assert "where the controller was expected" in reason
        assert asked == ["/v1/ca"]
    finally:
        loop.run(runner.cleanup())
        loop.close()


def test_an_unreachable_controller_is_said(controller: Controller, tmp_path: Path) -> None:
    token = controller.token()
    assert "no answer from https://127.0.0.1:9" in refused(
        controller, replace(token, url="https://127.0.0.1:9"), tmp_path / "n1"
    )
    controller.stop()
    with pytest.raises(TrustError, match="no controller accepts nodes now"):
        controller.authority.enroll("n2", HOST)


def test_an_enrolled_node_does_not_join_again(controller: Controller, tmp_path: Path) -> None:
    join(controller.token().encode(), tmp_path / "n1")
    before = (tmp_path / "n1" / "trust" / "node.crt").read_bytes()
    with pytest.raises(IdentityError, match="this node is enrolled"):
        join(controller.token().encode(), tmp_path / "n1")
    assert (tmp_path / "n1" / "trust" / "node.crt").read_bytes() == before


def test_renewal_under_a_running_server(controller: Controller, tmp_path: Path) -> None:
    home = tmp_path / "n1"
    first = join(controller.token().encode(), home)
    old_key = (home / "trust" / "node.key").read_bytes()
    operator = controller.authority.trust_dir
    assert not identity.renewal_due(home / "trust", time.time() + 19 * 86400)
    assert identity.renewal_due(home / "trust", time.time() + 21 * 86400)
    with node_server(home / "trust") as server:
        with connected(client_context(operator), server.port) as before:
            assert ask(before)[0] == 200
            second = renew(home)
            server.reload()
            assert ask(before)[0] == 200
        with connected(client_context(operator), server.port) as after:
            assert identity.peer_of(after.sock, operator, node="n1") == second
            assert ask(after)[0] == 200
    assert second.serial != first.serial
    assert second.addresses == first.addresses
    assert (home / "trust" / "node.key").read_bytes() != old_key
    assert [event["what"] for event in controller.events] == ["join", "renew"]


def test_a_revoked_node_cannot_renew_and_keeps_what_it_has(controller: Controller, tmp_path: Path) -> None:
    home = tmp_path / "n1"
    join(controller.token().encode(), home)
    controller.authority.revoke("n1", "keyCompromise")
    before = {path: path.read_bytes() for path in (home / "trust").iterdir()}
    with pytest.raises(IdentityError, match=r"the controller refuses: .* is revoked"):
        renew(home)
    assert {path: path.read_bytes() for path in (home / "trust").iterdir()} == before


def test_only_a_node_in_force_renews_and_only_itself(controller: Controller, tmp_path: Path) -> None:
    csr = json.dumps({"csr": enrolment._new_request("n1")[1]}).encode()
    operator = controller.authority.trust_dir
    with connected(client_context(operator), controller.port) as connection:
        status, said = ask(connection, "/v1/renew", "POST", csr)
        assert (status, "asks for a certificate of node 'n1'" in said) == (403, True)
    controller.authority.write_identity(tmp_path / "n2", "node", "n2", [HOST])
    with connected(client_context(tmp_path / "n2"), controller.port) as connection:
        assert ask(connection, "/v1/renew", "POST", csr)[0] == 403
    forge(
        tmp_path / "foreign", controller.authority, "gridctl://other/node/n1", role="node", file_name="node"
    )
    with connected(client_context(tmp_path / "foreign"), controller.port) as connection:
        status, said = ask(connection, "/v1/renew", "POST", csr)
        assert (status, "is of another fleet" in said) == (403, True)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(operator / "ca.crt")
    with connected(bare, controller.port) as connection:
        status, said = ask(connection, "/v1/renew", "POST", csr)
        assert (status, "showed no certificate" in said) == (403, True)
        assert ask(connection, "/v1/join", "POST", b"{}")[0] == 403
        garbage = json.dumps({"secret": "x", "csr": "x"}).encode()
        status, said = ask(connection, "/v1/join", "POST", garbage)
        assert (status, json.loads(said)["code"]) == (400, "bad-request")


# Kills its own process at the COUNTth change that it makes below ROOT.
_KILLED = """
import os, signal, sys
from pathlib import Path
from gridagent import enrolment
root, count, what, token = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
seen = 0
CHANGES = {"os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree", "socket.connect"}
def hook(event, args):
    global seen
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if event in CHANGES or (writes and str(args[0]).startswith(root)):
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
if what == "join":
    enrolment.join(token, Path(root))
else:
    enrolment.renew(Path(root))
"""


def killed_at(count: int, what: str, home: Path, token: str = "") -> bool:
    """Runs `what` in a process that is killed at its COUNTth change. False: it ended before that."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(home), str(count), what, token],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr.decode()
    return done.returncode != 0


def test_kill_9_in_a_join_leaves_all_or_nothing(controller: Controller, tmp_path: Path) -> None:
    outcomes = []
    for count in range(1, 200):
        home = tmp_path / f"n{count}"
        home.mkdir()
        if not killed_at(count, "join", home, controller.token().encode()):
            break
        whole = (home / "trust").exists()
        outcomes.append(whole)
        if whole:
            identity.server_context(home / "trust")
        else:
            join(controller.token().encode(), home)  # what was left does not stand in the way
        assert identity.own_identity(home / "trust").name == "n1"
    assert outcomes.count(False) >= 10, "it was killed at every change, so also before the last ones"
    assert outcomes == sorted(outcomes)


def test_kill_9_in_a_renewal_leaves_one_whole_pair(controller: Controller, tmp_path: Path) -> None:
    first = join(controller.token().encode(), tmp_path / "n1")
    renewed = []
    for count in range(1, 200):
        home = tmp_path / f"killed{count}"
        shutil.copytree(tmp_path / "n1", home)
        if not killed_at(count, "renew", home):
            break
        identity.server_context(home / "trust")  # loads the pair: raises if key and chain do not match
        renewed.append(identity.own_identity(home / "trust").serial != first.serial)
        assert not (home / "trust" / "next").exists()
        assert renew(home).name == "n1"  # what was left does not stand in the way
    assert renewed == sorted(renewed)
    assert renewed.count(False) >= 5, "some were killed before the new pair was decided"
    assert renewed.count(True) >= 2, "some were killed between the replacements of its two files"
