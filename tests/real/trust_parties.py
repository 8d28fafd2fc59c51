"""Real TLS parties for the trust tests: an HTTPS server on a loop of its own, and plain clients."""

import asyncio
import http.client
import ssl
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gridagent import identity
from gridctl.trust import Authority, certificates

HOST = "127.0.0.1"
T = TypeVar("T")


class Loop:
    """An event loop in a thread, as the server's process would have it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()


class NodeServer:
    """Answers every request with who asks, or with 403 and why not; takes a new crl.pem; reloads."""

    def __init__(self, trust_dir: Path, loop: Loop) -> None:
        self.trust_dir = trust_dir
        self.context = identity.server_context(trust_dir)
        self._loop = loop
        app = web.Application()
        app.router.add_get("/who", self._who)
        app.router.add_put("/v1/crl", self._crl)
        self._runner = web.AppRunner(app, access_log=None)
        loop.run(self._runner.setup())
        loop.run(web.TCPSite(self._runner, HOST, 0, ssl_context=self.context).start())
        self.port = int(self._runner.addresses[0][1])

    def reload(self) -> None:
        async def act() -> None:
            identity.reload(self.context, self.trust_dir)

        self._loop.run(act())

    def close(self) -> None:
        self._loop.run(self._runner.cleanup())

    def _peer(self, request: web.Request) -> identity.Peer:
        assert request.transport is not None
        return identity.peer_of(request.transport.get_extra_info("ssl_object"), self.trust_dir)

    async def _who(self, request: web.Request) -> web.Response:
        try:
            peer = self._peer(request)
        except identity.IdentityError as error:
            return web.Response(status=403, text=str(error))
        return web.Response(text=f"{peer.fleet}/{peer.role}/{peer.name}")

    async def _crl(self, request: web.Request) -> web.Response:
        try:
            self._peer(request)
            new = identity.install_crl(self.trust_dir, await request.read())
        except identity.IdentityError as error:
            return web.Response(status=403, text=str(error))
        return web.Response(text=str(new))


@contextmanager
def node_server(trust_dir: Path) -> Iterator[NodeServer]:
    loop = Loop()
    try:
        server = NodeServer(trust_dir, loop)
        try:
            yield server
        finally:
            server.close()
    finally:
        loop.close()


@contextmanager
def connected(context: ssl.SSLContext, port: int, host: str = HOST) -> Iterator[http.client.HTTPSConnection]:
    connection = http.client.HTTPSConnection(host, port, context=context, timeout=60)
    try:
        connection.connect()
        yield connection
    finally:
        connection.close()


def ask(
    connection: http.client.HTTPSConnection,
    path: str = "/who",
    method: str = "GET",
    body: bytes | None = None,
) -> tuple[int, str]:
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def forge(
    trust_dir: Path,
    authority: Authority,
    uri: str,
    *,
    file_name: str = "operator",
    addresses: Sequence[str] = (),
    role: str = "operator",
    days: float = 30.0,
    made_days_ago: float = 0.0,
) -> None:
    """A trust folder with a certificate that the authority itself would not issue."""
    issuer = x509.load_pem_x509_certificate((authority.trust_dir / "issuer.crt").read_bytes())
    issuer_key = serialization.load_pem_private_key((authority.trust_dir / "issuer.key").read_bytes(), None)
    assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
    key = certificates.new_key()
    made = time.time() - made_days_ago * 86400
    usages = certificates.usages_of(role)
    leaf = certificates.leaf_certificate(
        issuer, issuer_key, key.public_key(), uri, addresses, usages, made, days
    )
    trust_dir.mkdir(parents=True)
    (trust_dir / "ca.crt").write_bytes(certificates.pem(authority.ca))
    (trust_dir / "crl.pem").write_bytes(authority.crl_pem())
    (trust_dir / f"{file_name}.crt").write_bytes(certificates.pem(leaf) + certificates.pem(issuer))
    identity.write_file(trust_dir / f"{file_name}.key", certificates.key_pem(key), 0o600)
