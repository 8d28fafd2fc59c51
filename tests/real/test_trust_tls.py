"""Mutual TLS between real sockets: who is let in, who is not, revocation and renewal while serving."""

import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from trust_parties import HOST, NodeServer, ask, connected, forge, node_server

from gridagent import identity
from gridagent.identity import IdentityError
from gridctl.trust import Authority, certificates, client_context

# TLS 1.3: a client learns of the server's refusal when it first reads, hence also connection errors.
REFUSED = (ssl.SSLError, ConnectionError)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.ephemeral(tmp_path / "op" / "trust", "lab")


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[NodeServer]:
    authority.write_identity(tmp_path / "n1", "node", "n1", [HOST])
    with node_server(tmp_path / "n1") as server:
        yield server


def test_both_sides_know_each_other_over_tls_1_3(
    server: NodeServer, authority: Authority, tmp_path: Path
) -> None:
    authority.write_identity(tmp_path / "n2", "node", "n2", [HOST])
    authority.write_identity(tmp_path / "viewer", "viewer", "wallboard", days=90)
    for folder, expected in ((authority.trust_dir, "operator"), (tmp_path / "n2", "node/n2")):
        with connected(client_context(folder), server.port) as connection:
            assert isinstance(connection.sock, ssl.SSLSocket)
            assert connection.sock.version() == "TLSv1.3"
            peer = identity.peer_of(connection.sock, folder, node="n1")
            assert (peer.fleet, peer.role, peer.name, peer.addresses) == ("lab", "node", "n1", (HOST,))
            status, who = ask(connection)
            assert (status, expected in who) == (200, True)
    with connected(client_context(tmp_path / "viewer"), server.port) as connection:
        assert ask(connection) == (200, "lab/viewer/wallboard")


def test_another_node_than_expected_is_noticed(server: NodeServer, authority: Authority) -> None:
    with (
        connected(client_context(authority.trust_dir), server.port) as connection,
        pytest.raises(IdentityError, match="expected node n7, but node n1 of fleet lab"),
    ):
        identity.peer_of(connection.sock, authority.trust_dir, node="n7")


def test_a_server_at_another_address_is_refused(server: NodeServer, authority: Authority) -> None:
    with (
        pytest.raises(ssl.SSLCertVerificationError, match="localhost"),
        connected(client_context(authority.trust_dir), server.port, "localhost"),
    ):
        pass


def test_another_root_is_refused_by_both_sides(server: NodeServer, tmp_path: Path) -> None:
    foreign = Authority.ephemeral(tmp_path / "foreign" / "trust", "lab")  # the same name does not help
    with (
        pytest.raises(ssl.SSLCertVerificationError),
        connected(client_context(foreign.trust_dir), server.port),
    ):
        pass
    context = client_context(foreign.trust_dir)
    context.load_verify_locations(server.trust_dir / "ca.crt")  # a client that trusts everybody
    with pytest.raises(REFUSED), connected(context, server.port) as connection:
        ask(connection)


def test_without_certificate_or_with_tls_1_2_nobody_gets_in(server: NodeServer, authority: Authority) -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(server.trust_dir / "ca.crt")
    with pytest.raises(REFUSED), connected(bare, server.port) as connection:
        ask(connection)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_verify_locations(server.trust_dir / "ca.crt")
    old.load_cert_chain(authority.trust_dir / "operator.crt", authority.trust_dir / "operator.key")
    with pytest.raises(REFUSED), connected(old, server.port):
        pass


def test_an_expired_certificate_is_refused(server: NodeServer, authority: Authority, tmp_path: Path) -> None:
    forge(tmp_path / "old", authority, "gridctl://lab/operator/ann", days=1, made_days_ago=2)
    with pytest.raises(REFUSED), connected(client_context(tmp_path / "old"), server.port) as connection:
        ask(connection)
    # The one of an open connection may end later: it is asked on every request.
    with (
        connected(client_context(authority.trust_dir), server.port) as connection,
        pytest.raises(IdentityError, match="has expired"),
    ):
        identity.peer_of(connection.sock, authority.trust_dir, now_unix_s=time.time() + 31 * 86400)


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("gridctl://other/operator/ann", "is of another fleet than this party"),
        ("gridctl://lab/admin/ann", "names no party of a fleet"),
        ("gridctl://lab/operator/ann/x", "names no party of a fleet"),
        ("https://lab/operator/ann", "names no party of a fleet"),
    ],
)
def test_a_wrong_fleet_or_role_is_refused(
    server: NodeServer, authority: Authority, tmp_path: Path, uri: str, why: str
) -> None:
    forge(tmp_path / "odd", authority, uri)
    with connected(client_context(tmp_path / "odd"), server.port) as connection:
        status, said = ask(connection)
    assert status == 403
    assert why in said


def test_an_operators_certificate_cannot_serve(authority: Authority, tmp_path: Path) -> None:
    forge(tmp_path / "fake", authority, "gridctl://lab/node/n1", file_name="node", addresses=[HOST])
    with (
        node_server(tmp_path / "fake") as server,
        pytest.raises(ssl.SSLCertVerificationError, match="purpose"),
        connected(client_context(authority.trust_dir), server.port),
    ):
        pass


