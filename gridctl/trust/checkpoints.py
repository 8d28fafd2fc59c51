"""Signed checkpoints of a journal's chain: so many records there were, with this hash, at that time.

A chain shows every change but the loss of its newest records. A checkpoint that lies elsewhere shows that,
too: it is signed (Ed25519) with the operator's audit key, which rests in the operating system's keyring.
"""

import base64
import hashlib
import os
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gridctl.trust import keyrings
from gridctl.trust.errors import TrustError

_SERVICE = "gridctl audit key"
_LINE_BYTES_MAX = 4096


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a file of checkpoints."""

    seq: int
    hash: str  #: of record `seq`
    t_unix_s: float
    fleet: str  #: name of the account under which the key rests
    key: str  #: id of the key: the first half of the SHA-256 of the public one
    public: str  #: the public key, base64
    signature: str = ""  #: base64, of all the others

    def signed(self) -> bytes:
        """The bytes that the signature is of."""
        bare = msgspec.structs.replace(self, signature="")
        return b"gridctl checkpoint 1\n" + msgspec.json.encode(bare, order="deterministic")


class AuditKey:
    """The operator's key for checkpoints of one fleet. It never leaves this process and the keyring."""

    def __init__(self, fleet: str, private: Ed25519PrivateKey) -> None:
        self._fleet = fleet
        self._private = private
        raw = private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.public = base64.b64encode(raw).decode()
        self.id = key_id(self.public)

    @classmethod
    def of(cls, fleet: str, *, make: bool) -> "AuditKey | None":
        """The key in the keyring; made there if it is missing and `make`, else None.

        Raises `KeyringUnavailable` and `KeyringIsLocked`, and `TrustError` for what is no key.
        """
        backend = keyrings.backend()
        text = keyrings.call(backend, lambda: backend.get_password(_SERVICE, fleet))
        if text is None:
            if not make:
                return None
            private = Ed25519PrivateKey.generate()
            raw = private.private_bytes_raw()
            text = base64.b64encode(raw).decode()
            keyrings.call(backend, lambda: backend.set_password(_SERVICE, fleet, text))
            if keyrings.call(backend, lambda: backend.get_password(_SERVICE, fleet)) != text:
                raise TrustError(f"the keyring {keyrings.name(backend)} did not give back the audit key")
            return cls(fleet, private)
        try:
            return cls(fleet, Ed25519PrivateKey.from_private_bytes(base64.b64decode(text, validate=True)))
        except ValueError as error:
            raise TrustError(f"what the keyring has as audit key of {fleet} is none: {error}") from None

    def sign(self, seq: int, digest: str, t_unix_s: float) -> Checkpoint:
        """A checkpoint of a chain whose record `seq` has that hash."""
        bare = Checkpoint(
            seq=seq, hash=digest, t_unix_s=t_unix_s, fleet=self._fleet, key=self.id, public=self.public
        )
        signature = base64.b64encode(self._private.sign(bare.signed())).decode()
        return msgspec.structs.replace(bare, signature=signature)


def account(trust: Path, journal: Path) -> str:
    """Under which name the key of a fleet rests: its CA, or where there is none its journal's folder."""
    try:
        certificate = x509.load_pem_x509_certificate((trust / "ca.crt").read_bytes())
    except (OSError, ValueError):
        return str(journal)
    return f"SHA256:{certificate.fingerprint(hashes.SHA256()).hex()}"


def append(path: Path, checkpoint: Checkpoint) -> None:
    """Adds a line to a file of checkpoints, on the disk before it returns. Raises `OSError`."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, msgspec.json.encode(checkpoint) + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)


def key_id(public: str) -> str:
    """The short name of a public key."""
    return hashlib.sha256(public.encode()).hexdigest()[:32]


def sound(checkpoint: Checkpoint, public: str = "") -> bool:
    """Is it signed by the key that it names, and is that `public`, where one is given?"""
    if public and checkpoint.public != public:
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(checkpoint.public, validate=True))
        key.verify(base64.b64decode(checkpoint.signature, validate=True), checkpoint.signed())
    except (ValueError, InvalidSignature):
        return False
    return checkpoint.key == key_id(checkpoint.public)


def read(path: Path) -> tuple[list[Checkpoint], int]:
    """The checkpoints of a file, and how many lines are none; nothing where there is no file."""
    found, bad = [], 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_LINE_BYTES_MAX):
                try:
                    found.append(msgspec.json.decode(line, type=Checkpoint))
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    bad += 1
    except FileNotFoundError:
        pass
    return found, bad
