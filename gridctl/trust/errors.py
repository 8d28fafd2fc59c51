"""What can go wrong with the fleet's trust, said so that an operator knows what to do."""


class TrustError(Exception):
    """Base of all errors of this room."""


class KeyringUnavailable(TrustError):
    """No keyring that may hold a root key can be used here (none runs, or it stores plain text)."""


class KeyringIsLocked(TrustError):
    """The keyring holds (or could hold) the root key but is locked."""


class NotUsable(TrustError):
    """A name, an address, a time or a reason that somebody gave cannot be used."""


class NotIssued(TrustError):
    """Nothing was ever issued to that party."""


class TokenRefused(TrustError):
    """An enrolment token is unknown, expired, used, or for another node."""