def test_a_node_cannot_issue(server: NodeServer, authority: Authority, tmp_path: Path) -> None:
    chain = x509.load_pem_x509_certificates((server.trust_dir / "node.crt").read_bytes())
    node_key = certificates.new_key()
    authority.write_identity(tmp_path / "n2", "node", "n2", [HOST])
    leaf = certificates.leaf_certificate(
        chain[0],
        node_key,
        node_key.public_key(),
        "gridctl://lab/operator/ann",
        [],
        certificates.usages_of("operator"),
        time.time(),
        7,
    )
    (tmp_path / "n2" / "node.crt").write_bytes(b"".join(map(certificates.pem, [leaf, *chain])))
    (tmp_path / "n2" / "node.key").write_bytes(certificates.key_pem(node_key))
    with pytest.raises(REFUSED), connected(client_context(tmp_path / "n2"), server.port) as connection:
        ask(connection)


def test_a_revoked_party_is_refused_on_the_next_request_of_an_open_connection(
    server: NodeServer, authority: Authority, tmp_path: Path
) -> None:
    authority.write_identity(tmp_path / "ann", "operator", "ann")
    with (
        connected(client_context(tmp_path / "ann"), server.port) as anns,
        connected(client_context(authority.trust_dir), server.port) as controllers,
    ):
        assert ask(anns) == (200, "lab/operator/ann")
        address = anns.sock.getsockname()
        old_list = authority.crl_pem()
        assert len(authority.revoke("operator/ann", "keyCompromise")) == 1
        assert authority.revoke("operator/ann") == []
        assert ask(controllers, "/v1/crl", "PUT", authority.crl_pem()) == (200, "True")
        assert ask(controllers, "/v1/crl", "PUT", authority.crl_pem()) == (200, "False")
        status, said = ask(anns)
        assert status == 403
        assert "of operator ann of fleet lab" in said
        assert "is revoked" in said
        assert anns.sock.getsockname() == address, "it was the same connection"
        status, said = ask(anns, "/v1/crl", "PUT", old_list)  # the revoked one cannot undo it
        assert status == 403
        status, said = ask(controllers, "/v1/crl", "PUT", old_list)
        assert (status, "older" in said) == (403, True)
    with connected(client_context(tmp_path / "ann"), server.port) as connection:
        assert ask(connection)[0] == 403
    # A client refuses a revoked server in the same way.
    authority.revoke("n1")
    with (
        connected(client_context(authority.trust_dir), server.port) as connection,
        pytest.raises(IdentityError, match=r"of node n1 of fleet lab .* is revoked"),
    ):
        identity.peer_of(connection.sock, authority.trust_dir)


def test_openssl_reads_the_lists_in_the_same_way(server: NodeServer, authority: Authority) -> None:
    """A second reader of `crl.pem`: OpenSSL's own check of the whole chain against it."""

    def context() -> ssl.SSLContext:
        checking = client_context(authority.trust_dir)
        checking.load_verify_locations(authority.trust_dir / "crl.pem")
        checking.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
        return checking

    with connected(context(), server.port) as connection:
        assert ask(connection)[0] == 200
    authority.revoke("n1", "cessationOfOperation")
    with (
        pytest.raises(ssl.SSLCertVerificationError, match="certificate revoked"),
        connected(context(), server.port),
    ):
        pass


def test_renewal_changes_the_certificate_under_a_running_server(
    server: NodeServer, authority: Authority
) -> None:
    context = client_context(authority.trust_dir)
    with connected(context, server.port) as before:
        first = identity.peer_of(before.sock, authority.trust_dir)
        authority.write_identity(server.trust_dir, "node", "n1", [HOST])
        server.reload()
        assert ask(before)[0] == 200, "an open connection goes on"
        with connected(context, server.port) as after:
            second = identity.peer_of(after.sock, authority.trust_dir, node="n1")
            assert second.serial != first.serial
            assert ask(after)[0] == 200


def test_a_renewed_issuer_is_accepted_and_a_stolen_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keyring.backends import fail

    monkeypatch.setattr("keyring.get_keyring", fail.Keyring)  # this machine's own keyring is left alone
    passphrase = "correct horse battery"
    authority = Authority.init(tmp_path / "op" / "trust", "lab", ask=lambda _: passphrase, say=lambda _: None)
    authority.write_identity(tmp_path / "n1", "node", "n1", [HOST])
    authority.write_identity(tmp_path / "ann", "operator", "ann")
    with node_server(tmp_path / "n1") as server:
        authority.revoke("operator/ann")
        authority.renew_issuer(lambda _: passphrase)
        with connected(client_context(authority.trust_dir), server.port) as connection:
            assert ask(connection)[0] == 200  # signed by the new issuer, the node's by the old one
            assert identity.peer_of(connection.sock, authority.trust_dir, node="n1")
            assert ask(connection, "/v1/crl", "PUT", authority.crl_pem()) == (200, "True")
        with connected(client_context(tmp_path / "ann"), server.port) as connection:
            assert ask(connection)[0] == 403, "what the old issuer revoked stays revoked"
        authority.write_identity(tmp_path / "bob", "operator", "bob")
        stolen_list = authority.crl_pem()
        authority.renew_issuer(lambda _: passphrase, compromised=True)
        assert identity.install_crl(server.trust_dir, authority.crl_pem())
        with connected(client_context(tmp_path / "bob"), server.port) as connection:
            status, said = ask(connection)
            assert (status, "is revoked" in said) == (403, True)
        with connected(client_context(authority.trust_dir), server.port) as connection:
            assert ask(connection)[0] == 200
        with pytest.raises(IdentityError, match="older"):
            identity.install_crl(server.trust_dir, stolen_list)
