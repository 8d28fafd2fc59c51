"""Lines of a stream of bytes. Only a newline ends one: JSON may hold other characters that end lines."""


class Lines:
    """Puts lines together out of chunks."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that this chunk completes, without their newline."""
        *whole, rest = chunk.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._rest, whole[0]])
            self._rest = []
        self._rest.append(rest)
        return whole
