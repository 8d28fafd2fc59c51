"""Carries a session's request for a sealed channel to the agent of the node where its peer lives."""

import asyncio
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from gridagent import identity
from gridagent.errors import OpFailed
from gridagent.ops.handover import MEET_DEADLINE_S, Handovers
from gridagent.wire import MeetCall, MeetReply, MeetRequest, Refusal, plain

if TYPE_CHECKING:
    from aiohttp.client import ClientTimeout
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace

_TIMEOUT = aiohttp.ClientTimeout(total=MEET_DEADLINE_S)
_RETRY_S = 0.2


class _OnlyTo(aiohttp.TCPConnector):
    """Says nothing to a server before its certificate has shown that it is the expected node."""

    def __init__(self, tls: ssl.SSLContext, trust: Path, node: str) -> None:
        super().__init__(ssl=tls, force_close=True)
        self._trust, self._node = trust, node

    async def connect(
        self, req: "ClientRequest", traces: "list[Trace]", timeout: "ClientTimeout"
    ) -> "Connection":
        connection = await super().connect(req, traces, timeout)
        transport = connection.transport
        try:
            tls = transport.get_extra_info("ssl_object") if transport else None
            identity.peer_of(tls, self._trust, node=self._node)
        except identity.IdentityError:
            connection.close()
            raise
        return connection


class _NotYet(OpFailed):
    """The other agent is on its way: just started again, or not told of this hand-over yet."""


async def meet_there(
    tls: ssl.SSLContext, trust: Path, handovers: Handovers, session: str, args: dict[str, Any]
) -> dict[str, Any]:
    """`args`: the fields of `MeetRequest`, and `url`. Returns a `MeetReply` as a dict. Raises `OpFailed`."""
    try:
        request, url = msgspec.convert(args, MeetRequest), msgspec.convert(args.get("url"), str)
    except msgspec.ValidationError as error:
        raise OpFailed(f"meet: {error}") from None
    node = handovers.check_outgoing(request, url, session).node
    until_s = time.monotonic() + MEET_DEADLINE_S
    while True:
        try:
            async with aiohttp.ClientSession(connector=_OnlyTo(tls, trust, node), timeout=_TIMEOUT) as client:
                return await _call(client, f"{url.rstrip('/')}/v1/meet", node, request)
        except _NotYet:
            if time.monotonic() >= until_s:
                raise
        await asyncio.sleep(_RETRY_S)


async def _call(client: aiohttp.ClientSession, url: str, node: str, request: MeetRequest) -> dict[str, Any]:
    body = msgspec.json.encode(MeetCall(request=request))
    try:
        async with client.post(url, data=body, allow_redirects=False) as response:
            content = await response.read()
            if response.status != 200:
                refusal = msgspec.json.decode(content, type=Refusal)
                kind = _NotYet if refusal.code == "starting" else OpFailed
                raise kind(f"node {node} refused to meet: {refusal.text}")
            return plain(msgspec.json.decode(content, type=MeetReply))
    except (aiohttp.ClientError, TimeoutError, identity.IdentityError, msgspec.MsgspecError) as error:
        nobody = isinstance(error, aiohttp.ClientConnectorError) and not isinstance(
            error, aiohttp.ClientSSLError
        )
        text = f"node {node} could not be met at {url}: {str(error) or type(error).__name__}"
        raise (_NotYet if nobody else OpFailed)(text) from None
