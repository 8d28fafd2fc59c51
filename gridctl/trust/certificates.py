"""Builds certificates and revocation lists. Pure: keys and times come in, signed objects go out.

All keys are ECDSA on P-256. TLS 1.3 makes `ecdsa_secp256r1_sha256` mandatory (RFC 8446, 9.1), so
every peer speaks it; it is the curve that FIPS builds of OpenSSL and TPM 2.0 chips offer, which
Ed25519 often is not, and one signature costs tens of microseconds.
"""

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

ROOT_DAYS = 3650
ISSUER_DAYS = 90
LEAF_DAYS = 30.0
SERVER_ONLY = (ExtendedKeyUsageOID.SERVER_AUTH,)
#: A machine whose clock is behind by less than this still accepts a new certificate.
BACKDATE_S = 300.0

_UNUSED = dict.fromkeys(
    ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
) | {"decipher_only": False}


def new_key() -> Key:
    """A fresh private key on P-256."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    """PKCS#8, not encrypted: for files of mode 0600 and for the keyring."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem(thing: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    """The text form that files and the wire carry."""
    return thing.public_bytes(serialization.Encoding.PEM)


def root_certificate(fleet: str, key: Key, now_unix_s: float) -> x509.Certificate:
    """The fleet's root: ten years, may sign one level of issuers."""
    name = x509.Name([_org(fleet), x509.NameAttribute(NameOID.COMMON_NAME, "gridctl root")])
    return _authority(
        name, name, x509.random_serial_number(), key.public_key(), key, now_unix_s, ROOT_DAYS, 1
    )


def issuer_certificate(
    root: x509.Certificate, root_key: Key, public_key: PublicKey, now_unix_s: float
) -> x509.Certificate:
    """An issuer: 90 days, may sign leaves only. Its subject bears its serial (see `identity.read_peer`)."""
    serial = x509.random_serial_number()
    name = x509.Name(
        [
            *root.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME),
            x509.NameAttribute(NameOID.COMMON_NAME, "gridctl issuer"),
            x509.NameAttribute(NameOID.SERIAL_NUMBER, f"{serial:x}"),
        ]
    )
    return _authority(name, root.subject, serial, public_key, root_key, now_unix_s, ISSUER_DAYS, 0)


def leaf_certificate(
    issuer: x509.Certificate,
    issuer_key: Key,
    public_key: PublicKey,
    uri: str,
    addresses: Sequence[str],
    usages: Sequence[x509.ObjectIdentifier],
    now_unix_s: float,
    days: float,
) -> x509.Certificate:
    """A party's certificate: one identity URI, the addresses where it serves, client and/or server use.

    It ends with its issuer at the latest.
    """
    common_name = x509.NameAttribute(NameOID.COMMON_NAME, uri.rpartition("/")[2])
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
    names += [_address(address) for address in addresses]
    start = _time(now_unix_s - BACKDATE_S)
    end = min(_time(now_unix_s + days * 86400.0), issuer.not_valid_after_utc)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([common_name]))
        .issuer_name(issuer.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **_UNUSED),
            critical=True,
        )
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(_signed_by(issuer_key), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def usages_of(role: str) -> list[x509.ObjectIdentifier]:
    """Nodes serve and call each other; people only call."""
    client = [ExtendedKeyUsageOID.CLIENT_AUTH]
    return [ExtendedKeyUsageOID.SERVER_AUTH, *client] if role == "node" else client


def revocation_list(
    signer: x509.Certificate,
    key: Key,
    number: int,
    revoked: Sequence[x509.RevokedCertificate],
    now_unix_s: float,
) -> x509.CertificateRevocationList:
    """A list that stays usable as long as its signer; a higher `number` replaces it earlier."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(signer.subject)
        .last_update(_time(now_unix_s - BACKDATE_S))
        .next_update(max(signer.not_valid_after_utc, _time(now_unix_s)))
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(_signed_by(key), critical=False)
    )
    for entry in revoked:
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(key, hashes.SHA256())


def revocation(serial: int, reason: x509.ReasonFlags, now_unix_s: float) -> x509.RevokedCertificate:
    """One line of a list."""
    builder = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(_time(now_unix_s))
    if reason is not x509.ReasonFlags.unspecified:  # RFC 5280, 5.3.1: left out then
        builder = builder.add_extension(x509.CRLReason(reason), critical=False)
    return builder.build()


def _authority(
    subject: x509.Name,
    issuer: x509.Name,
    serial: int,
    public_key: PublicKey,
    signer: Key,
    now_unix_s: float,
    days: int,
    path_length: int,
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(serial)
        .not_valid_before(_time(now_unix_s - BACKDATE_S))
        .not_valid_after(_time(now_unix_s + days * 86400.0))
        .add_extension(x509.BasicConstraints(ca=True, path_length=path_length), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **_UNUSED),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(_signed_by(signer), critical=False)
        .sign(signer, hashes.SHA256())
    )


def _signed_by(key: Key) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _address(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _org(fleet: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(NameOID.ORGANIZATION_NAME, fleet)


def _time(unix_s: float) -> datetime:
    return datetime.fromtimestamp(unix_s, UTC).replace(microsecond=0)
