"""The root key in a real Secret Service, under a passphrase, and the keyrings that are refused."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from secret_service import clean_environment, secret_service

from gridctl.trust import Authority, TrustError, certificates, rootkey

# Each act runs in a process of its own, as `gridctl` would: a keyring is chosen once for a process.
_ACT = """
import sys
from pathlib import Path
from gridctl.trust import Authority, TrustError
what, trust, passphrase = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
say = lambda text: print(text, file=sys.stderr)
ask = (lambda prompt: passphrase) if passphrase else None
try:
    if what == "init":
        Authority.init(trust, "lab", ask=ask, say=say)
    elif what == "renew-issuer":
        Authority(trust).renew_issuer(ask)
    elif what == "lock":
        import secretstorage
        secretstorage.get_default_collection(secretstorage.dbus_init()).lock()
    elif what == "unattended":
        authority = Authority(trust)
        authority.write_identity(trust.parent / "node", "node", "n1", ["127.0.0.1"])
        authority.enroll("n2", "127.0.0.1", "https://127.0.0.1:1")
        assert authority.revoke("n1")
except TrustError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def act(environment: dict[str, str], what: str, trust: Path, passphrase: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ACT, what, str(trust), passphrase],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


def root_key_files(folder: Path) -> list[Path]:
    """Files below a folder in which the private half of some ca.crt lies open."""
    roots = {_public(path) for path in folder.rglob("ca.crt")}
    found = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        for block in path.read_bytes().split(b"-----BEGIN PRIVATE KEY-----")[1:]:
            pem = b"-----BEGIN PRIVATE KEY-----" + block
            key = serialization.load_pem_private_key(pem, password=None)
            if key.public_key().public_bytes(*_SPKI) in roots:
                found.append(path)
    return found


_SPKI = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _public(path: Path) -> bytes:
    return x509.load_pem_x509_certificate(path.read_bytes()).public_key().public_bytes(*_SPKI)


@pytest.fixture(scope="module")
def service() -> Iterator[dict[str, str]]:
    with secret_service() as environment:
        yield environment


@pytest.fixture
def own_service() -> Iterator[dict[str, str]]:
    with secret_service() as environment:
        yield environment


@pytest.fixture
def no_service(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "home").mkdir()
    return clean_environment(tmp_path / "home")


