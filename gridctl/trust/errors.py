"""What can go wrong with the fleet's trust, said so that an operator knows what to do."""


class TrustError(Exception):
    """Base of all errors of this room."""


class KeyringUnavailable(TrustError):
    """No keyring that may hold a root key can be used here (none runs, or it stores plain text)."""


class KeyringIsLocked(TrustError):
    """The keyring holds (or could hold) the root key but is locked."""


class TokenRefused(TrustError):
    """An enrolment token is unknown, expired, used, or for another node."""
