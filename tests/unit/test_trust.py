"""Certificates, lists, tokens and warnings, without sockets."""

import base64
import re
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent import identity
from gridagent.enrolment import JoinToken
from gridagent.identity import IdentityError
from gridctl import trust
from gridctl.trust import Authority, TokenRefused, TrustError, certificates, tokens
from gridctl.trust.acts import FILE, Act, note, read_acts
from gridctl.trust.authority import _split

DAY_S = 86400.0
NOW = 1_800_000_000.0
names = st.from_regex(identity.NAME, fullmatch=True)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.ephemeral(tmp_path / "op" / "trust", "lab")


def chain_of(authority: Authority, role: str = "node", name: str = "n1") -> list[x509.Certificate]:
    key = certificates.new_key().public_key()
    addresses = ["10.0.0.1", "n1.example"] if role == "node" else []
    return x509.load_pem_x509_certificates(authority.issue(key, role, name, addresses))


# --------------------------------------------------------------------------------------------------
# Certificates


def test_what_a_node_certificate_says(authority: Authority) -> None:
    leaf, issuer = chain_of(authority)
    peer = identity.read_peer(leaf)
    assert (peer.fleet, peer.role, peer.name) == ("lab", "node", "n1")
    assert set(peer.addresses) == {"10.0.0.1", "n1.example"}
    assert peer.issuer_serial == f"{issuer.serial_number:x}"
    usages = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usages) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    now = time.time()
    assert 200 < now - peer.not_before_unix_s < 400, "five minutes of grace for clocks that are behind"
    assert abs(peer.not_after_unix_s - now - 30 * DAY_S) < 60


def test_a_person_only_calls(authority: Authority) -> None:
    for role in ("operator", "viewer"):
        usages = chain_of(authority, role)[0].extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usages) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_serials_are_random(authority: Authority) -> None:
    serials = {chain_of(authority)[0].serial_number for _ in range(50)}
    assert len(serials) == 50
    assert min(serial.bit_length() for serial in serials) > 64


def test_a_leaf_ends_with_its_issuer() -> None:
    root_key, issuer_key = certificates.new_key(), certificates.new_key()
    root = certificates.root_certificate("lab", root_key, NOW)
    issuer = certificates.issuer_certificate(root, root_key, issuer_key.public_key(), NOW)
    late = NOW + (certificates.ISSUER_DAYS - 10) * DAY_S
    leaf = certificates.leaf_certificate(
        issuer, issuer_key, issuer_key.public_key(), "gridctl://lab/node/n", [], [], late, 30
    )
    assert leaf.not_valid_after_utc == issuer.not_valid_after_utc
    assert issuer.not_valid_after_utc.timestamp() == NOW + certificates.ISSUER_DAYS * DAY_S


@pytest.mark.parametrize(
    ("role", "name", "addresses", "days", "why"),
    [
        ("admin", "ann", [], 30, "unknown role"),
        ("operator", "../ann", [], 30, "no usable operator name"),
        ("operator", "a/b", [], 30, "no usable operator name"),
        ("operator", "", [], 30, "no usable operator name"),
        ("operator", "ann\n", [], 30, "no usable operator name"),
        ("operator", "ann", [], 6.9, "7 to 90 days"),
        ("viewer", "ann", [], 90.1, "7 to 90 days"),
        ("node", "n1", [], 30, "needs the address"),
    ],
)
def test_what_is_never_issued(
    authority: Authority, role: str, name: str, addresses: list[str], days: float, why: str
) -> None:
    before = (authority.trust_dir / "issued.jsonl").read_text()
    with pytest.raises(TrustError, match=why):
        authority.issue(certificates.new_key().public_key(), role, name, addresses, days)
    assert (authority.trust_dir / "issued.jsonl").read_text() == before


def _certificate_that_says(uri: str) -> x509.Certificate:
    key = certificates.new_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    start = datetime.fromtimestamp(NOW, UTC)
    builder = builder.serial_number(1).not_valid_before(start).not_valid_after(start)
    return builder.add_extension(names, critical=False).sign(key, hashes.SHA256())


uris = st.one_of(
    st.from_regex(r"gridctl://[a-z./-]{1,12}/(node|root)/[a-z/]{1,6}\Z", fullmatch=True),
    st.text("gridctl:/nod", max_size=24),
)


@given(uri=uris)
def test_only_whole_identities_are_read(uri: str) -> None:
    """Against a slow twin that splits instead of matching."""
    parts = uri.split("/")
    good = (
        len(parts) == 5
        and parts[:2] == ["gridctl:", ""]
        and parts[3] in identity.ROLES
        and all(re.fullmatch("[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", parts[at]) for at in (2, 4))
    )
    leaf = _certificate_that_says(uri)
    if good:
        peer = identity.read_peer(leaf)
        assert f"gridctl://{peer.fleet}/{peer.role}/{peer.name}" == uri
    else:
        with pytest.raises(IdentityError):
            identity.read_peer(leaf)


