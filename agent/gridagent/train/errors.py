"""What a hand-over says when it cannot be."""


class HandoverError(Exception):
    """A hand-over cannot be prepared or has ended; nothing changed unless the text says so."""


class SessionError(RuntimeError):
    """The session was used in a way that cannot work; the message says what to change."""
