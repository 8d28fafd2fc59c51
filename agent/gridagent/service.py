"""The node over HTTPS: mutual TLS, and the certificate's role decides who may do what."""

import asyncio
import contextlib
import errno
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from gridagent import identity
from gridagent.errors import OpFailed, Refused
from gridagent.home import Home
from gridagent.launch import LaunchError, Launches
from gridagent.lease import Lease
from gridagent.ops.desk import Desk
from gridagent.ops.evidence import CollectEvidence
from gridagent.ops.freeze import Freezes
from gridagent.ops.handover import Handovers, jobs_of, meet_here
from gridagent.ops.log import OpLog
from gridagent.sessions import Sessions
from gridagent.telemetry.metrics import OPENMETRICS, PLAIN, Samples, render, wants_openmetrics
from gridagent.telemetry.spool import Spool
from gridagent.wire import (
    FreezeReply,
    FreezeRequest,
    LeaseRequest,
    MeetCall,
    NodeStatus,
    OpRequest,
    Refusal,
)

T = TypeVar("T")

BODY_BYTES_MAX = 1 << 20
WAIT_S_MAX = 600.0

ANY = ("node", "operator", "viewer")
READERS = ("operator", "viewer")
OPERATOR = ("operator",)
NODE = ("node",)


class Node(Protocol):
    """The parts of the daemon that the service answers from."""

    home: Home
    spool: Spool
    samples: Samples
    sessions: Sessions
    launches: Launches
    lease: Lease
    freezes: Freezes
    handovers: Handovers
    log: OpLog
    desk: Desk
    evidence: CollectEvidence

    def status(self) -> NodeStatus:
        """GET /v1/status"""
        ...


Answerer = Callable[[web.Request, identity.Peer], Awaitable[web.StreamResponse]]