# --------------------------------------------------------------------------------------------------
# Revocation


@settings(max_examples=15)
@given(moves=st.lists(st.tuples(st.sampled_from(["issue", "revoke", "serial"]), st.integers(0, 2))))
def test_the_list_holds_exactly_what_was_revoked(
    moves: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    authority = Authority.ephemeral(tmp_path_factory.mktemp("a") / "trust", "lab")
    issued: dict[str, list[str]] = {}
    revoked: set[str] = set()
    number = 1
    for move, index in moves:
        name = f"n{index}"
        if move == "issue":
            leaf = chain_of(authority, name=name)[0]
            issued.setdefault(name, []).append(f"{leaf.serial_number:x}")
        elif name not in issued:
            with pytest.raises(TrustError, match="nothing was issued"):
                authority.revoke(name)
        else:
            victims = issued[name] if move == "revoke" else issued[name][:1]
            new = authority.revoke(name if move == "revoke" else victims[0].upper(), "superseded")
            assert set(new) == set(victims) - revoked
            number += bool(new)
            revoked |= set(victims)
    lists = identity.read_lists(authority.crl_pem(), authority.ca)
    assert (lists.revoked, lists.number, lists.root_number) == (frozenset(revoked), number, 1)


def test_an_unknown_reason_is_refused(authority: Authority) -> None:
    with pytest.raises(TrustError, match="say one of unspecified, keyCompromise"):
        authority.revoke("operator/root", "because")


@pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")  # of odd numbers
def test_a_spoilt_list_is_never_accepted(authority: Authority) -> None:
    chain_of(authority)
    authority.revoke("n1")
    pem = authority.crl_pem()
    true = identity.read_lists(pem, authority.ca)

    @settings(max_examples=300)
    @given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def spoil(at: float, bit: int) -> None:
        spoilt = bytearray(pem)
        spoilt[int(at * len(pem))] ^= 1 << bit
        try:
            lists = identity.read_lists(bytes(spoilt), authority.ca)
        except IdentityError:
            return
        assert lists == true, "only the layout changed"

    spoil()


def test_a_list_of_another_fleet_is_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority.ephemeral(tmp_path / "other" / "trust", "lab")
    with pytest.raises(IdentityError, match="not a revocation list of this fleet"):
        identity.install_crl(authority.trust_dir, other.crl_pem())
    with pytest.raises(IdentityError, match="not a revocation list of this fleet"):
        identity.install_crl(authority.trust_dir, b"")


def test_without_its_list_a_party_refuses_everybody(authority: Authority) -> None:
    (authority.trust_dir / "crl.pem").unlink()
    with pytest.raises(IdentityError, match="incomplete"):
        identity.own_identity(authority.trust_dir)


# --------------------------------------------------------------------------------------------------
# Tokens and addresses


digests = st.from_regex("[0-9a-f]{64}", fullmatch=True)


@given(st.builds(JoinToken, st.text(), names, st.text(), digests, st.text()))
def test_a_token_survives_its_journey(token: JoinToken) -> None:
    text = token.encode()
    assert re.fullmatch(r"gridjoin1\.[A-Za-z0-9_-]+", text), "one word, safe in any shell"
    assert JoinToken.decode(f" {text}\n") == token


encoded = st.binary().map(lambda raw: "gridjoin1." + base64.urlsafe_b64encode(raw).decode())


@given(st.one_of(st.text(), encoded))
def test_anything_else_is_no_token(text: str) -> None:
    with pytest.raises(IdentityError, match="no whole token"):
        JoinToken.decode(text)


def test_the_secret_is_stored_hashed(authority: Authority) -> None:
    token = authority.enroll("n1", "10.0.0.1:7000", "https://10.0.0.9:1")
    assert token.listen == "10.0.0.1:7000"
    assert token.secret not in token.listen
    for path in authority.trust_dir.rglob("*"):
        assert path.is_dir() or (token.secret not in path.read_text() and token.secret not in path.name)


def test_of_many_claims_at_once_one_wins(authority: Authority) -> None:
    token = authority.enroll("n1", "10.0.0.1", "https://10.0.0.9:1")
    start = threading.Barrier(8)

    def claim(_: int) -> bool:
        start.wait(60)
        try:
            tokens.claim(authority.trust_dir / "tokens", token.secret, "n1", time.time())
        except TokenRefused:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(claim, range(8))).count(True) == 1


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("n1", ("n1", 7443)),
        ("n1.example:80", ("n1.example", 80)),
        ("10.0.0.1", ("10.0.0.1", 7443)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("fe80::1", ("fe80::1", 7443)),
        ("[fe80::1]", ("fe80::1", 7443)),
        ("[fe80::1]:9", ("fe80::1", 9)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert _split(address) == expected


@pytest.mark.parametrize("address", ["n1:", "n1:99999", "n 1", "https://n1", "n1/x", "[fe80::1", "ü", ":5"])
def test_no_addresses(address: str) -> None:
    with pytest.raises(TrustError, match="no HOST"):
        _split(address)


# --------------------------------------------------------------------------------------------------
# Acts


def act_on(target: str) -> Act:
    return Act(what="grant", target=target, who="ann@here", t_unix_s=NOW, reason="x", serials=["1f"])


def test_acts_are_told_in_their_order_and_torn_ones_left_out(tmp_path: Path) -> None:
    assert list(read_acts(tmp_path)) == []
    note(tmp_path, act_on("viewer/bob"))
    path = tmp_path / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with path.open("a") as file:
        file.write('{"what":"freeze","target":"t","who":"w","t_unix_s":1}\n{"what":"gra')
    assert list(read_acts(tmp_path)) == [(0, act_on("viewer/bob"))], "what is no act of trust is left out"
    note(tmp_path, act_on("viewer/eve"))
    assert list(read_acts(tmp_path)) == [(0, act_on("viewer/bob")), (3, act_on("viewer/eve"))]


def test_many_acts_at_once_all_get_a_line(tmp_path: Path) -> None:
    targets = [f"viewer/v{i}" for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda target: note(tmp_path, act_on(target)), targets))
    assert sorted(act.target for _, act in read_acts(tmp_path)) == sorted(targets)


def test_an_act_that_cannot_be_told_is_said_to_be_done(tmp_path: Path) -> None:
    with pytest.raises(TrustError, match="was done, but"):
        note(tmp_path / "nowhere", act_on("viewer/bob"))


# --------------------------------------------------------------------------------------------------
# Warnings, renewal of the operator


def test_warnings_come_14_days_ahead(authority: Authority) -> None:
    folder, end = authority.trust_dir, identity.own_identity(authority.trust_dir).not_after_unix_s
    assert trust.expiry_warnings(folder, end - 14.1 * DAY_S) == []
    assert trust.expiry_warnings(folder, end - 13.5 * DAY_S) == [
        f"{folder / 'operator.crt'} expires in 13.5 days"
    ]
    assert trust.expiry_warnings(folder, end + 2 * DAY_S) == [
        f"{folder / 'operator.crt'} has expired 2.0 days ago"
    ]
    begin = identity.own_identity(folder).not_before_unix_s
    assert f"{folder / 'operator.crt'} begins to be valid in 2.0 days: is the clock right here?" in (
        trust.expiry_warnings(folder, begin - 2 * DAY_S)
    )
    lines = trust.expiry_warnings(folder, end + 50 * DAY_S)
    assert [Path(line.split()[0]).name for line in lines] == ["issuer.crt", "operator.crt"]


def test_a_key_that_others_can_read_is_noticed(authority: Authority) -> None:
    assert trust.permission_warnings(authority.trust_dir) == []
    key = authority.trust_dir / "issuer.key"
    key.chmod(0o640)
    (line,) = trust.permission_warnings(authority.trust_dir)
    assert "issuer.key has mode 0640" in line
    key.chmod(stat.S_IRUSR)
    assert trust.permission_warnings(authority.trust_dir) == []


def test_the_controller_renews_its_own_certificate(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert authority.tend() == []
    first = identity.own_identity(authority.trust_dir)
    later = time.time() + 21 * DAY_S
    monkeypatch.setattr(time, "time", lambda: later)
    (line,) = authority.tend()
    assert first.serial[:16] in line
    second = identity.own_identity(authority.trust_dir)
    assert (second.role, second.name) == (first.role, first.name)
    assert abs(second.not_after_unix_s - later - 30 * DAY_S) < 60
    assert authority.tend() == []
    identity.client_context(authority.trust_dir)


def test_an_expired_issuer_signs_nothing(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + 91 * DAY_S
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(TrustError, match="issuer has expired: renew it with the root key"):
        chain_of(authority)


def test_clocks_and_versions() -> None:
    assert trust.skew_warning(100.0, 101.9) is None
    assert "3.0 s ahead of" in str(trust.skew_warning(100.0, 103.0))
    assert "3.0 s behind" in str(trust.skew_warning(103.0, 100.0))
    assert "certificates may be refused" in str(trust.skew_warning(0.0, 301.0))
    assert trust.version_warnings("0.1", {"a": "0.1", "b": "0.2"}) == [
        "node b runs gridagent 0.2, this gridctl is 0.1: bring them to one version"
    ]
    assert trust.attestation_state("n1") == "not_attested"
