"""Notices to real receivers: web servers, a mail server, Alertmanager; over restarts and failures."""

import asyncio
import contextlib
import hmac
import json
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from email.message import Message
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from agents import free_port, wait_for
from aiohttp import web
from command_line import data, gridctl
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from swap_fleet import swap_fleet

from gridagent import journal
from gridctl.control.herald import Herald
from gridctl.control.ledger import Ledger
from gridctl.home import Home
from gridctl.model.fleet import Node
from gridctl.notify import post

PATIENCE_S = 60.0
ALERTMANAGER = shutil.which("prometheus-alertmanager")


class World:
    """A controller's home and journal, without its nodes."""

    def __init__(self, home: Path, config: str) -> None:
        self.home = Home.at(home)
        self.home.notify_file.write_text(config)
        self.ledger = Ledger(self.home, "test")
        self.nodes: dict[str, Node] = {}
        self.read_only = ""
        self.herald = Herald(self)

    def incident(self, state: str = "open", title: str = "ecc on n1", **more: Any) -> None:
        about = {"incident": "i-1", "kind": "ecc", "node": "n1", "job": "llm"}
        self.ledger.append("incident", {**about, "state": state, "title": title, **more})

    def finding(self, severity: str) -> None:
        said = {"type": "finding", "device": "gpu:1", "kind": "ecc", "severity": severity, "why": ["Xid 48"]}
        self.ledger.append("finding", {"incident": "i-1", "node": "n1", **said})

    async def until(self, done: Callable[[], bool]) -> None:
        """Lets the herald have its turns until that is so."""
        end_s = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < end_s, (self.herald.trials, self.told())
            await self.herald.turn()
            await asyncio.sleep(0.02)

    def told(self) -> list[tuple[str, str, str]]:
        records = journal.read(self.home.journal)
        return [(r.data["receiver"], r.data["event"], r.data["state"]) for r in records if r.kind == "notice"]

    async def close(self) -> None:
        await self.herald.close()
        self.ledger.close()


