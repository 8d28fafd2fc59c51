"""Making a fleet and adding nodes from the command line, where no keyring runs."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import wait_for
from command_line import OnTerminal, data, gridctl

from gridagent.enrolment import JoinToken
from gridagent.journal import read
from gridctl.cli.exits import Exit
from gridctl.trust import Authority, own_identity
from gridctl.trust.acts import FILE, read_acts

PASSPHRASE = "correct horse battery"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An operator's home in a session without any keyring service."""
    folder = Path(tempfile.mkdtemp(prefix="g"))
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "no-bus-here"))
    yield folder
    end_controllers(folder)
    shutil.rmtree(folder)


def end_controllers(folder: Path) -> None:
    """Of all homes below it; returns when they have ended."""
    for lock in folder.rglob("controller.lock"):
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(lock.read_text()), signal.SIGTERM)
        with lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # a controller holds it for as long as it lives


def make_fleet(home: Path) -> None:
    person = OnTerminal(home, "init", "rome")
    for _ in range(2):
        person.sees("(?i)passphrase[^\n]*: $")
        person.screen = ""
        person.types(PASSPHRASE)
    assert person.ends() == Exit.OK, person.screen
    assert PASSPHRASE not in person.screen


def test_without_keyring_and_terminal_no_fleet_is_made(home: Path) -> None:
    done = gridctl(home, "init", "rome", expect=Exit.ERROR)
    assert "passphrase" in done.stderr
    assert list(home.iterdir()) == []


def test_a_script_makes_a_fleet_and_renews_its_issuer(home: Path) -> None:
    secret = home / "passphrase"
    secret.write_text(f"{PASSPHRASE}\nanother line\n")
    secret.chmod(0o640)
    assert "chmod 600" in gridctl(home, "init", "--passphrase-file", str(secret), expect=Exit.ERROR).stderr
    secret.chmod(0o600)
    assert "No such file" in gridctl(home, "init", "--passphrase-file", "/nowhere", expect=Exit.ERROR).stderr
    assert list(home.iterdir()) == [secret]
    gridctl(home, "init", "rome", "--passphrase-file", str(secret))
    made = serials(home)
    gridctl(home, "init", "--renew-issuer", "--passphrase-file", "-", types=f"{PASSPHRASE}\r\n")
    renewed = serials(home)
    assert not set(made) & set(renewed)
    wrong = gridctl(home, "init", "--renew-issuer", "--passphrase-file", "-", types="x\n", expect=Exit.ERROR)
    assert "wrong passphrase" in wrong.stderr
    assert serials(home) == renewed
    told = [(act.what, act.target, act.serials) for _, act in read_acts(home / "trust")]
    assert told == [("init", "rome", made), ("renew-issuer", "rome", renewed)]
    assert PASSPHRASE not in (home / "trust" / FILE).read_text()


def serials(home: Path) -> list[str]:
    return Authority(home / "trust").serials()


@pytest.mark.parametrize(
    ("typed", "why"),
    [("", "is empty"), ("short\n", "at least 12 characters"), ("\udcff" * 12, "no UTF-8 text")],
)
def test_what_is_no_passphrase(home: Path, typed: str, why: str) -> None:
    secret = home / "passphrase"
    secret.write_bytes(typed.encode(errors="surrogateescape"))
    secret.chmod(0o600)
    assert why in gridctl(home, "init", "--passphrase-file", str(secret), expect=Exit.ERROR).stderr
    assert list(home.iterdir()) == [secret]


def test_a_colleague_may_look_until_that_is_taken_back(home: Path) -> None:
    make_fleet(home)
    his = home / "his"
    given = ["grant", "bob", str(his / "trust"), "--yes", "--reason", "on call"]
    assert "7 to 90" in gridctl(home, *given, "--days", "1000", expect=Exit.USAGE).stderr
    serial = gridctl(home, *given).stdout.strip()
    assert "is there already" in gridctl(home, *given, expect=Exit.ERROR).stderr
    assert (his / "trust/operator.key").stat().st_mode & 0o777 == 0o600
    (his / "fleet.toml").write_text((home / "fleet.toml").read_text())
    assert {check["what"]: check["state"] for check in data(his, "doctor")}["trust"] == "ok"
    refused = gridctl(his, "freeze", "--yes", "--reason", "a try", expect=Exit.REFUSED)
    assert "viewer bob" in refused.stderr
    denied = gridctl(his, "grant", "eve", str(his / "eve"), "--yes", "--reason", "x", expect=Exit.ERROR)
    assert "in the home where `gridctl init` ran" in denied.stderr
    assert gridctl(home, "revoke", "viewer/bob", "--yes", "--reason", "he left").stdout.split() == [serial]
    told = [(act.what, act.target, act.reason, act.serials) for _, act in read_acts(home / "trust")]
    assert told[1:] == [
        ("grant", "viewer/bob", "on call", [serial]),
        ("revoke", "viewer/bob", "he left (unspecified)", [serial]),
    ]


