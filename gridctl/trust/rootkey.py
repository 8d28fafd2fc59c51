"""Where the root key rests: the OS keyring, else a file encrypted under a passphrase.

It is needed only to make a fleet and to renew or revoke an issuer; the controller never needs it.
"""

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from gridagent.identity import write_file
from gridctl.trust import certificates, keyrings
from gridctl.trust.errors import KeyringUnavailable, TrustError

#: Asks for a passphrase; the text says what for.
Ask = Callable[[str], str]

ENCRYPTED_FILE = "root.key.enc"
PASSPHRASE_CHARS_MIN = 12
_SERVICE = "gridctl root key"
#: 128 MiB and about half a second for each guess.
_SCRYPT = {"n": 1 << 17, "r": 8, "p": 1}


def store(folder: Path, ca: x509.Certificate, key: certificates.Key, ask: Ask | None, say: Ask) -> None:
    """Puts the key of `ca` into the keyring, or else into `folder` under a passphrase.

    `say` gets one line that tells where the key went, and why not into the keyring. Raises
    `KeyringIsLocked`, and `TrustError` where neither a keyring nor a passphrase is to be had.
    """
    try:
        where = _store_in_keyring(ca, key)
    except KeyringUnavailable as reason:
        if ask is None:
            raise TrustError(
                f"{reason}, and there is no terminal to ask for a passphrase: start a keyring service"
                " (Secret Service), run this on a terminal, or pass --passphrase-file FILE"
            ) from None
        path = folder / ENCRYPTED_FILE
        say(f"{reason}: the root key goes to an encrypted file instead, and only its passphrase opens it")
        _store_in_file(path, ca, key, ask)
        return
    say(f"the root key is in the keyring ({where})")


def load(folder: Path, ca: x509.Certificate, ask: Ask | None) -> certificates.Key:
    """The root key. Raises `TrustError` (locked, missing, wrong passphrase, not the key of `ca`)."""
    path = folder / ENCRYPTED_FILE
    text = _load_from_file(path, ca, ask) if path.exists() else _load_from_keyring(ca)
    key = serialization.load_pem_private_key(text, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise TrustError(f"the stored root key does not belong to {folder / 'ca.crt'}")
    return key


# --------------------------------------------------------------------------------------------------
# Keyring


def _account(ca: x509.Certificate) -> str:
    return f"SHA256:{ca.fingerprint(hashes.SHA256()).hex()}"


def _store_in_keyring(ca: x509.Certificate, key: certificates.Key) -> str:
    backend, text = keyrings.backend(), certificates.key_pem(key).decode()
    keyrings.call(backend, lambda: backend.set_password(_SERVICE, _account(ca), text))
    if keyrings.call(backend, lambda: backend.get_password(_SERVICE, _account(ca))) != text:
        raise TrustError(
            f"the keyring {keyrings.name(backend)} did not give back the key that was put into it"
        )
    return keyrings.name(backend)


def _load_from_keyring(ca: x509.Certificate) -> bytes:
    backend = keyrings.backend()
    text = keyrings.call(backend, lambda: backend.get_password(_SERVICE, _account(ca)))
    if text is None:
        raise TrustError(
            f"the keyring {keyrings.name(backend)} has no root key for {_account(ca)[:23]}...: was the fleet"
            " made by another user or on another machine?"
        )
    return str(text).encode()


# --------------------------------------------------------------------------------------------------
# Encrypted file


def _store_in_file(path: Path, ca: x509.Certificate, key: certificates.Key, ask: Ask) -> None:
    passphrase = ask(f"New passphrase for the fleet's root key, at least {PASSPHRASE_CHARS_MIN} characters: ")
    if len(passphrase) < PASSPHRASE_CHARS_MIN:
        raise TrustError(f"the passphrase is too short: at least {PASSPHRASE_CHARS_MIN} characters")
    if ask("The same passphrase again: ") != passphrase:
        raise TrustError("the two passphrases differ; run this again")
    salt, nonce = os.urandom(16), os.urandom(12)
    sealed = AESGCM(_stretch(passphrase, salt)).encrypt(
        nonce, certificates.key_pem(key), _account(ca).encode()
    )
    fields = {"salt": salt, "nonce": nonce, "sealed": sealed}
    document = {name: base64.b64encode(value).decode() for name, value in fields.items()}
    write_file(path, json.dumps({"cipher": "scrypt-aes256gcm", **_SCRYPT, **document}).encode(), 0o600)


def _load_from_file(path: Path, ca: x509.Certificate, ask: Ask | None) -> bytes:
    if ask is None:
        raise TrustError(
            f"{path} needs its passphrase, and there is no terminal to ask: pass --passphrase-file FILE"
        )
    try:
        document = json.loads(path.read_bytes())
        if (document["cipher"], *(document[name] for name in _SCRYPT)) != (
            "scrypt-aes256gcm",
            *_SCRYPT.values(),
        ):
            raise ValueError("unknown cipher")
        salt, nonce, sealed = (base64.b64decode(document[name]) for name in ("salt", "nonce", "sealed"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrustError(f"{path} is damaged ({error}): restore it from a backup") from None
    key = _stretch(ask("Passphrase of the fleet's root key: "), salt)
    try:
        return AESGCM(key).decrypt(nonce, sealed, _account(ca).encode())
    except InvalidTag:
        raise TrustError(f"wrong passphrase for {path}, or the file is damaged") from None


def _stretch(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, **_SCRYPT).derive(passphrase.encode())
