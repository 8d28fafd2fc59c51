"""The fleet's private CA: who may do what is decided by certificates that it signs."""

from gridagent.identity import (
    IdentityError,
    client_context,
    expiry_warnings,
    own_identity,
    peer_of,
    permission_warnings,
)
from gridctl.trust.acts import read_acts
from gridctl.trust.authority import Authority
from gridctl.trust.errors import (
    KeyringIsLocked,
    KeyringUnavailable,
    NotIssued,
    NotUsable,
    TokenRefused,
    TrustError,
)
from gridctl.trust.health import attestation_state, skew_warning, version_warnings
from gridctl.trust.join_server import serve_join

__all__ = [
    "Authority",
    "IdentityError",
    "KeyringIsLocked",
    "KeyringUnavailable",
    "NotIssued",
    "NotUsable",
    "TokenRefused",
    "TrustError",
    "attestation_state",
    "client_context",
    "expiry_warnings",
    "own_identity",
    "peer_of",
    "permission_warnings",
    "read_acts",
    "serve_join",
    "skew_warning",
    "version_warnings",
]