def test_nobody_grants_to_himself(home: Path) -> None:
    make_fleet(home)
    me = own_identity(home / "trust")
    given = ["grant", me.name, str(home / "mine"), "--yes", "--reason", "a second laptop"]
    assert "is you" in gridctl(home, *given, "--role", "operator", expect=Exit.ERROR).stderr
    assert not (home / "mine").exists()
    gridctl(home, *given)


def test_the_journal_has_every_act_once_whoever_restarts(home: Path) -> None:
    make_fleet(home)
    token = data(
        home, "enroll", "n1", "--address", "127.0.0.9:7001", "--controller", "https://127.0.0.1:7000"
    )
    expected = [("init", "rome"), ("enroll", "n1")]
    for name in ("bob", "eve"):
        gridctl(home, "grant", name, str(home / name), "--yes", "--reason", f"\x1b[31m{name}")
        data(home, "nodes")
        expected.append(("grant", f"viewer/{name}"))
        wait_for("the journal has it", lambda: journaled(home)[-1:] == expected[-1:])
        assert journaled(home) == expected
        end_controllers(home)
    text = "".join(path.read_text() for path in (home / "journal").glob("*.jsonl"))
    assert JoinToken.decode(token["token"]).secret not in text
    assert "\x1b" not in text


def journaled(home: Path) -> list[tuple[str, str]]:
    return [(r.data["what"], r.data["target"]) for r in read(home / "journal") if r.kind == "audit"]


def test_a_person_makes_a_fleet_and_adds_nodes(home: Path) -> None:
    make_fleet(home)
    assert tomllib.loads((home / "fleet.toml").read_text()) == {"fleet": {"name": "rome"}}
    assert (home / "trust/root.key.enc").is_file()
    gridctl(home, "init", "rome", expect=Exit.ERROR)

    where = ["--address", "127.0.0.9:7001", "--rack", 'r"1', "--controller", "https://127.0.0.1:7000"]
    first = gridctl(home, "enroll", "n1", *where).stdout.strip()
    second = data(home, "enroll", "n1", *where)
    token = JoinToken.decode(first)
    assert (token.node, token.listen, token.url) == ("n1", "127.0.0.9:7001", "https://127.0.0.1:7000")
    assert second["token"] != first, "every token is a new one"
    nodes = tomllib.loads((home / "fleet.toml").read_text())["node"]
    assert nodes == [{"name": "n1", "url": "https://127.0.0.9:7001", "rack": 'r"1'}]

    gridctl(home, "enroll", "no/such name", *where, expect=Exit.USAGE)
    gridctl(home, "enroll", "n2", "--address", "a b", expect=Exit.USAGE)
    because = ["--yes", "--reason", "x"]
    gridctl(home, "grant", "no/such name", str(home / "his"), *because, expect=Exit.USAGE)
    gridctl(home, "revoke", "n1", "--cause", "dislike", *because, expect=Exit.USAGE)
    gridctl(home, "revoke", "nobody", *because, expect=Exit.NOT_FOUND)
    assert len(tomllib.loads((home / "fleet.toml").read_text())["node"]) == 1
    states = {check["what"]: check["state"] for check in data(home, "doctor")}
    silent = {"home": "ok", "trust": "ok", "people": "ok"}
    assert states == {**silent, "journal": "warn", "controller": "unknown"}


def test_a_controller_whose_home_is_deleted_ends(home: Path) -> None:
    make_fleet(home)
    gridctl(home, "nodes")
    stat = Path(f"/proc/{int((home / 'controller.lock').read_text())}/stat")
    assert stat.exists()
    (home / "controller.lock").unlink()

    def ended() -> bool:
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"

    wait_for("the controller ends", ended)


def test_the_doctor_ends_with_7_where_something_must_be_put_right(home: Path) -> None:
    make_fleet(home)
    (home / "trust/operator.key").chmod(0o644)
    done = gridctl(home, "doctor", expect=Exit.NOT_VERIFIED)
    assert "chmod 600" in done.stdout


def test_a_node_joins_is_seen_and_is_revoked(home: Path) -> None:
    make_fleet(home)
    watchman = OnTerminal(home, "watch", "--listen", "127.0.0.1:0")
    wait_for("nodes can join", (home / "trust/join.url").exists)
    with contextlib.closing(socket.create_server(("127.0.0.31", 0))) as free:
        port = free.getsockname()[1]
    token = gridctl(home, "enroll", "n1", "--address", f"127.0.0.31:{port}").stdout
    node = home / "n1"
    agent = [sys.executable, "-m", "gridagent"]
    subprocess.run([*agent, "join", "-", "--home", str(node)], input=token, text=True, check=True, timeout=60)
    with subprocess.Popen([*agent, "serve", "--home", str(node)], stderr=subprocess.DEVNULL) as serving:
        try:
            wait_for("the controller sees it", lambda: data(home, "nodes", "n1")[0]["reachable"])
            serials = gridctl(home, "revoke", "n1", "--yes", "--reason", "stolen").stdout.split()
            assert len(serials) == 1
            wait_for("its certificate counts no more", lambda: not data(home, "nodes", "n1")[0]["reachable"])
        finally:
            serving.terminate()
    watchman.interrupts()
    assert watchman.ends() == Exit.OK, watchman.screen
    assert data(home, "journal", "verify")["ok"] is True
