"""The fleet's certificate authority: what lies in the operator's `trust/` folder, and what it signs.

ca.crt                    root; its key rests in the keyring (see `rootkey`)
issuer.crt issuer.key     signs every leaf, so that the controller works with the root key locked
operator.crt operator.key the local operator's identity
crl.pem                   see `gridagent.identity`
issued.jsonl              what was issued: serial, role, name, addresses, end
tokens/                   enrolment tokens (see `tokens`)
"""

import fcntl
import getpass
import ipaddress
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gridagent import identity
from gridagent.enrolment import JoinToken
from gridagent.identity import Peer, write_file
from gridctl.trust import certificates, rootkey, tokens
from gridctl.trust.errors import NotIssued, NotUsable, TrustError

#: A reason of RFC 5280, 5.3.1, as it is written there.
REASONS = {
    reason.value: reason
    for reason in (
        x509.ReasonFlags.unspecified,
        x509.ReasonFlags.key_compromise,
        x509.ReasonFlags.superseded,
        x509.ReasonFlags.cessation_of_operation,
        x509.ReasonFlags.privilege_withdrawn,
    )
}
AGENT_PORT = 7443
OPERATOR_DAYS_RANGE = (7.0, 90.0)

Keep = Callable[[Path, x509.Certificate, certificates.Key], None]