class Web:
    """A server that takes what it is sent, or answers what it is told to."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, Any, dict[str, str], bytes]] = []
        self.answers: list[int] = []
        self.port = free_port()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _take(self, request: web.Request) -> web.Response:
        status = self.answers.pop(0) if self.answers else 202
        body = await request.read()
        if status < 300:
            self.taken.append((request.path, json.loads(body), dict(request.headers), body))
        return web.Response(status=status, text="\x1b[31mno", headers={"Retry-After": "0"})

    async def start(self, context: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=context).start()

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()


@contextlib.asynccontextmanager
async def served(context: ssl.SSLContext | None = None) -> AsyncIterator[Web]:
    server = Web()
    await server.start(context)
    try:
        yield server
    finally:
        await server.stop()


def config(*receivers: str, route: str = "") -> str:
    names = json.dumps([f"to{number}" for number in range(len(receivers))])
    parts = [f'[[receiver]]\nname = "to{number}"\n{text}\n' for number, text in enumerate(receivers)]
    return "\n".join([*parts, f'[[route]]\nname = "all"\nreceivers = {names}\n{route}'])


def test_one_word_to_each_and_an_acknowledgement_to_all(tmp_path: Path) -> None:
    async def play() -> None:
        async with served() as server:
            world = World(
                tmp_path,
                config(
                    f'kind = "webhook"\nurl = "{server.url}/hook"\nsecret = "k"',
                    f'kind = "slack"\nurl = "{server.url}/chat"',
                    f'kind = "pagerduty"\nurl = "{server.url}/v2/enqueue"\nsecret = "ROUTING"',
                ),
            )
            world.incident()
            world.finding("critical")
            await world.until(lambda: len(server.taken) == 3)
            for _ in range(3):
                world.finding("critical")
                await world.herald.turn()
            assert len(world.told()) == len(server.taken) == 3, "symptoms are no news"
            by_path = {path: (body, headers, raw) for path, body, headers, raw in server.taken}
            body, headers, raw = by_path["/hook"]
            assert headers["X-Gridctl-Signature"] == f"sha256={hmac.digest(b'k', raw, 'sha256').hex()}"
            assert (body["severity"], body["incidents"][0]["node"]) == ("critical", "n1")
            assert "gridctl incident ack i-1" in by_path["/chat"][0]["text"]
            event = by_path["/v2/enqueue"][0]
            assert (event["routing_key"], event["event_action"]) == ("ROUTING", "trigger")
            world.ledger.append(
                "audit", {"what": "ack", "incident": "i-1", "who": "ann", "value": "", "reason": "mine"}
            )
            await world.until(lambda: len(server.taken) == 6)
            acked = [body for path, body, *_ in server.taken if path == "/v2/enqueue"][1]
            assert (acked["event_action"], acked["dedup_key"]) == ("acknowledge", event["dedup_key"])
            world.incident("closed", "it is repaired")
            await world.until(lambda: len(server.taken) == 9)
            await world.herald.turn()
            assert world.herald.past.threads == {}
            await world.close()

    asyncio.run(play())


def test_what_was_not_taken_is_sent_again_also_by_the_next_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gridctl.control.herald.RETRY_S", 0.05)

    async def play() -> None:
        server = Web()
        text = config(f'kind = "webhook"\nurl = "{server.url}/hook?token=SECRET"')
        world = World(tmp_path, text)
        world.incident()
        await world.until(lambda: any(trial.count > 2 for trial in world.herald.trials.values()))
        assert world.told() == [("to0", "opened", "failed")], "said once, not at each attempt"
        (late,) = world.herald.status().late
        assert "SECRET" not in late.why
        assert "SECRET" not in "".join(str(r.data) for r in journal.read(world.home.journal))
        await world.close()
        await server.start()
        server.answers = [500, 429, 302]
        world = World(tmp_path, text)
        await world.until(lambda: bool(server.taken))
        await world.until(lambda: world.told()[-1] == ("to0", "opened", "sent"))
        await world.close()
        world = World(tmp_path, text)
        for _ in range(5):
            await world.herald.turn()
        assert world.told().count(("to0", "opened", "sent")) == len(server.taken) == 1, "never twice"
        await world.close()
        await server.stop()

    asyncio.run(play())


def test_a_receiver_that_hangs_holds_up_nobody(tmp_path: Path) -> None:
    async def play() -> None:
        heard: list[asyncio.StreamWriter] = []
        hung = await asyncio.start_server(lambda _, writer: heard.append(writer), "127.0.0.1", 0)
        port = hung.sockets[0].getsockname()[1]
        async with served() as server:
            world = World(
                tmp_path,
                config(
                    f'kind = "webhook"\nurl = "http://127.0.0.1:{port}"',
                    f'kind = "webhook"\nurl = "{server.url}"',
                ),
            )
            world.incident()
            await world.until(lambda: len(server.taken) == 1)
            await world.close()
        assert heard, "it was asked as well"
        hung.close()
        for writer in heard:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    asyncio.run(play())


@contextlib.contextmanager
def running(command: list[str], ready: Callable[[], bool]) -> Iterator[None]:
    """A program, from when it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for("it answers", ready)
        yield
    finally:
        process.kill()
        process.wait()


def test_mail(tmp_path: Path) -> None:
    port, box = free_port(), tmp_path / "box"
    command = [sys.executable, "-m", "aiosmtpd", "-n", "-l", f"127.0.0.1:{port}"]

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return True
        return False

    def mails() -> list[Message]:
        return [message_from_bytes(path.read_bytes()) for path in sorted((box / "new").glob("*"))]

    async def play() -> None:
        world = World(
            tmp_path,
            config(
                f'kind = "mail"\nurl = "smtp://127.0.0.1:{port}"\nsender = "gridctl@example.org"\n'
                'to = ["oncall@example.org"]'
            ),
        )
        world.incident(title="ecc\r\nBcc: all@example.org")
        await world.until(lambda: len(mails()) == 1)
        world.incident("closed", "done")
        await world.until(lambda: ("to0", "closed", "sent") in world.told())
        await world.close()

    with running([*command, "-c", "aiosmtpd.handlers.Mailbox", str(box)], listens):
        asyncio.run(play())
    first, last = sorted(mails(), key=lambda mail: "closed" in mail["Subject"])
    assert first["Bcc"] is None
    assert first["Subject"].startswith("[warning] ecc")
    assert first["References"] == last["References"], "one thread in a mail program"
    assert "gridctl incident show i-1" in str(first.get_payload())


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[str]:
    if ALERTMANAGER is None:
        pytest.skip("needs prometheus-alertmanager")
    file = tmp_path / "alertmanager.yml"
    file.write_text("route:\n  receiver: none\nreceivers:\n- name: none\n")
    port = free_port()
    command = [
        ALERTMANAGER,
        f"--config.file={file}",
        f"--storage.path={tmp_path / 'am'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{url}/-/ready").is_success
        return False

    with running(command, ready):
        yield url


