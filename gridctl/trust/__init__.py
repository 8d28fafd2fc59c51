"""The fleet's private CA: who may do what is decided by certificates that it signs."""

from gridagent.identity import (
    IdentityError,
    client_context,
    expiry_warnings,
    own_identity,
    peer_of,
    permission_warnings,
)
from gridctl.trust.acts import Act, acts
from gridctl.trust.authority import Authority
from gridctl.trust.errors import KeyringIsLocked, KeyringUnavailable, TokenRefused, TrustError
from gridctl.trust.health import attestation_state, skew_warning, version_warnings
from gridctl.trust.join_server import serve_join

__all__ = [
    "Act",
    "Authority",
    "IdentityError",
    "KeyringIsLocked",
    "KeyringUnavailable",
    "TokenRefused",
    "TrustError",
    "acts",
    "attestation_state",
    "client_context",
    "expiry_warnings",
    "own_identity",
    "peer_of",
    "permission_warnings",
    "serve_join",
    "skew_warning",
    "version_warnings",
]