class Authority:
    """Opens the authority in `trust_dir`. Raises `TrustError` where there is none.

    Several processes may hold one (the controller, a `gridctl enroll`): files are read when they are
    needed, and whatever changes them holds a lock.
    """

    def __init__(self, trust_dir: Path) -> None:
        self.trust_dir = trust_dir
        try:
            self.ca = x509.load_pem_x509_certificate((trust_dir / "ca.crt").read_bytes())
            self._issuer()
        except (OSError, ValueError) as error:
            if (trust_dir / "operator.crt").exists():
                text = "holds a certificate and no authority: do this in the home where `gridctl init` ran"
                raise TrustError(f"{trust_dir} {text}") from None
            raise TrustError(f"no fleet authority in {trust_dir} ({error}): run `gridctl init`") from None
        self.fleet = str(self.ca.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)[0].value)

    # ----------------------------------------------------------------------------------------------
    # Making one

    @classmethod
    def init(cls, trust_dir: Path, fleet: str, *, ask: rootkey.Ask | None, say: Callable[[str], Any]) -> Self:
        """Makes a fleet: root, issuer, the local user's operator certificate.

        The root key goes into the keyring, or under a passphrase that `ask` returns (None: nobody can
        be asked); `say` gets a line that tells which. Raises `TrustError`; then nothing was made.
        """
        return cls._make(trust_dir, fleet, lambda folder, ca, key: rootkey.store(folder, ca, key, ask, say))

    @classmethod
    def ephemeral(cls, trust_dir: Path, fleet: str) -> Self:
        """A fleet for a demo or a test: the root key signs the issuer and is then thrown away."""
        return cls._make(trust_dir, fleet, lambda folder, ca, key: None)

    @classmethod
    def _make(cls, trust_dir: Path, fleet: str, keep: Keep) -> Self:
        _check_name("fleet", fleet)
        if trust_dir.exists() and any(trust_dir.iterdir()):
            raise TrustError(f"{trust_dir} is not empty: a fleet exists already; move the folder away first")
        folder = trust_dir.with_name(f"{trust_dir.name}.making")
        shutil.rmtree(folder, ignore_errors=True)
        trust_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        try:
            now = time.time()
            root_key, issuer_key = certificates.new_key(), certificates.new_key()
            ca = certificates.root_certificate(fleet, root_key, now)
            issuer = certificates.issuer_certificate(ca, root_key, issuer_key.public_key(), now)
            keep(folder, ca, root_key)
            by_issuer = certificates.revocation_list(issuer, issuer_key, 1, [], now)
            by_root = certificates.revocation_list(ca, root_key, 1, [], now)
            write_file(folder / "ca.crt", certificates.pem(ca), 0o644)
            write_file(folder / "issuer.crt", certificates.pem(issuer), 0o644)
            write_file(folder / "issuer.key", certificates.key_pem(issuer_key), 0o600)
            write_file(folder / "crl.pem", _bundle(issuer, by_issuer, by_root), 0o644)
            cls(folder).write_identity(folder, "operator", _local_user())
            os.rename(folder, trust_dir)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return cls(trust_dir)

    # ----------------------------------------------------------------------------------------------
    # Issuing

    def issue(
        self,
        public_key: certificates.PublicKey,
        role: str,
        name: str,
        addresses: Sequence[str] = (),
        days: float = certificates.LEAF_DAYS,
    ) -> bytes:
        """Signs a certificate and notes it in `issued.jsonl`. Returns the chain (PEM, leaf first).

        A node needs the addresses (DNS names, IPs) where it serves; a person's certificate lives 7 to
        90 days. Nothing outlives the issuer.
        """
        with self._locked():
            return self._issue(public_key, role, name, addresses, days)

    def renew(self, peer: Peer, public_key: certificates.PublicKey) -> bytes:
        """A new chain for the holder of a certificate in force: same role, name and addresses."""
        with self._locked():
            if peer.serial in self._lists().revoked:
                raise TrustError(f"the certificate of {peer} is revoked: enrol it anew")
            return self._issue(public_key, peer.role, peer.name, peer.addresses, certificates.LEAF_DAYS)

    def write_identity(
        self,
        trust_dir: Path,
        role: str,
        name: str,
        addresses: Sequence[str] = (),
        days: float = certificates.LEAF_DAYS,
    ) -> str:
        """Makes a key and fills a trust folder on this machine: a colleague's, or a demo's node's.

        On the authority's own folder it replaces the local operator's pair. Returns the serial.
        """
        key = certificates.new_key()
        with self._locked():
            chain = self._issue(key.public_key(), role, name, addresses, days)
            trust_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if trust_dir != self.trust_dir:
                write_file(trust_dir / "ca.crt", certificates.pem(self.ca), 0o644)
                write_file(trust_dir / "crl.pem", self.crl_pem(), 0o644)
            file_name = "node" if role == "node" else "operator"
            identity.replace_pair(trust_dir, file_name, chain, certificates.key_pem(key))
        return f"{x509.load_pem_x509_certificate(chain).serial_number:x}"

    def enroll(self, node: str, address: str = "", url: str = "") -> JoinToken:
        """A one-time token for `gridagent join`, good for an hour; print its `encode()`.

        `address` is "HOST" or "HOST:PORT" where the node's agent will listen (default: the node's name,
        port 7443). `url` is the join endpoint (default: of the controller that serves this fleet now).
        Raises `TrustError`.
        """
        _check_name("node", node)
        host, port = _split(address or node)
        _check_request("node", node, [host], certificates.LEAF_DAYS)
        try:
            url = url or (self.trust_dir / "join.url").read_text()
        except FileNotFoundError:
            raise TrustError(
                "no controller accepts nodes now: start one with `gridctl watch --listen HOST:PORT`"
            ) from None
        return JoinToken(
            url=url,
            node=node,
            listen=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            ca_sha256=self.ca.fingerprint(hashes.SHA256()).hex(),
            secret=tokens.create(self.trust_dir / "tokens", node, host, time.time()),
        )

    def serving_chain(self, public_key: certificates.PublicKey, address: str) -> bytes:
        """A chain for the controller's own listener: it may serve at `address`, but is no client."""
        issuer, issuer_key = self._signer()
        uri = f"gridctl://{self.fleet}/operator/controller"
        leaf = certificates.leaf_certificate(
            issuer,
            issuer_key,
            public_key,
            uri,
            [address],
            certificates.SERVER_ONLY,
            time.time(),
            certificates.LEAF_DAYS,
        )
        return certificates.pem(leaf) + certificates.pem(issuer)

    def tend(self) -> list[str]:
        """What an unattended controller owes its own identity; to be called now and then.

        Renews the local operator's certificate once a third of its life is left (then the caller
        reloads its TLS contexts). Returns what was done, one line each.
        """
        if not identity.renewal_due(self.trust_dir, time.time()):
            return []
        own = identity.own_identity(self.trust_dir)
        days = (own.not_after_unix_s - own.not_before_unix_s) // 86400
        low, high = OPERATOR_DAYS_RANGE
        self.write_identity(self.trust_dir, own.role, own.name, (), min(max(days, low), high))
        return [f"renewed the certificate of {own}"]

    def _issue(
        self, public_key: certificates.PublicKey, role: str, name: str, addresses: Sequence[str], days: float
    ) -> bytes:
        _check_request(role, name, addresses, days)
        issuer, issuer_key = self._signer()
        uri, usages = f"gridctl://{self.fleet}/{role}/{name}", certificates.usages_of(role)
        leaf = certificates.leaf_certificate(
            issuer, issuer_key, public_key, uri, addresses, usages, time.time(), days
        )
        record = {
            "serial": f"{leaf.serial_number:x}",
            "role": role,
            "name": name,
            "addresses": list(addresses),
            "not_after_unix_s": leaf.not_valid_after_utc.timestamp(),
        }
        with (self.trust_dir / "issued.jsonl").open("a") as ledger:
            ledger.write(json.dumps(record) + "\n")
            ledger.flush()
            os.fsync(ledger.fileno())
        return certificates.pem(leaf) + certificates.pem(issuer)

    # ----------------------------------------------------------------------------------------------
    # Revoking

    def crl_pem(self) -> bytes:
        """The bundle that `PUT /v1/crl` carries to every node."""
        return (self.trust_dir / "crl.pem").read_bytes()

    def revoke(self, target: str, reason: str = "unspecified") -> list[str]:
        """Revokes every unexpired certificate (and open token) of `target`: a node's name, "operator/NAME",
        "viewer/NAME", or one serial in hexadecimal. `reason` is one of `REASONS`.

        Returns the serials that are new on the list (none: all were on it). The caller distributes
        `crl_pem()`. Raises `TrustError` where nothing was issued to `target`.
        """
        if reason not in REASONS:
            raise NotUsable(f"unknown reason {reason!a}: say one of {', '.join(REASONS)}")
        with self._locked():
            lists, now = self._lists(), time.time()
            serials = self._serials_of(target, now)
            tokens.withdraw(self.trust_dir / "tokens", target)
            new = [serial for serial in serials if serial not in lists.revoked]
            if new:
                entries = [certificates.revocation(int(serial, 16), REASONS[reason], now) for serial in new]
                self._publish(lists.number + 1, entries, now)
            return new

    def renew_issuer(self, ask: rootkey.Ask | None, *, compromised: bool = False) -> None:
        """Replaces the issuer with the root key: its 90 days near their end, or its key was stolen.

        `compromised` revokes the old issuer and with it every certificate that it signed: all nodes
        and operators then enrol anew. Raises `TrustError` where the root key is not to be had.
        """
        root_key = rootkey.load(self.trust_dir, self.ca, ask)
        with self._locked():
            now, lists = time.time(), self._lists()
            old_issuer, _ = self._issuer()
            key = certificates.new_key()
            issuer = certificates.issuer_certificate(self.ca, root_key, key.public_key(), now)
            by_issuer, by_root = map(x509.load_pem_x509_crl, identity.crl_blocks(self.crl_pem()))
            by_issuer = certificates.revocation_list(issuer, key, lists.number + 1, list(by_issuer), now)
            if compromised:
                entry = certificates.revocation(
                    old_issuer.serial_number, x509.ReasonFlags.key_compromise, now
                )
                by_root = certificates.revocation_list(
                    self.ca, root_key, lists.root_number + 1, [*by_root, entry], now
                )
            # The list first: if this process dies in between, running it again mends everything.
            write_file(self.trust_dir / "crl.pem", _bundle(issuer, by_issuer, by_root), 0o644)
            identity.replace_pair(
                self.trust_dir, "issuer", certificates.pem(issuer), certificates.key_pem(key)
            )
        own = identity.own_identity(self.trust_dir)
        self.write_identity(self.trust_dir, own.role, own.name)

    def serials(self) -> list[str]:
        """Of the certificates that init and the issuer's renewal make: the issuer, the local operator."""
        issuer, _ = self._issuer()
        return [f"{issuer.serial_number:x}", identity.own_identity(self.trust_dir).serial]

    def _publish(self, number: int, entries: list[x509.RevokedCertificate], now_unix_s: float) -> None:
        issuer, key = self._issuer()
        by_issuer, by_root = map(x509.load_pem_x509_crl, identity.crl_blocks(self.crl_pem()))
        by_issuer = certificates.revocation_list(issuer, key, number, [*by_issuer, *entries], now_unix_s)
        write_file(self.trust_dir / "crl.pem", _bundle(issuer, by_issuer, by_root), 0o644)

    def _serials_of(self, target: str, now_unix_s: float) -> list[str]:
        role, _, name = target.rpartition("/")
        records = [json.loads(line) for line in (self.trust_dir / "issued.jsonl").read_text().splitlines()]
        owned = [r for r in records if (r["role"], r["name"]) == (role or "node", name)]
        if owned:
            return [r["serial"] for r in owned if r["not_after_unix_s"] > now_unix_s]
        serial = target.lower().lstrip("0")
        if not any(r["serial"] == serial for r in records):
            raise NotIssued(f"nothing was issued to {target!a}, and no certificate has this serial")
        return [serial]

    # ----------------------------------------------------------------------------------------------
    # Files

    def _lists(self) -> identity.RevocationLists:
        return identity.read_lists(self.crl_pem(), self.ca)

    def _issuer(self) -> tuple[x509.Certificate, certificates.Key]:
        identity.settle(self.trust_dir)
        issuer = x509.load_pem_x509_certificate((self.trust_dir / "issuer.crt").read_bytes())
        key = serialization.load_pem_private_key((self.trust_dir / "issuer.key").read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != issuer.public_key():
            raise ValueError("issuer.key does not belong to issuer.crt")
        return issuer, key

    def _signer(self) -> tuple[x509.Certificate, certificates.Key]:
        issuer, key = self._issuer()
        if issuer.not_valid_after_utc.timestamp() < time.time():
            raise TrustError("the fleet's issuer has expired: renew it with the root key (docs/trust.md)")
        return issuer, key

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.trust_dir / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _bundle(
    issuer: x509.Certificate,
    by_issuer: x509.CertificateRevocationList,
    by_root: x509.CertificateRevocationList,
) -> bytes:
    return certificates.pem(issuer) + certificates.pem(by_issuer) + certificates.pem(by_root)


def _check_name(what: str, name: str) -> None:
    if not identity.NAME.fullmatch(name):
        raise NotUsable(
            f"{name!a} is no usable {what} name: 1 to 63 letters, digits, dots, dashes or underscores"
        )


def _check_request(role: str, name: str, addresses: Sequence[str], days: float) -> None:
    if role not in identity.ROLES:
        raise NotUsable(f"unknown role {role!a}: one of {', '.join(identity.ROLES)}")
    _check_name(role, name)
    low, high = OPERATOR_DAYS_RANGE
    if role != "node" and not low <= days <= high:
        raise NotUsable(f"an {role} certificate lives {low:.0f} to {high:.0f} days, not {days:g}")
    if role == "node" and not addresses:
        raise NotUsable(f"node {name} needs the address (DNS name or IP) where its agent listens")


def _split(address: str) -> tuple[str, int]:
    """Host and port of "HOST", "HOST:PORT", an IPv6 address, or "[IPV6]:PORT"."""
    try:
        return str(ipaddress.ip_address(address)), AGENT_PORT  # also IPv6, whose colons are no port
    except ValueError:
        pass
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::(\d{1,5}))?", address)
    if match is None or not 0 <= int(match[2] or 0) < 65536:
        raise NotUsable(f"{address!a} is no HOST or HOST:PORT")
    return match[1].strip("[]"), int(match[2] or AGENT_PORT)


def _local_user() -> str:
    """The local user's name, made fit for an identity."""
    return re.sub(r"[^A-Za-z0-9]+", "-", getpass.getuser()).strip("-")[:63] or "operator"
