"""How a node gets its identity, and a new one before it ends. Keys are made here and never leave.

The token that `gridctl enroll` prints carries the controller's join address, a one-time secret and the
SHA-256 of the fleet's root certificate. So the node knows the fleet before it trusts a connection, and
the secret goes to nobody else.
"""

import argparse
import base64
import binascii
import fcntl
import hmac
import http.client
import json
import os
import re
import shutil
import ssl
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gridagent import identity
from gridagent.identity import IdentityError, Peer, write_file

_PREFIX = "gridjoin1."
_TIMEOUT_S = 15.0
_ANSWER_BYTES_MAX = 4 << 20


@dataclass(frozen=True)
class JoinToken:
    """What `gridctl enroll` prints and `gridagent join` takes."""

    url: str  #: https URL of the controller's join endpoint
    node: str
    listen: str  #: host:port where the node's agent will serve
    ca_sha256: str  #: hexadecimal, of the DER form of ca.crt
    secret: str

    def encode(self) -> str:
        text = json.dumps(asdict(self), separators=(",", ":"))
        return _PREFIX + base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> Self:
        """Raises `IdentityError` for anything but a whole token."""
        text = text.strip()
        body = text.removeprefix(_PREFIX)
        try:
            if body == text:
                raise ValueError("wrong prefix")
            token = cls(**json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))))
            whole = all(isinstance(value, str) for value in asdict(token).values())
            if not (
                whole
                and identity.NAME.fullmatch(token.node)
                and re.fullmatch("[0-9a-f]{64}", token.ca_sha256)
            ):
                raise ValueError("wrong field")
        except (ValueError, TypeError, binascii.Error):
            raise IdentityError("this is no whole token: copy all of what `gridctl enroll` printed") from None
        return token


def join_command(arguments: argparse.Namespace) -> int:
    """`gridagent join`. Raises `IdentityError`."""
    text = sys.stdin.readline() if arguments.token == "-" else arguments.token
    peer = join(text, Path(arguments.home))
    print(f"joined as {peer}", file=sys.stderr)
    return 0


def join(token_text: str, home: Path) -> Peer:
    """Enrols this node: afterwards `home/trust` is complete, or (on any error) absent as before.

    Writes `home/agent.toml` (node and listen) where there is none. Raises `IdentityError`.
    """
    token = JoinToken.decode(token_text)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    trust, folder = home / "trust", home / "trust.joining"
    with _only_one(home / "join.lock"):
        if trust.exists() and any(trust.iterdir()):
            raise IdentityError(
                f"{trust} is not empty: this node is enrolled; to enrol it anew, move it away"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            peer = _join_into(folder, token)
            _write_config(home / "agent.toml", token)
            os.rename(folder, trust)
            identity.sync_folder(home)
        except OSError as error:
            raise IdentityError(f"cannot write {home}: {error}; get a new token and join again") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return peer


def renew(home: Path, url: str = "") -> Peer:
    """Gets a new key and certificate from the controller's join endpoint (default: where it joined).

    Both files change together; the caller then runs `identity.reload` on its TLS contexts. Blocking:
    call it in a thread. Raises `IdentityError`; then the old pair stays in force.
    """
    trust = home / "trust"
    own = identity.own_identity(trust)
    try:
        url = url or (trust / "controller.url").read_text().strip()
    except OSError as error:
        raise IdentityError(f"where to renew is unknown ({error}): enrol this node anew") from None
    key, csr = _new_request(own.name)
    with _connection(url, identity.client_context(trust)) as connection:
        controller = identity.peer_of(connection.sock, trust)
        if controller.role != "operator":
            raise IdentityError(f"{controller} answered at {url}, where the controller was expected")
        answer = _ask(connection, "POST", "/v1/renew", {"csr": csr})
    ca = x509.load_pem_x509_certificate((trust / "ca.crt").read_bytes())
    chain, crl, peer = _checked(answer, ca, key, own.name)
    try:
        with suppress(IdentityError):  # the list that is in force here is newer
            identity.install_crl(trust, crl)
        identity.replace_pair(trust, "node", chain, _key_pem(key))
    except OSError as error:
        raise IdentityError(f"cannot write the new certificate into {trust}: {error}") from None
    return peer


def _join_into(folder: Path, token: JoinToken) -> Peer:
    key, csr = _new_request(token.node)
    write_file(folder / "node.key", _key_pem(key), 0o600)  # before the token is spent: the disk may be full
    ca = _pinned_ca(token)
    ca_pem = ca.public_bytes(serialization.Encoding.PEM)
    write_file(folder / "ca.crt", ca_pem, 0o644)
    write_file(folder / "controller.url", token.url.encode() + b"\n", 0o644)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=ca_pem.decode())
    with _connection(token.url, context) as connection:
        der = connection.sock.getpeercert(True) if isinstance(connection.sock, ssl.SSLSocket) else None
        controller = identity.read_peer(x509.load_der_x509_certificate(der or b""))
        if controller.role != "operator":
            raise IdentityError(f"{controller} answered at {token.url}, where the controller was expected")
        answer = _ask(connection, "POST", "/v1/join", {"secret": token.secret, "csr": csr})
    chain, crl, peer = _checked(answer, ca, key, token.node)
    write_file(folder / "node.crt", chain, 0o644)
    write_file(folder / "crl.pem", crl, 0o644)
    return peer


