"""The controller's socket: HTTP over a Unix socket, for the faces (docs/architecture.md, "Contracts")."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from gridctl import __version__
from gridctl.control import acts, taps
from gridctl.control.controller import Controller
from gridctl.control.evidence import collect
from gridctl.errors import ConfigError, GridctlError, Refused
from gridctl.model.evidence import Wanted
from gridctl.model.fleet import jobs, spares
from gridctl.model.notices import SilenceWanted
from gridctl.model.plans import Gate, Request
from gridctl.model.runs import Act

T = TypeVar("T")

#: A reader of records hears something that often.
RECORDS_S = 1.0

log = logging.getLogger("gridctl.control")


class Apply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/apply"""

    plan: str
    gate: Gate | None = None
    dry_run: bool = False


class Freeze(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/freeze and /v1/thaw"""

    gate: Gate
    scope: str = "fleet"


class Service:
    """Answers from a controller. `stop` is set when somebody asks it to end."""

    def __init__(self, controller: Controller, stop: asyncio.Event) -> None:
        self._controller = controller
        self._stop = stop
        self._since_unix_s = time.time()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[_refusals])
        app.add_routes(
            [
                web.get("/v1/health", self._health),
                web.get("/v1/view/{what}", self._view),
                web.get("/v1/events", self._events),
                web.get("/v1/{what:run|plan|incident|risk}/" + _any("id"), self._one),
                web.get("/v1/records", self._records),
                web.post("/v1/evidence", self._evidence),
                web.post("/v1/plan", self._plan),
                web.post("/v1/apply", self._apply),
                web.post("/v1/run/" + _any("id") + "/{verb:abort|rollback|resume}", self._steer),
                web.post("/v1/incident/" + _any("id") + "/{verb:" + "|".join(acts.VERBS) + "}", self._act),
                web.post("/v1/node/" + _any("name") + "/uncordon", self._uncordon),
                web.post("/v1/{verb:freeze|thaw}", self._freeze),
                web.get("/v1/notify", self._notify),
                web.post("/v1/silence", self._silence),
                web.post("/v1/silence/" + _any("id") + "/end", self._unsilence),
                web.post("/v1/stop", self._end),
            ]
        )
        return app

    async def _health(self, request: web.Request) -> web.StreamResponse:
        controller = self._controller
        reachable = sum(node.reachable for node in controller.nodes.values())
        return _json(
            {
                "pid": os.getpid(),
                "version": __version__,
                "fleet": controller.fleet.fleet.name,
                "mode": "read-only" if controller.read_only else "acting",
                "holder": controller.lease.holder,
                "lease": controller.lease.held,
                "fence": controller.lease.fence,
                "since_unix_s": self._since_unix_s,
                "journal_seq": controller.ledger.seq,
                "journal_owed": sorted({audit["scope"] for audit in controller.ledger.owed}),
                "nodes_reachable": reachable,
                "followed": controller.followers.seqs,
                "runs_in_hand": sorted(controller.ledger.driven),
            }
        )

    async def _view(self, request: web.Request) -> web.StreamResponse:
        controller, ledger = self._controller, self._controller.ledger
        controller.refresh()
        nodes = [controller.nodes[name] for name in sorted(controller.nodes)]
        views: dict[str, Callable[[], Any]] = {
            "nodes": lambda: nodes,
            "jobs": lambda: jobs(nodes),
            "spares": lambda: spares(nodes),
            "incidents": ledger.incidents.all,
            "open-incidents": ledger.incidents.open,
            "plans": lambda: list(ledger.plans.values()),
            "runs": ledger.all_runs,
            "risk": controller.assessor.all,
        }
        view = views.get(request.match_info["what"])
        if view is None:
            raise Refused("bad-request", f"there is no view {request.match_info['what']!a}")
        return _json(view())

    async def _one(self, request: web.Request) -> web.StreamResponse:
        ledger = self._controller.ledger
        find: dict[str, Callable[[str], Any]] = {
            "run": ledger.run,
            "plan": ledger.plan,
            "incident": ledger.incident,
            "risk": self._controller.assessor.one,
        }
        return _json(find[request.match_info["what"]](request.match_info["id"]))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        try:
            after = int(request.query.get("after", "0"))
        except ValueError:
            raise Refused("bad-request", "after must be a whole number") from None
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        await response.prepare(request)
        async for record in self._controller.ledger.events(after):
            await response.write(msgspec.json.encode(record) + b"\n")
        return response

    async def _records(self, request: web.Request) -> web.StreamResponse:
        """For a recording: its beginning, then records as they come, and an empty line a second."""
        controller = self._controller
        names = frozenset(request.query.getall("node", []))
        beginning, before = taps.beginning(controller.nodes, names, time.time())
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        with controller.taps.open(names, before) as tap:
            await response.prepare(request)
            await response.write(msgspec.json.encode(beginning) + b"\n")
            while True:
                found = await tap.batch(RECORDS_S)
                await response.write(b"".join(msgspec.json.encode(r) + b"\n" for r in found) or b"\n")

    async def _evidence(self, request: web.Request) -> web.StreamResponse:
        return _json(await _to_the_end(collect(self._controller, await _body(request, Wanted))))

    async def _plan(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._controller.plan(await _body(request, Request)))

    async def _apply(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, Apply)
        if body.dry_run:
            return _json(self._controller.dry_run(body.plan))
        if body.gate is None:
            raise Refused("not-confirmed", f"plan {body.plan} needs a gate: a name or --yes, and a reason")
        return _json(await _to_the_end(self._controller.apply(body.plan, body.gate)))

    async def _steer(self, request: web.Request) -> web.StreamResponse:
        controller = self._controller
        if "dry_run" in request.query:
            return _json(controller.dry_steer(request.match_info["id"], request.match_info["verb"]))
        gate = await _body(request, Gate)
        verbs = {"abort": controller.abort, "rollback": controller.rollback, "resume": controller.resume}
        return _json(await _to_the_end(verbs[request.match_info["verb"]](request.match_info["id"], gate)))

    async def _act(self, request: web.Request) -> web.StreamResponse:
        controller, about = self._controller, request.match_info
        if why := controller.read_only:
            raise Refused("read-only", f"this controller changes nothing: {why}")
        return _json(acts.act(controller.ledger, about["id"], about["verb"], await _body(request, Act)))

    async def _freeze(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, Freeze)
        frozen = request.match_info["verb"] == "freeze"
        return _json(await _to_the_end(self._controller.freeze(body.scope, body.gate, frozen=frozen)))

    async def _uncordon(self, request: web.Request) -> web.StreamResponse:
        gate = await _body(request, Gate)
        return _json(await _to_the_end(self._controller.uncordon(request.match_info["name"], gate)))

    async def _notify(self, request: web.Request) -> web.StreamResponse:
        return _json(self._controller.herald.status())

    async def _silence(self, request: web.Request) -> web.StreamResponse:
        self._controller.may_act()
        return _json(self._controller.herald.silence(await _body(request, SilenceWanted)))

    async def _unsilence(self, request: web.Request) -> web.StreamResponse:
        self._controller.may_act()
        gate = await _body(request, Gate)
        return _json(self._controller.herald.unsilence(request.match_info["id"], gate.who, gate.reason))

    async def _end(self, request: web.Request) -> web.StreamResponse:
        self._stop.set()
        return _json({})


async def _to_the_end(work: Awaitable[T]) -> T:
    """What was begun is not given up because the asker went away."""
    return await asyncio.shield(asyncio.ensure_future(work))


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        status = 404 if refused.code.startswith("unknown-") else 409
        body = {"code": refused.code, "text": refused.text, "blockers": list(refused.blockers)}
        return _json(body, status)
    except web.HTTPException as error:
        text = f"{request.method} {ascii(request.path)[1:-1]}: {error.reason}"
        return _json({"code": "bad-request", "text": text}, error.status)
    except GridctlError as error:
        code = "config" if isinstance(error, ConfigError) else "failed"
        return _json({"code": code, "text": str(error)}, 500)
    except ConnectionError:
        raise  # the asker has gone away
    except Exception as error:
        log.exception("%s %s failed", request.method, ascii(request.path))
        return _json({"code": "internal", "text": f"the controller failed: {error!r}"}, 500)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


def _any(name: str) -> str:
    """The part of a route that may be any text, quoted: an unknown name is for the ledger to refuse."""
    return f"{{{name}:(?s:.+)}}"


async def _body(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused("bad-request", f"{request.method} {request.path}: {error}") from None
