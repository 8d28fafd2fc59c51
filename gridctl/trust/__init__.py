"""The fleet's private CA: who may do what is decided by certificates that it signs."""

from gridagent.identity import client_context, expiry_warnings, permission_warnings
from gridctl.trust.authority import Authority
from gridctl.trust.errors import KeyringIsLocked, KeyringUnavailable, TokenRefused, TrustError

__all__ = [
    "Authority",
    "KeyringIsLocked",
    "KeyringUnavailable",
    "TokenRefused",
    "TrustError",
    "client_context",
    "expiry_warnings",
    "permission_warnings",
]
