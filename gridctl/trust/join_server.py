"""The controller's endpoint where nodes enrol and renew. Works with the issuer's key alone.

GET  /v1/ca     -> {ca}                  anybody; the caller compares its fingerprint
POST /v1/join   {secret, csr} -> {chain, ca, crl}   whoever holds an open token
POST /v1/renew  {csr} -> {chain, ca, crl}           a node with a certificate in force
"""

import asyncio
import ipaddress
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gridagent import identity
from gridagent.identity import IdentityError, write_file
from gridagent.wire import Refusal
from gridctl.trust import certificates, tokens
from gridctl.trust.authority import Authority
from gridctl.trust.errors import TrustError

if TYPE_CHECKING:
    import ssl

    from aiohttp import web

#: Told of every join and renewal, done or refused; for the journal. All values are plain data.
Audit = Callable[[dict[str, Any]], object]

JOIN_URL_FILE = "join.url"
_BODY_BYTES_MAX = 64 << 10
_LOOK_EVERY_S = 60.0


class _Request(msgspec.Struct):
    csr: str
    secret: str = ""


class _Refused(Exception):
    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


async def serve_join(
    authority: Authority, host: str, port: int, audit: Audit = lambda _: None
) -> tuple[str, Callable[[], Awaitable[None]]]:
    """Serves until `stop()` is awaited. Returns (url, stop); port 0 lets the kernel choose.

    `host` is the address that nodes call: it stands in the certificate. Raises `TrustError` if it is
    a wildcard, `OSError` if it cannot be bound. While it serves, `trust/join.url` tells the address
    to `Authority.enroll`.
    """
    from aiohttp import web

    with suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            raise TrustError(f"{host} names no address: give the one under which nodes reach this machine")
    listener = _Listener(authority, host)
    app = web.Application(client_max_size=_BODY_BYTES_MAX)
    endpoint = _Endpoint(authority, audit)
    app.router.add_get("/v1/ca", endpoint.ca)
    app.router.add_post("/v1/join", endpoint.join)
    app.router.add_post("/v1/renew", endpoint.renew)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=listener.context).start()
    except BaseException:
        await runner.cleanup()
        raise
    bound = runner.addresses[0][1]
    url = f"https://[{host}]:{bound}" if ":" in host else f"https://{host}:{bound}"
    url_file = authority.trust_dir / JOIN_URL_FILE
    write_file(url_file, url.encode(), 0o644)
    keeping = asyncio.create_task(listener.keep_fresh())

    async def stop() -> None:
        keeping.cancel()
        with suppress(asyncio.CancelledError):
            await keeping
        await runner.cleanup()
        with suppress(OSError):
            if url_file.read_text() == url:
                url_file.unlink()

    return url, stop


class _Listener:
    """The endpoint's TLS: a certificate of its own that is replaced before it (or the issuer) ends."""

    def __init__(self, authority: Authority, host: str) -> None:
        import ssl

        self._authority = authority
        self._host = host
        self._issuer = b""
        self._loaded_unix_s = 0.0
        self.context: ssl.SSLContext = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.context.num_tickets = 0
        self.context.verify_mode = ssl.CERT_OPTIONAL  # who joins has no certificate yet
        self.context.verify_flags |= ssl.VERIFY_X509_STRICT
        self.context.load_verify_locations(authority.trust_dir / "ca.crt")
        self.refresh()

    def refresh(self) -> None:
        """Loads a new certificate where the issuer changed or a day has gone by."""
        issuer = (self._authority.trust_dir / "issuer.crt").read_bytes()
        if issuer == self._issuer and time.time() - self._loaded_unix_s < 86400.0:
            return
        key = certificates.new_key()
        chain = self._authority.serving_chain(key.public_key(), self._host)
        with tempfile.TemporaryDirectory() as folder:  # mode 0700; OpenSSL only reads files
            crt, key_file = Path(folder, "crt"), Path(folder, "key")
            write_file(crt, chain, 0o600)
            write_file(key_file, certificates.key_pem(key), 0o600)
            self.context.load_cert_chain(crt, key_file)
        self._issuer, self._loaded_unix_s = issuer, time.time()

    async def keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            with suppress(TrustError, OSError, ValueError):  # an expired issuer: `doctor` says so
                self.refresh()


class _Endpoint:
    """The handlers."""

    def __init__(self, authority: Authority, audit: Audit) -> None:
        self._authority = authority
        self._audit = audit

    async def ca(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        return web.json_response({"ca": certificates.pem(self._authority.ca).decode()})

    async def join(self, request: "web.Request") -> "web.Response":
        return await self._answer("join", request, self._join)

    async def renew(self, request: "web.Request") -> "web.Response":
        return await self._answer("renew", request, self._renew)

    async def _answer(
        self, what: str, request: "web.Request", act: Callable[[_Request, Any], bytes]
    ) -> "web.Response":
        from aiohttp import web

        event: dict[str, Any] = {"what": what, "from": request.remote or ""}
        try:
            body = msgspec.json.decode(await request.read(), type=_Request)
            transport = request.transport
            peer_tls = transport.get_extra_info("ssl_object") if transport is not None else None
            chain = await asyncio.to_thread(act, body, peer_tls)
        except (msgspec.MsgspecError, _Refused, TrustError, IdentityError) as error:
            status, code = (error.status, error.code) if isinstance(error, _Refused) else (403, "forbidden")
            self._audit(event | {"refused": str(error)})
            refusal = Refusal(code=code, text=str(error))
            return web.Response(
                status=status, body=msgspec.json.encode(refusal), content_type="application/json"
            )
        leaf = identity.read_peer(x509.load_pem_x509_certificate(chain))
        self._audit(event | {"node": leaf.name, "serial": leaf.serial})
        ca, crl = certificates.pem(self._authority.ca), self._authority.crl_pem()
        return web.json_response({"chain": chain.decode(), "ca": ca.decode(), "crl": crl.decode()})

    def _join(self, body: _Request, _: Any) -> bytes:
        name, key = _read_csr(body.csr)
        folder = self._authority.trust_dir / "tokens"
        host = tokens.claim(folder, body.secret, name, time.time())
        return self._authority.issue(key, "node", name, [host])

    def _renew(self, body: _Request, peer_tls: "ssl.SSLObject | None") -> bytes:
        peer = identity.peer_of(peer_tls, self._authority.trust_dir)
        name, key = _read_csr(body.csr)
        if (peer.role, peer.name) != ("node", name):
            raise _Refused(403, "forbidden", f"{peer} asks for a certificate of node {name!a}")
        return self._authority.renew(peer, key)


def _read_csr(pem: str) -> tuple[str, certificates.PublicKey]:
    """Name and key of a signing request; whatever else it asks for is ignored."""
    try:
        csr = x509.load_pem_x509_csr(pem.encode())
        key = csr.public_key()
        name = str(csr.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        valid = csr.is_signature_valid
    except (ValueError, IndexError, InvalidSignature) as error:
        raise _Refused(400, "bad-request", f"no readable signing request ({error})") from None
    if not valid or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _Refused(400, "bad-request", "the signing request must be signed by a P-256 key of its own")
    return name, key