def test_the_root_key_rests_in_the_keyring_and_nowhere_else(service: dict[str, str], tmp_path: Path) -> None:
    trust = tmp_path / "op" / "trust"
    status, said = act(service, "init", trust)
    assert status == 0, said
    assert "in the keyring (keyring.backends.SecretService.Keyring)" in said
    assert not root_key_files(tmp_path)
    assert not (trust / rootkey.ENCRYPTED_FILE).exists()
    assert stat.S_IMODE((trust / "issuer.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(trust.stat().st_mode) == 0o700
    before = (trust / "issuer.crt").read_bytes()
    assert act(service, "renew-issuer", trust) == (0, "")
    assert (trust / "issuer.crt").read_bytes() != before


def test_two_fleets_share_a_keyring(service: dict[str, str], tmp_path: Path) -> None:
    for name in "ab":
        status, said = act(service, "init", tmp_path / name / "trust")
        assert status == 0, said
    for name in "ab":
        assert act(service, "renew-issuer", tmp_path / name / "trust") == (0, "")


def test_a_locked_keyring_stops_what_needs_it_and_nothing_else(
    own_service: dict[str, str], tmp_path: Path
) -> None:
    trust = tmp_path / "op" / "trust"
    assert act(own_service, "init", trust)[0] == 0
    assert act(own_service, "lock", trust) == (0, "")
    before = {path: path.read_bytes() for path in trust.iterdir()}
    status, said = act(own_service, "renew-issuer", trust)
    assert status == 1
    assert "KeyringIsLocked: the keyring is locked" in said
    assert "unlock it" in said
    assert {path: path.read_bytes() for path in trust.iterdir()} == before
    status, said = act(own_service, "init", tmp_path / "other" / "trust", "a passphrase, though")
    assert status == 1, "a locked keyring must not silently become a file"
    assert "KeyringIsLocked" in said
    assert list((tmp_path / "other").iterdir()) == []
    assert act(own_service, "unattended", trust) == (0, "")


def test_another_users_keyring_has_no_root_key(
    service: dict[str, str], own_service: dict[str, str], tmp_path: Path
) -> None:
    trust = tmp_path / "op" / "trust"
    assert act(service, "init", trust)[0] == 0
    status, said = act(own_service, "renew-issuer", trust)
    assert status == 1
    assert "has no root key" in said


def test_without_a_keyring_a_passphrase_is_asked_for_and_it_is_said_aloud(
    no_service: dict[str, str], tmp_path: Path
) -> None:
    trust = tmp_path / "op" / "trust"
    status, said = act(no_service, "init", trust, "correct horse battery")
    assert status == 0, said
    assert "no keyring service runs here: the root key goes to an encrypted file instead" in said
    path = trust / rootkey.ENCRYPTED_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not root_key_files(tmp_path)
    assert act(no_service, "renew-issuer", trust, "correct horse battery") == (0, "")
    key = rootkey.load(trust, Authority(trust).ca, lambda _: "correct horse battery")
    (tmp_path / "leak").write_bytes(certificates.key_pem(key))
    assert root_key_files(tmp_path) == [tmp_path / "leak"]  # so the search above can find it
    status, said = act(no_service, "renew-issuer", trust, "incorrect horse battery")
    assert (status, "wrong passphrase" in said) == (1, True)
    status, said = act(no_service, "renew-issuer", trust)
    assert (status, "needs its passphrase" in said) == (1, True)
    path.write_bytes(path.read_bytes()[:-20])
    status, said = act(no_service, "renew-issuer", trust, "correct horse battery")
    assert (status, "is damaged" in said) == (1, True)


def test_without_a_keyring_and_a_terminal_nothing_is_made(no_service: dict[str, str], tmp_path: Path) -> None:
    status, said = act(no_service, "init", tmp_path / "op" / "trust")
    assert status == 1
    assert "no terminal to ask for a passphrase" in said
    status, said = act(no_service, "init", tmp_path / "op" / "trust", "too short")
    assert (status, "at least 12 characters" in said) == (1, True)
    assert list((tmp_path / "op").iterdir()) == []


_PLAIN = """
from pathlib import Path
from keyring.backend import KeyringBackend
class PlaintextKeyring(KeyringBackend):
    priority = 9
    def get_password(self, service, username):
        return Path({file!r}).read_text()
    def set_password(self, service, username, password):
        Path({file!r}).write_text(password)
"""


@pytest.mark.parametrize(
    "backend",
    ["plain_backend.PlaintextKeyring", "keyring.backends.null.Keyring", "keyring.backends.fail.Keyring"],
)
def test_no_other_keyring_gets_the_root_key(no_service: dict[str, str], tmp_path: Path, backend: str) -> None:
    secret_file = tmp_path / "plain.txt"
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "plain_backend.py").write_text(_PLAIN.format(file=str(secret_file)))
    environment = no_service | {"PYTHON_KEYRING_BACKEND": backend}
    sys.path.insert(0, str(modules))
    try:
        trust = tmp_path / "op" / "trust"
        status, said = act(environment, "init", trust)
        assert status == 1
        assert backend in said or "no keyring service runs here" in said
        status, said = act(environment, "init", trust, "correct horse battery")
        assert status == 0, said
    finally:
        sys.path.remove(str(modules))
    assert "encrypted file instead" in said
    assert not secret_file.exists()
    assert not root_key_files(tmp_path)


def test_an_existing_fleet_is_never_overwritten(tmp_path: Path) -> None:
    trust = tmp_path / "trust"
    Authority.ephemeral(trust, "lab")
    before = {path: path.read_bytes() for path in trust.iterdir()}
    with pytest.raises(TrustError, match="a fleet exists already"):
        Authority.ephemeral(trust, "lab2")
    assert {path: path.read_bytes() for path in trust.iterdir()} == before
    assert not root_key_files(tmp_path)