def test_alertmanager_has_the_alert_until_it_is_over_and_is_silent_once_it_is_acknowledged(
    tmp_path: Path, alertmanager: str
) -> None:
    def alerts() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{alertmanager}/api/v2/alerts").json()
        return found

    async def play() -> None:
        home = tmp_path / "home"
        home.mkdir()
        world = World(home, config(f'kind = "alertmanager"\nurl = "{alertmanager}"'))
        world.incident()
        world.finding("critical")
        await world.until(lambda: bool(alerts()))
        (alert,) = alerts()
        assert alert["status"]["state"] in ("active", "unprocessed")
        assert alert["labels"]["incident"] == "i-1"
        world.ledger.append(
            "audit", {"what": "ack", "incident": "i-1", "who": "ann", "value": "", "reason": "mine"}
        )
        await world.until(lambda: [a["status"]["state"] for a in alerts()] == ["suppressed"])
        (silence,) = httpx.get(f"{alertmanager}/api/v2/silences").json()
        assert (silence["createdBy"], silence["comment"]) == ("ann", "acknowledged by ann")
        world.incident("closed", "repaired")
        await world.until(lambda: alerts() == [])
        await world.close()

    asyncio.run(play())


def test_a_receiver_with_another_certificate_is_told_nothing(tmp_path: Path) -> None:
    """With a certificate of a private CA: only where notify.toml names that CA."""
    certificate, key = self_signed(tmp_path)

    async def play() -> None:
        async with served(server_context(certificate, key)) as server:
            receiver = f'kind = "webhook"\nurl = "https://127.0.0.1:{server.port}"\nsecret = "k"'
            world = World(tmp_path, config(receiver, f'{receiver}\nca = "{certificate}"'))
            world.incident()
            await world.until(lambda: len(world.told()) == 2)
            assert sorted(world.told()) == [("to0", "opened", "failed"), ("to1", "opened", "sent")]
            (late,) = world.herald.status().late
            assert "CERTIFICATE_VERIFY_FAILED" in late.why
            assert len(server.taken) == 1
            await world.close()

    asyncio.run(play())


def self_signed(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receiver")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "r.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "r.key").write_bytes(key.private_bytes(*form))
    return folder / "r.crt", folder / "r.key"


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return context


def test_secrets_may_lie_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", " k \n")
    (tmp_path / "key").write_text("f\n")
    assert [post.resolve(text) for text in ("env:KEY", f"file:{tmp_path}/key", "plain")] == [
        "k",
        "f",
        "plain",
    ]
    for text in ("env:NONE", f"file:{tmp_path}/none"):
        with pytest.raises(post.NotTold):
            post.resolve(text)


def test_the_command_line() -> None:
    because = ("--yes", "--reason", "a test")
    with swap_fleet() as fleet:
        fleet.nodes("n1")
        port = free_port()
        text = config(f'kind = "webhook"\nurl = "http://127.0.0.1:{port}"')
        fleet.home.notify_file.write_text(text)
        (receiver,) = data(fleet.root, "notify", "status")["receivers"]
        assert (receiver["name"], receiver["threads"]) == ("to0", [])
        tried = gridctl(fleet.root, "notify", "test", expect=1)
        assert "ConnectError" in tried.stdout
        gridctl(fleet.root, "notify", "test", "nobody", expect=4)
        gridctl(fleet.root, "notify", "silence", "node=*", "--for", "1h", *because, expect=3)
        gridctl(fleet.root, "notify", "silence", "color=red", "--for", "1h", *because, expect=3)
        gridctl(fleet.root, "notify", "silence", "node=n1", "--for", "soon", *because, expect=2)
        gridctl(fleet.root, "notify", "silence", "node=n1", "--for", "2000-01-01", *because, expect=3)
        (silence,) = data(fleet.root, "notify", "silence", "node=n1", "job=llm-*", "--for", "4h", *because)
        assert data(fleet.root, "notify", "status")["silences"] == [silence]
        gridctl(fleet.root, "notify", "unsilence", silence["id"], *because)
        gridctl(fleet.root, "notify", "unsilence", silence["id"], *because, expect=4)
        assert data(fleet.root, "notify", "status")["silences"] == []
        fleet.home.notify_file.write_text("[[")
        assert "notify.toml" in data(fleet.root, "notify", "status")["error"]
