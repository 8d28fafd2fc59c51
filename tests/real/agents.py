"""Real agents for tests: processes with their own home, certificate and loopback address."""

import contextlib
import http.client
import json
import os
import queue
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gridagent import identity
from gridagent.wire import NodeStatus, OpRequest, OpStatus, Refusal
from gridctl.trust.authority import Authority

DEADLINE_S = 120.0


def wait_for(what: str, look: Callable[[], Any]) -> Any:
    """The first true result of `look`."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if found := look():
                return found
        time.sleep(0.02)
    raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}")


def free_port() -> int:
    """A port for a server that binds it later: not one that the kernel gives to connections meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10_000, lowest)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Refused(Exception):
    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(f"{status} {refusal.code}: {refusal.text}")
        self.code = refusal.code
        self.text = refusal.text


class Client:
    """Calls an agent with the identity of one trust folder."""

    def __init__(self, url: str, trust: Path | None, ca: Path | None = None) -> None:
        host, _, port = url.removeprefix("https://").rpartition(":")
        if trust:
            self.context = identity.client_context(trust)
        else:
            self.context = ssl.create_default_context(cafile=ca)
        self.host, self.port = host, int(port)

    def request(self, method: str, path: str, body: bytes = b"", timeout_s: float = DEADLINE_S) -> bytes:
        connection = http.client.HTTPSConnection(
            self.host, self.port, context=self.context, timeout=timeout_s
        )
        with contextlib.closing(connection):
            connection.request(method, path, body)
            answer = connection.getresponse()
            content = answer.read()
        if answer.status >= 400:
            raise Refused(answer.status, msgspec.json.decode(content, type=Refusal))
        return content

    def get(self, path: str) -> Any:
        return json.loads(self.request("GET", path))

    def post(self, path: str, body: Any, timeout_s: float = DEADLINE_S) -> Any:
        return json.loads(self.request("POST", path, msgspec.json.encode(body), timeout_s))

    def status(self) -> NodeStatus:
        return msgspec.json.decode(self.request("GET", "/v1/status"), type=NodeStatus)

    def lease(self, holder: str = "ctl", fence: int = 1, ttl_s: float = 60.0) -> Any:
        return self.post("/v1/lease", {"holder": holder, "fence": fence, "ttl_s": ttl_s})

    def op(
        self,
        kind: str,
        args: dict[str, Any] | None = None,
        *,
        id: str = "",  # noqa: A002 - the field's name
        run: str = "run-1",
        holder: str = "ctl",
        fence: int = 1,
        job: str = "",
        deadline_s: float = 30.0,
    ) -> OpStatus:
        request = OpRequest(
            id=id or uuid.uuid4().hex,
            run=run,
            fence=fence,
            holder=holder,
            who="tester",
            kind=kind,
            job=job,
            args=args or {},
            deadline_s=deadline_s,
        )
        return msgspec.convert(self.post("/v1/ops", request, deadline_s + DEADLINE_S), OpStatus)

    @contextlib.contextmanager
    def stream(self, after: int) -> Iterator[Iterator[dict[str, Any]]]:
        """Records above `after`, one by one."""
        connection = http.client.HTTPSConnection(
            self.host, self.port, context=self.context, timeout=DEADLINE_S
        )
        with contextlib.closing(connection):
            connection.request("GET", f"/v1/stream?after={after}")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            yield (json.loads(line) for line in iter(answer.readline, b""))


class Agent:
    """One `gridagent serve` process and its home."""

    def __init__(self, fleet: "Fleet", name: str, address: str, config: str) -> None:
        self.fleet, self.name, self.address = fleet, name, address
        self.home = fleet.root / name
        self.trust = self.home / "trust"
        fleet.authority.write_identity(self.trust, "node", name, [address])
        (self.home / "agent.toml").write_text(f'node = "{name}"\nlisten = "{address}:0"\n{config}')
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return (self.home / "agent.log").read_text()

    @property
    def url(self) -> str:
        return (self.home / "url").read_text()

    def start(self, *options: str) -> "Agent":
        with (self.home / "agent.log").open("ab") as log:
            command = [sys.executable, "-m", "gridagent", "serve", "--home", str(self.home), *options]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(f"{self.name} serves", self._serves)
        return self

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        return (self.home / "url").exists() and bool(self.client().status())

    def client(self, who: str = "operator") -> Client:
        return Client(self.url, self.fleet.trust_of(who))

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(DEADLINE_S)


class SessionPeer:
    """A process that speaks a session's side (session_peer.py)."""

    def __init__(self, agent: Agent, **hello: Any) -> None:
        self.session = hello.setdefault("session", uuid.uuid4().hex[:12])
        hello.setdefault("role", "rank")
        file = agent.home / f"hello-{self.session}.json"
        file.write_text(json.dumps(hello))
        script = Path(__file__).with_name("session_peer.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(agent.home / "agent.sock"), str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))

    def order(self, **order: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def send(self, kind: str, /, **fields: Any) -> None:
        self.order(send={"type": kind, **fields})

    def event(self, name: str, **expected: Any) -> dict[str, Any]:
        """The next event of this name and content; others before it are dropped."""
        while True:
            event = self.events.get(timeout=DEADLINE_S)
            if event["event"] == name and all(event[key] == value for key, value in expected.items()):
                return event

    def end(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)  # it reads to the end before the pipe is closed under it
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe:
                    pipe.close()


class Fleet:
    """Agents and sessions of one test. Everything ends with `close`."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="g"))
        self.authority = Authority.ephemeral(self.root / "trust", "testfleet")
        self.agents: dict[str, Agent] = {}
        self.peers: list[SessionPeer] = []

    def trust_of(self, who: str) -> Path:
        """The trust folder of "operator", "viewer" or a node's name."""
        if who == "operator":
            return self.authority.trust_dir
        if who in self.agents:
            return self.agents[who].trust
        folder = self.root / f"trust-{who}"
        if not folder.exists():
            self.authority.write_identity(folder, who, f"{who}-1")
        return folder

    def agent(self, name: str = "n1", config: str = "") -> Agent:
        """Prepares an agent; the caller starts it."""
        agent = Agent(self, name, f"127.0.0.{len(self.agents) + 11}", config)
        self.agents[name] = agent
        return agent

    def peer(self, agent: Agent, **hello: Any) -> SessionPeer:
        """A session at `agent`, once the agent knows it."""
        peer = SessionPeer(agent, **hello)
        self.peers.append(peer)
        wait_for("the session is known", lambda: self.known(agent, peer.session))
        return peer

    def known(self, agent: Agent, session: str) -> Any:
        """RankStatus or SpareStatus of a connected session, else None."""
        status = agent.client().status()
        found = [s for s in (*status.ranks, *status.spares) if s.session == session and s.connected]
        return found[0] if found else None

    def close(self) -> None:
        for peer in self.peers:
            peer.end()
        for agent in self.agents.values():
            if agent.process:
                agent.process.kill()
                agent.process.wait(DEADLINE_S)
            for pid in _spares_of(agent.home):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root, ignore_errors=True)


def _spares_of(home: Path) -> Iterator[int]:
    """Processes that an agent of this home has parked."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[2:6] == [b"gridagent", b"park", b"--home", os.fsencode(home)]:
                yield int(process.name)


@contextlib.contextmanager
def fleet() -> Iterator[Fleet]:
    """A fleet without agents yet."""
    made = Fleet()
    try:
        yield made
    finally:
        made.close()
