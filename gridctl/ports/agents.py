"""The nodes' agents, over HTTPS with client certificates (docs/architecture.md, "Contracts")."""

import ssl
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gridagent.wire import (
    FreezeReply,
    FreezeRequest,
    LaunchSpec,
    LeaseReply,
    LeaseRequest,
    NodeStatus,
    OpRequest,
    OpStatus,
    Refusal,
    StreamRecord,
)
from gridctl.errors import GridctlError
from gridctl.ports.lines import Lines

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

#: Given the agent's base URL and the connection's TLS object; raises `AgentRefused` for the wrong peer.
CheckPeer = Callable[[str, Any], None]

CONNECT_S = 3.0
READ_S = 10.0
#: An agent that has nothing to say sends a beat more often than this; silence means a dead connection.
STREAM_SILENCE_S = 60.0


class AgentError(GridctlError):
    """A call of an agent brought no answer of the contract."""


class AgentUnreachable(AgentError):
    """No whole answer came: whether the call took effect is unknown. Asking again with its id is safe."""


class AgentRefused(AgentError):
    """The agent answered that it does not do it. `code` is a stable word, `status` the HTTP status."""

    def __init__(self, code: str, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.code = code
        self.text = text
        self.status = status


class Agents:
    """All agents of a fleet, with connections that are kept. Close it on the loop that used it.

    `check_peer` looks at every answer's connection: TLS has checked the chain and the address, not
    the role, the name and revocations since. `flaw`: what may be wrong with the own certificate, asked
    where no answer came.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        check_peer: CheckPeer = lambda url, tls: None,
        flaw: Callable[[], str] = lambda: "",
    ) -> None:
        import httpx

        self._check_peer = check_peer
        self._flaw = flaw
        self._client = httpx.AsyncClient(
            verify=context,
            trust_env=False,
            limits=httpx.Limits(keepalive_expiry=30.0),  # one to every node that answers
            timeout=_timeout(READ_S),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def status(self, url: str) -> NodeStatus:
        return await self._call("GET", f"{url}/v1/status", NodeStatus)

    async def launch(self, url: str, job: str, rank: int) -> LaunchSpec:
        return await self._call("GET", f"{url}/v1/launch", LaunchSpec, params={"job": job, "rank": rank})

    async def lease(self, url: str, request: LeaseRequest) -> LeaseReply:
        return await self._call("POST", f"{url}/v1/lease", LeaseReply, body=request)

    async def put_crl(self, url: str, pem: bytes) -> None:
        """Gives the agent a revocation list; it refuses one that is older than its own."""
        await self._call("PUT", f"{url}/v1/crl", dict[str, Any], content=pem)

    async def freeze(self, url: str, request: FreezeRequest) -> FreezeReply:
        return await self._call("POST", f"{url}/v1/freeze", FreezeReply, body=request)

    async def operate(self, url: str, request: OpRequest) -> OpStatus:
        """Starts the operation, or joins the one with this id; returns when it has ended."""
        return await self._call(
            "POST", f"{url}/v1/ops", OpStatus, body=request, read_s=request.deadline_s + READ_S
        )

    async def op(self, url: str, op: str, wait_s: float = 0.0) -> OpStatus:
        return await self._call(
            "GET", f"{url}/v1/ops/{op}", OpStatus, params={"wait_s": wait_s}, read_s=wait_s + READ_S
        )

    async def evidence(self, url: str, name: str, offset: int) -> bytes:
        """A part of an archive from `offset` on, nothing at its end."""
        answer = await self._ask("GET", f"{url}/v1/evidence/{name}", params={"offset": offset})
        return answer.content

    async def stream(self, url: str, after: int) -> AsyncIterator[StreamRecord]:
        """Records with a seq above `after` until the connection ends. Raises `AgentError`."""
        import httpx

        decode = msgspec.json.Decoder(StreamRecord).decode
        target = f"{url}/v1/stream"
        try:
            async with self._client.stream(
                "GET", target, params={"after": after}, timeout=_timeout(STREAM_SILENCE_S)
            ) as response:
                self._check_peer(url, _tls(response))
                if response.status_code >= 400:
                    await response.aread()
                    raise _refusal(response)
                lines = Lines()
                async for chunk in response.aiter_bytes():
                    for line in lines.feed(chunk):
                        if line:
                            yield decode(line)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            raise self._unreachable(target, error) from error

    async def _call(
        self,
        method: str,
        url: str,
        answer: type[T],
        **asked: Any,
    ) -> T:
        response = await self._ask(method, url, **asked)
        try:
            return msgspec.json.decode(response.content, type=answer)
        except msgspec.MsgspecError as error:
            raise AgentRefused("version-skew", f"{url} answered something else: {error}") from error

    async def _ask(
        self,
        method: str,
        url: str,
        *,
        params: dict[str, str | int | float] | None = None,
        body: msgspec.Struct | None = None,
        content: bytes | None = None,
        read_s: float = READ_S,
    ) -> "httpx.Response":
        import httpx

        content = content if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            response = await self._client.request(
                method, url, params=params, content=content, headers=headers, timeout=_timeout(read_s)
            )
        except httpx.HTTPError as error:
            raise self._unreachable(url, error) from error
        self._check_peer(url.partition("/v1/")[0], _tls(response))
        if response.status_code >= 400:
            raise _refusal(response)
        return response

    def _unreachable(self, url: str, error: Exception) -> AgentUnreachable:
        what = str(error) or type(error).__name__
        if flaw := self._flaw():
            what = f"{flaw} ({what})"
        elif "CERTIFICATE_VERIFY_FAILED" in what:
            what = f"what answers there shows no certificate that this home's CA vouches for ({what})"
        return AgentUnreachable(f"{url} gave no answer: {what}")


def _tls(response: "httpx.Response") -> Any:
    return response.extensions["network_stream"].get_extra_info("ssl_object")


def _timeout(read_s: float) -> "httpx.Timeout":
    import httpx

    return httpx.Timeout(connect=CONNECT_S, read=read_s, write=READ_S, pool=READ_S)


def _refusal(response: "httpx.Response") -> AgentRefused:
    try:
        refusal = msgspec.json.decode(response.content, type=Refusal)
    except msgspec.MsgspecError:
        text = f"{response.request.url} answered {response.status_code} without a reason"
        return AgentRefused("bad-answer", text, response.status_code)
    return AgentRefused(refusal.code, refusal.text, response.status_code)
