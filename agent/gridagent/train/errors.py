"""What a hand-over says when it cannot be."""


class HandoverError(Exception):
    """A hand-over cannot be prepared or has ended; nothing changed unless the text says so."""
