"""Who is who: certificates, mutual TLS and revocation, as a node (and any other party) sees them.

A *trust folder* holds `ca.crt` (the fleet's root), one identity (`node.crt`/`node.key`, or
`operator.crt`/`operator.key`; the `.crt` is the chain: leaf, then issuer) and `crl.pem`. An identity
is one URI in the certificate: `gridctl://FLEET/ROLE/NAME`.

`crl.pem` is a bundle: the issuer's certificate, the issuer's list of revoked certificates (valid for
the whole fleet, whoever issued them) and the root's list of revoked issuers. A bundle replaces
another only if it is newer. A list's "next update" is not enforced: a fleet whose controller is away
goes on with the last list it got.
"""

import os
import re
import shutil
import ssl
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from gridagent.errors import AgentError

ROLES = ("node", "operator", "viewer")
#: Fleet, node and operator names: also DNS-like, so that they are safe in a URI, a path and a terminal.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_URI = re.compile(rf"gridctl://({NAME.pattern})/({'|'.join(ROLES)})/({NAME.pattern})")
_PEM = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----.+?-----END \1-----\n?", re.DOTALL)
_WARN_AHEAD_S = 14 * 86400.0


class IdentityError(AgentError):
    """An identity is missing, wrong, expired or revoked. The text says whose and what to do."""


@dataclass(frozen=True)
class Peer:
    """The holder of a certificate."""

    fleet: str
    role: str  #: node, operator or viewer
    name: str
    serial: str  #: hexadecimal, lower case
    not_before_unix_s: float = 0.0
    not_after_unix_s: float = 0.0
    addresses: tuple[str, ...] = ()  #: DNS names and IP addresses where it may serve
    issuer_serial: str = ""

    def __str__(self) -> str:
        return f"{self.role} {self.name} of fleet {self.fleet} (serial {self.serial[:16]})"


@dataclass(frozen=True)
class RevocationLists:
    """A verified `crl.pem`."""

    root_number: int
    number: int
    revoked: frozenset[str]
    revoked_issuers: frozenset[str]

    @property
    def age(self) -> tuple[int, int]:
        """Sorts bundles: the root's word counts more than that of any issuer."""
        return (self.root_number, self.number)


# --------------------------------------------------------------------------------------------------
# TLS