class Service:
    """The endpoints of docs/architecture.md, "Contracts"."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._streams: set[asyncio.Task[Any]] = set()

    def application(self) -> web.Application:
        """The aiohttp application; every way out of it that is no success is a `Refusal`."""
        app = web.Application(middlewares=[_refusals], client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.get("/v1/status", self._for(ANY, self._status)),
                web.get("/v1/stream", self._for(READERS, self._stream)),
                web.get("/v1/launch", self._for(OPERATOR, self._launch)),
                web.post("/v1/lease", self._for(OPERATOR, self._lease)),
                web.post("/v1/freeze", self._for(OPERATOR, self._freeze)),
                web.post("/v1/ops", self._for(OPERATOR, self._submit)),
                web.get("/v1/ops/{id}", self._for(OPERATOR, self._op)),
                web.get("/v1/evidence/{id}", self._for(OPERATOR, self._evidence)),
                web.post("/v1/meet", self._for(NODE, self._meet)),
                web.put("/v1/crl", self._for(OPERATOR, self._crl)),
                web.get("/metrics", self._for(ANY, self._metrics)),
            ]
        )
        return app

    async def stop(self) -> None:
        """Ends the streams, which would go on for ever."""
        for task in self._streams:
            task.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)

    def _for(self, roles: tuple[str, ...], answerer: Answerer) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            peer = self._peer(request)
            if peer.role not in roles:
                raise Refused(
                    "forbidden",
                    f"{request.method} {request.path} is for {' or '.join(roles)}, not for {peer}",
                )
            return await answerer(request, peer)

        return handle

    def _peer(self, request: web.Request) -> identity.Peer:
        tls = request.transport.get_extra_info("ssl_object") if request.transport else None
        try:
            return identity.peer_of(tls, self._node.home.trust)
        except identity.IdentityError as error:
            raise Refused("forbidden", str(error)) from None

    async def _status(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        return _json(self._node.status())

    async def _stream(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        after = _number(request, "after", 0)
        response = web.StreamResponse(headers={"Content-Type": "application/jsonl"})
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            await response.prepare(request)
            async for lines in self._node.spool.follow(after):
                self._peer(request)  # it may have been revoked since
                await response.write(lines)
        except (ConnectionError, Refused):
            pass  # the reader is gone, or no reader any more
        finally:
            self._streams.discard(task)
        return response

    async def _launch(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        job, rank = request.query.get("job", ""), _number(request, "rank", -1)
        try:
            spec = self._node.launches.get(job, rank)
        except LaunchError as error:
            raise Refused("bad-request", str(error)) from None
        if spec is None:
            raise Refused("not-found", f"rank {rank} of {job!a} was not started here with `gridagent exec`")
        return _json(spec)

    async def _lease(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        return _json(self._node.lease.ask(await _body(request, LeaseRequest)))

    async def _freeze(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        freeze = await _body(request, FreezeRequest)
        if not (freeze.scope and freeze.who and freeze.reason):
            raise Refused("bad-request", "a freeze needs a scope, a who and a reason")
        unsaved = self._node.freezes.put(freeze)  # a full disk must not stand in the way of a stop
        with contextlib.suppress(Refused):
            self._node.log.note(_actor(peer), {"event": "freeze", **msgspec.to_builtins(freeze)})
        text = f"a restart of this agent would undo it until it can be written: {unsaved}" if unsaved else ""
        return _json(FreezeReply(durable=not unsaved, text=text))

    async def _submit(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        op = await _body(request, OpRequest)
        jobs = jobs_of(op, self._node.sessions)
        return _json(await self._node.desk.submit(op, _actor(peer), jobs))

    async def _op(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        wait_s = _number(request, "wait_s", 0.0)
        op = request.match_info["id"]
        return _json(await self._node.desk.wait(op, min(max(wait_s, 0.0), WAIT_S_MAX)))

    async def _evidence(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        part = self._node.evidence.part(request.match_info["id"], _number(request, "offset", 0))
        return web.Response(body=part, content_type="application/octet-stream")

    async def _meet(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        call = await _body(request, MeetCall)
        self._node.handovers.check_incoming(call.request, peer)
        try:
            return _json(await meet_here(self._node.sessions, call.request))
        except OpFailed as error:
            raise Refused("failed", str(error)) from None

    async def _crl(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        try:
            changed = identity.install_crl(self._node.home.trust, await request.read())
        except identity.IdentityError as error:
            raise Refused("bad-request", str(error)) from None
        if changed:
            with contextlib.suppress(Refused):  # it is in force all the same
                self._node.log.note(_actor(peer), {"event": "crl"})
        return _json({})

    async def _metrics(self, request: web.Request, peer: identity.Peer) -> web.StreamResponse:
        openmetrics = wants_openmetrics(",".join(request.headers.getall("Accept", [])))
        text = render(self._node.status(), self._node.samples, openmetrics=openmetrics)
        headers = {"Content-Type": OPENMETRICS if openmetrics else PLAIN, "Vary": "Accept"}
        return web.Response(body=text.encode(), headers=headers)


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as refused:
        return _refusal(refused.code, str(refused), refused.status)
    except web.HTTPException as error:
        code = {404: "not-found", 405: "bad-request", 413: "bad-request"}.get(error.status, "bad-request")
        text = f"{request.method} {ascii(request.path)[1:-1]}: {error.reason}"
        return _refusal(code, text, error.status)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = error.filename or "the home"
            text = f"nothing was done: no space left for {where}; free some, then try again"
            return _refusal("disk-full", text, 507)
        return _refusal("internal", f"the agent cannot use its home: {error}", 500)
    except Exception as error:
        print(f"gridagent: {request.method} {request.path!r} failed: {error!r}", file=sys.stderr, flush=True)
        return _refusal("internal", f"the agent failed: {error!r}; please report it", 500)


def _refusal(code: str, text: str, status: int) -> web.Response:
    return _json(Refusal(code=code, text=text), status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


async def _body(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused("bad-request", f"{request.method} {request.path}: {error}") from None


def _number(request: web.Request, name: str, default: T) -> T:
    try:
        return msgspec.convert(request.query.get(name, default), type(default), strict=False)
    except msgspec.ValidationError as error:
        raise Refused("bad-request", f"{request.path}: {name}: {error}") from None


def _actor(peer: identity.Peer) -> str:
    return f"{peer.role} {peer.name}"