def _pinned_ca(token: JoinToken) -> x509.Certificate:
    """The fleet's root. Fetched over a connection that proves nothing, and proven by its fingerprint."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with _connection(token.url, context) as connection:
        answer = _ask(connection, "GET", "/v1/ca", None)
    try:
        ca = x509.load_pem_x509_certificate(str(answer["ca"]).encode())
    except (KeyError, ValueError):
        raise IdentityError(f"what answers at {token.url} is no controller of gridctl") from None
    found = ca.fingerprint(hashes.SHA256()).hex()
    if not hmac.compare_digest(found, token.ca_sha256):
        raise IdentityError(
            f"{token.url} shows another fleet's root certificate (SHA-256 {found[:16]}..., the token says"
            f" {token.ca_sha256[:16]}...): an old token, or somebody in between. The secret was not sent"
        )
    return ca


def _checked(
    answer: dict[str, Any], ca: x509.Certificate, key: ec.EllipticCurvePrivateKey, node: str
) -> tuple[bytes, bytes, Peer]:
    """Chain, lists and identity of an answer, once all of it holds together."""
    try:
        chain, crl = answer["chain"].encode(), answer["crl"].encode()
        leaf, issuer = x509.load_pem_x509_certificates(chain)
        leaf.verify_directly_issued_by(issuer)
        issuer.verify_directly_issued_by(ca)
    except (KeyError, AttributeError, ValueError, TypeError, InvalidSignature) as error:
        raise IdentityError(f"the controller's answer is no chain of this fleet ({error!r})") from None
    peer = identity.read_peer(leaf)
    if leaf.public_key() != key.public_key() or (peer.role, peer.name) != ("node", node):
        raise IdentityError(f"the controller certified {peer}, not this node's key as node {node}")
    identity.read_lists(crl, ca)
    return chain, crl, peer


def _new_request(node: str) -> tuple[ec.EllipticCurvePrivateKey, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(name).sign(key, hashes.SHA256())
    return key, csr.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_config(path: Path, token: JoinToken) -> None:
    if not path.exists():
        write_file(
            path, f"node = {json.dumps(token.node)}\nlisten = {json.dumps(token.listen)}\n".encode(), 0o644
        )


# --------------------------------------------------------------------------------------------------
# HTTP


@contextmanager
def _connection(url: str, context: ssl.SSLContext) -> Iterator[http.client.HTTPSConnection]:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise IdentityError(f"{url!a} is no https URL")
    connection = http.client.HTTPSConnection(parts.hostname, parts.port, context=context, timeout=_TIMEOUT_S)
    try:
        connection.connect()
        yield connection
    except ssl.SSLCertVerificationError as error:
        raise IdentityError(
            f"the certificate that {url} shows is refused: {error.verify_message} (if it is not yet valid or"
            " has expired, compare this machine's clock with the controller's)"
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise IdentityError(f"no answer from {url}: {error!r}") from None
    finally:
        connection.close()


def _ask(
    connection: http.client.HTTPSConnection, method: str, path: str, body: dict[str, str] | None
) -> dict[str, Any]:
    payload = None if body is None else json.dumps(body)
    connection.request(method, path, payload, {"Content-Type": "application/json"})
    response = connection.getresponse()
    raw = response.read(_ANSWER_BYTES_MAX)
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise IdentityError(f"{path} was answered with status {response.status} and no JSON")
    if response.status != 200:
        said = "".join(filter(str.isprintable, str(answer.get("text", response.status))))  # it may be anybody
        raise IdentityError(f"the controller refuses: {said[:500]}")
    return answer


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise IdentityError(f"another `gridagent join` holds {path}") from None
        yield