def server_context(trust_dir: Path) -> ssl.SSLContext:
    """TLS 1.3 for a listener that asks every client for a certificate of the fleet.

    Raises `IdentityError` where the trust folder is incomplete.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # No session tickets: a resumed session would skip the check of the certificate chain.
    context.num_tickets = 0
    return _mutual(context, trust_dir)


def client_context(trust_dir: Path) -> ssl.SSLContext:
    """TLS 1.3 for a client; the server's certificate must bear the host name or IP that is called.

    Raises `IdentityError` where the trust folder is incomplete.
    """
    return _mutual(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), trust_dir)


def reload(context: ssl.SSLContext, trust_dir: Path) -> None:
    """New handshakes on `context` use the pair that lies in the folder now; open connections stay.

    To be called by the thread that also runs the handshakes (the event loop's).
    """
    crt, key = _pair(trust_dir)
    try:
        context.load_cert_chain(crt, key)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"{crt} and {key.name} do not make a usable pair: {error}; enrol anew") from None


def _mutual(context: ssl.SSLContext, trust_dir: Path) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    ca_path = trust_dir / "ca.crt"
    try:
        context.load_verify_locations(ca_path)
    except (OSError, ssl.SSLError) as error:
        raise IdentityError(f"cannot read the fleet's root certificate {ca_path}: {error}") from None
    reload(context, trust_dir)
    return context


def peer_of(
    ssl_object: ssl.SSLObject | ssl.SSLSocket | None,
    trust_dir: Path,
    *,
    node: str = "",
    now_unix_s: float | None = None,
) -> Peer:
    """Who is at the other end. To be asked on every request: an open connection proves nothing later.

    The handshake has checked the chain and, at a client, the address. This checks that the peer is of
    our own fleet, has one known role, is not expired by now, and that neither it nor its issuer is
    revoked; with `node`, that it is the node of this name. Raises `IdentityError`.
    """
    der = ssl_object.getpeercert(True) if ssl_object is not None else None
    if not der:
        raise IdentityError("the peer showed no certificate; only mutual TLS is spoken here")
    try:
        peer = read_peer(x509.load_der_x509_certificate(der))
    except ValueError as error:
        raise IdentityError(f"the peer's certificate cannot be read: {error}") from None
    own, lists = _state(trust_dir)
    now = time.time() if now_unix_s is None else now_unix_s
    if peer.fleet != own.fleet:
        raise IdentityError(f"{peer} is of another fleet than this party ({own.fleet})")
    if peer.serial in lists.revoked or peer.issuer_serial in lists.revoked_issuers:
        raise IdentityError(f"the certificate of {peer} is revoked; enrol it anew if it is to come back")
    if now > peer.not_after_unix_s:
        raise IdentityError(f"the certificate of {peer} has expired; enrol it anew")
    if node and (peer.role, peer.name) != ("node", node):
        raise IdentityError(f"expected node {node}, but {peer} answered; is the address in fleet.toml right?")
    return peer


def read_peer(certificate: x509.Certificate) -> Peer:
    """The identity that a certificate states. Raises `IdentityError` where it states none of ours."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        raise IdentityError("the certificate has no readable subject alternative name") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    match = _URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if match is None:
        raise IdentityError(f"the certificate names no party of a fleet: {ascii(uris)[:200]}")
    # An issuer's subject bears its own serial, and a chain only holds where the names agree:
    # so a leaf cannot lie about who issued it.
    issuer = certificate.issuer.get_attributes_for_oid(NameOID.SERIAL_NUMBER)
    addresses = [str(name) for name in names.get_values_for_type(x509.DNSName)]
    addresses += [str(ip) for ip in names.get_values_for_type(x509.IPAddress)]
    return Peer(
        fleet=match[1],
        role=match[2],
        name=match[3],
        serial=f"{certificate.serial_number:x}",
        not_before_unix_s=certificate.not_valid_before_utc.timestamp(),
        not_after_unix_s=certificate.not_valid_after_utc.timestamp(),
        addresses=tuple(addresses),
        issuer_serial=str(issuer[0].value) if issuer else "",
    )


# --------------------------------------------------------------------------------------------------
# The trust folder


def own_identity(trust_dir: Path) -> Peer:
    """The identity in a trust folder. Raises `IdentityError` where there is none."""
    return _state(trust_dir)[0]


def install_crl(trust_dir: Path, pem: bytes) -> bool:
    """Puts a newer `crl.pem` in force. False: it was in force already.

    Raises `IdentityError` for a bundle that the fleet's root does not vouch for, or an older one.
    """
    path = trust_dir / "crl.pem"
    new = read_lists(pem, _certificate(trust_dir / "ca.crt"))
    old = _state(trust_dir)[1]
    if new.age < old.age:
        raise IdentityError(f"{path}: list {new.age} is older than {old.age}, which is in force; kept that")
    if new == old:
        return False
    if new.age == old.age:
        raise IdentityError(f"{path}: another list with the number {old.age} is in force; kept that")
    write_file(path, pem, 0o644)
    return True


def read_lists(pem: bytes, ca: x509.Certificate) -> RevocationLists:
    """Parses and verifies a bundle. Raises `IdentityError`."""
    try:
        issuer = x509.load_pem_x509_certificate(pem)
        issuer.verify_directly_issued_by(ca)
        by_issuer, by_root = map(x509.load_pem_x509_crl, crl_blocks(pem))
        is_ca = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        signed = (
            by_issuer.is_signature_valid(issuer.public_key())  # type: ignore[arg-type]
            and by_root.is_signature_valid(ca.public_key())  # type: ignore[arg-type]
        )
        lists = RevocationLists(
            root_number=_number(by_root),
            number=_number(by_issuer),
            revoked=frozenset(f"{entry.serial_number:x}" for entry in by_issuer),
            revoked_issuers=frozenset(f"{entry.serial_number:x}" for entry in by_root),
        )
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound, x509.InvalidVersion) as error:
        raise IdentityError(f"not a revocation list of this fleet: {error or 'wrong signature'}") from None
    if not (is_ca and signed) or f"{issuer.serial_number:x}" in lists.revoked_issuers:
        raise IdentityError("not a revocation list of this fleet: its signer may not sign one")
    return lists


