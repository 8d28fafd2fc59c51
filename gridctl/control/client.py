"""What the faces talk to the controller with: synchronous, over its Unix socket."""

import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gridagent.journal import Record
from gridagent.wire import Blocker
from gridctl.errors import ConfigError, GridctlError, Hangs, Refused, Unanswered
from gridctl.home import Home
from gridctl.model.evidence import Collected, Wanted
from gridctl.model.fleet import Node
from gridctl.model.notices import NotifyStatus, Silence, SilenceWanted
from gridctl.model.plans import DryCall, Gate, Plan, Request
from gridctl.model.runs import Act, Incident, Run
from gridctl.ports.lines import Lines

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

CONNECT_S = 2.0
#: What the controller knows by itself. Longer than a slow disk keeps it from answering.
READ_S = 15.0
#: A freeze asks every agent at once, none of them for longer than this.
FREEZE_S = 30.0
#: A plan asks sessions, which answer at their next step boundary.
PLAN_S = 120.0
#: A node may take five minutes to collect; then its archive is fetched.
EVIDENCE_S = 1200.0
#: A line a second is promised.
RECORDS_S = 15.0
NAME_CHARS_MAX = 256


def listens(home: Home) -> bool:
    """Whether somebody serves the controller's socket. Costs no more than the attempt."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(home.socket))
        except (BlockingIOError, TimeoutError):
            return True  # and has so many waiting that one more finds no room
        except OSError:
            return False
    return True


class _Answer(msgspec.Struct):
    code: str = "failed"
    text: str = ""
    blockers: list[Blocker] = []


class Client:
    """Every call raises `Refused` for a no of the controller, `Unanswered` if there is no controller and
    `Hangs` if it gives no answer in time."""

    def __init__(self, home: Home) -> None:
        import httpx

        self._home = home
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(home.socket)),
            base_url="http://gridctl",
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def health(self) -> dict[str, Any]:
        return self._ask("GET", "/v1/health", dict[str, Any])

    def view(self, what: str, kind: type[T]) -> list[T]:
        """nodes, jobs, spares, incidents, open-incidents, plans, runs, risk: structs of model and assess."""
        return self._ask("GET", f"/v1/view/{what}", list[kind])  # type: ignore[valid-type]

    def one(self, what: str, name: str, kind: type[T]) -> T:
        """One run, plan or incident by its id, or the risk of a node by its name."""
        return self._ask("GET", f"/v1/{what}/{_path(name)}", kind)

    def plan(self, request: Request) -> Plan:
        return self._ask("POST", "/v1/plan", Plan, request, PLAN_S)

    def dry_run(self, plan: str) -> list[DryCall]:
        return self._ask("POST", "/v1/apply", list[DryCall], {"plan": plan, "dry_run": True})

    def apply(self, plan: str, gate: Gate) -> Run:
        """Returns as soon as the run has started; `one("run", ...)` or `events` tell how it goes."""
        return self._ask("POST", "/v1/apply", Run, {"plan": plan, "gate": gate}, PLAN_S)

    def abort(self, run: str, gate: Gate) -> Run:
        return self._ask("POST", f"/v1/run/{_path(run)}/abort", Run, gate, PLAN_S)

    def rollback(self, run: str, gate: Gate) -> Run:
        return self._ask("POST", f"/v1/run/{_path(run)}/rollback", Run, gate, PLAN_S)

    def resume(self, run: str, gate: Gate) -> Run:
        return self._ask("POST", f"/v1/run/{_path(run)}/resume", Run, gate, PLAN_S)

    def dry_steer(self, run: str, verb: str) -> list[DryCall]:
        """Every call that abort, rollback or resume would make."""
        return self._ask("POST", f"/v1/run/{_path(run)}/{verb}?dry_run=1", list[DryCall])

    def freeze(self, scope: str, gate: Gate) -> list[dict[str, str]]:
        """[{"node", "answer"}]: "ok", or why this node will get it later; with "refused": why never."""
        return self._ask("POST", "/v1/freeze", list[dict[str, str]], {"scope": scope, "gate": gate}, FREEZE_S)

    def thaw(self, scope: str, gate: Gate) -> list[dict[str, str]]:
        return self._ask("POST", "/v1/thaw", list[dict[str, str]], {"scope": scope, "gate": gate}, FREEZE_S)

    def notify(self) -> NotifyStatus:
        """Who is told of incidents, what is late, and which silences hold."""
        return self._ask("GET", "/v1/notify", NotifyStatus)

    def silence(self, wanted: SilenceWanted) -> Silence:
        return self._ask("POST", "/v1/silence", Silence, wanted)

    def unsilence(self, name: str, gate: Gate) -> Silence:
        return self._ask("POST", f"/v1/silence/{_path(name)}/end", Silence, gate)

    def collect(self, wanted: Wanted) -> Collected:
        """Takes evidence of a node, or of an incident's node."""
        return self._ask("POST", "/v1/evidence", Collected, wanted, EVIDENCE_S)

    def act(self, incident: str, verb: str, act: Act) -> Incident:
        """note, link, ack, assign, close, reopen or merge: the incident as it is then."""
        return self._ask("POST", f"/v1/incident/{_path(incident)}/{verb}", Incident, act)

    def records(self, nodes: Sequence[str]) -> Iterator[bytes]:
        """Lines of GET /v1/records: a `Beginning`, then records, and an empty one every second."""
        yield from self._lines("/v1/records", {"node": list(nodes)}, RECORDS_S)

    def uncordon(self, node: str, gate: Gate) -> Node:
        """Opens a repaired node for new work; returns it as it is then."""
        return self._ask("POST", f"/v1/node/{_path(node)}/uncordon", Node, gate, PLAN_S)

    def stop(self) -> None:
        """Ends the controller. A run in its hand is then interrupted and can be resumed."""
        self._ask("POST", "/v1/stop", dict[str, Any])

    def events(self, after: int = 0) -> Iterator[Record]:
        """Journal records above `after`, then new ones as they come, until the controller ends."""
        for line in self._lines("/v1/events", {"after": after}, None):
            yield msgspec.json.decode(line, type=Record)

    def _lines(self, path: str, params: dict[str, Any], read_s: float | None) -> Iterator[bytes]:
        """What an endpoint that never ends says; after `read_s` without a byte the controller hangs."""
        import httpx

        timeout = httpx.Timeout(read_s, connect=CONNECT_S)
        try:
            with self._http.stream("GET", path, params=params, timeout=timeout) as response:
                if response.status_code >= 400:
                    response.read()
                    raise _refusal(response)
                lines = Lines()
                for chunk in response.iter_bytes():
                    yield from lines.feed(chunk)
        except httpx.HTTPError as error:
            raise self._unanswered(error) from None

    def _ask(self, method: str, path: str, answer: type[T], body: Any = None, read_s: float = READ_S) -> T:
        import httpx

        content = None if body is None else msgspec.json.encode(body)
        timeout = httpx.Timeout(read_s, connect=CONNECT_S)
        try:
            response = self._http.request(method, path, content=content, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unanswered(error) from None
        if response.status_code >= 400:
            raise _refusal(response)
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.MsgspecError as error:
            raise GridctlError(f"the controller speaks another version: {error}; restart it") from None

    def _unanswered(self, error: Exception) -> Unanswered:
        import httpx

        path = self._home.socket
        if not isinstance(error, httpx.TimeoutException):
            return Unanswered(f"no controller answers on {path}: {error}")
        pid = _pid(self._home) or "PID"
        return Hangs(
            f"the controller (process {pid}) gave no answer on {path} in time: it was stopped, or hangs."
            f" `kill -CONT {pid}` wakes a stopped one; after `kill -9` the next command starts another, and a"
            " run in hand waits for `gridctl run resume`"
        )


def _pid(home: Home) -> str:
    """The process of the home's controller as its lock says, else ""."""
    try:
        return home.lock.read_text(encoding="utf-8", errors="replace").strip()[:20]
    except OSError:
        return ""


def _path(name: str) -> str:
    """A name as part of a path. Raises `Refused` for what nothing is named."""
    from urllib.parse import quote

    if not name.strip(".") or len(name) > NAME_CHARS_MAX:
        raise Refused("unknown-name", f"nothing here is named {name[:40]!a}")
    return quote(name, safe="")


def _refusal(response: "httpx.Response") -> GridctlError:
    try:
        answer = msgspec.json.decode(response.content, type=_Answer)
    except msgspec.MsgspecError:
        return GridctlError(f"the controller answered {response.status_code} without a reason")
    if response.status_code >= 500:
        return ConfigError(answer.text) if answer.code == "config" else GridctlError(answer.text)
    return Refused(answer.code, answer.text, tuple(answer.blockers))