def expiry_warnings(trust_dir: Path, now_unix_s: float) -> list[str]:
    """One line for each certificate of the folder that ends within 14 days, has ended or has not begun."""
    lines = []
    for path in sorted(trust_dir.glob("*.crt")):
        certificate = _certificate(path)
        left_s = certificate.not_valid_after_utc.timestamp() - now_unix_s
        ahead_s = certificate.not_valid_before_utc.timestamp() - now_unix_s
        if ahead_s > 0:
            lines.append(f"{path} begins to be valid in {ahead_s / 86400:.1f} days: is the clock right here?")
        elif left_s < 0:
            lines.append(f"{path} has expired {-left_s / 86400:.1f} days ago")
        elif left_s < _WARN_AHEAD_S:
            lines.append(f"{path} expires in {left_s / 86400:.1f} days")
    return lines


def permission_warnings(trust_dir: Path) -> list[str]:
    """One line for each private key of the folder that others than its owner may read."""
    lines = []
    for path in sorted(trust_dir.glob("*.key")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            lines.append(f"{path} has mode {mode:04o}: others can read a private key; run chmod 600 on it")
    return lines


def renewal_due(trust_dir: Path, now_unix_s: float) -> bool:
    """True once less than a third of the certificate's lifetime is left."""
    own = own_identity(trust_dir)
    return own.not_after_unix_s - now_unix_s < (own.not_after_unix_s - own.not_before_unix_s) / 3


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Replaces a file at once: a reader, or a crash, sees the old content or the new.

    Raises `OSError` that names the file.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise
    sync_folder(path.parent)


def replace_pair(trust_dir: Path, name: str, chain_pem: bytes, key_pem: bytes) -> None:
    """Replaces NAME.crt and NAME.key together, also if the process dies in the middle."""
    made, ready = trust_dir / "next.part", trust_dir / "next"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(mode=0o700)
    write_file(made / f"{name}.key", key_pem, 0o600)
    write_file(made / f"{name}.crt", chain_pem, 0o644)
    settle(trust_dir)
    os.rename(made, ready)
    sync_folder(trust_dir)
    settle(trust_dir)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(trust_dir: Path) -> None:
    """Ends a replacement that was decided (`next` is there) but not carried through."""
    ready = trust_dir / "next"
    if not ready.is_dir():
        return
    with suppress(FileNotFoundError):  # another process settles it in the same moment
        for path in list(ready.iterdir()):
            os.replace(path, trust_dir / path.name)
        sync_folder(trust_dir)
        ready.rmdir()


def _pair(trust_dir: Path) -> tuple[Path, Path]:
    settle(trust_dir)
    for name in ("node", "operator"):
        crt, key = trust_dir / f"{name}.crt", trust_dir / f"{name}.key"
        if crt.exists() and key.exists():
            return crt, key
    raise IdentityError(
        f"no identity in {trust_dir}: on a node run `gridagent join TOKEN` (an operator makes the token"
        " with `gridctl enroll NODE`), for an operator run `gridctl init`"
    )


def _state(trust_dir: Path) -> tuple[Peer, RevocationLists]:
    paths = (trust_dir / "ca.crt", _pair(trust_dir)[0], trust_dir / "crl.pem")
    try:
        stamps = tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in map(os.stat, paths))
    except OSError as error:
        raise IdentityError(f"the trust folder is incomplete: {error}; enrol anew") from None
    return _read_state(paths, stamps)


@lru_cache(maxsize=32)
def _read_state(paths: tuple[Path, Path, Path], stamps: object) -> tuple[Peer, RevocationLists]:
    """Read once for each state of the files (`stamps`), for it is asked on every request."""
    ca, own, crl = paths
    try:
        return read_peer(_certificate(own)), read_lists(crl.read_bytes(), _certificate(ca))
    except IdentityError as error:
        raise IdentityError(f"the trust folder {crl.parent} is damaged: {error}; enrol anew") from None


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise IdentityError(f"cannot read the certificate {path}: {error}") from None


def _number(crl: x509.CertificateRevocationList) -> int:
    return crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def crl_blocks(pem: bytes) -> tuple[bytes, bytes]:
    """The two lists of a bundle: the issuer's, the root's. Raises `ValueError`."""
    blocks = _blocks(pem, b"X509 CRL")
    if len(blocks) != 2:
        raise ValueError(f"{len(blocks)} lists where two belong")
    return blocks[0], blocks[1]


def _blocks(pem: bytes, label: bytes) -> list[bytes]:
    return [match[0] for match in _PEM.finditer(pem) if match[1] == label]
