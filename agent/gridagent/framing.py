"""Messages as bytes on the node's Unix socket: 4 bytes length, big endian, then msgpack."""

from typing import Any

import msgspec

from gridagent.wire import WIRE_VERSION, FromSession, Message, ToSession

#: A frame may not be larger: state never travels there.
FRAME_BYTES_MAX = 16 << 20

_encode = msgspec.msgpack.Encoder().encode
_decode_from_session = msgspec.msgpack.Decoder(FromSession).decode
_decode_to_session = msgspec.msgpack.Decoder(ToSession).decode


class WireError(Exception):
    """The peer sent something that is no message of this version. Close the connection."""


def frame(message: Message) -> bytes:
    """Encodes one message for the Unix socket: 4 bytes length, big endian, then msgpack."""
    body = _encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes exceeds the frame limit")
    return len(body).to_bytes(4, "big") + body


class Unframer:
    """Collects bytes from a stream and gives back whole messages."""

    def __init__(self, *, at_agent: bool) -> None:
        self._decode: Any = _decode_from_session if at_agent else _decode_to_session
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Messages completed by `data`. Raises `WireError` on garbage or an oversized frame."""
        self._buffer += data
        messages: list[Any] = []
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > FRAME_BYTES_MAX:
                raise WireError(f"a frame of {size} bytes exceeds {FRAME_BYTES_MAX}")
            if len(self._buffer) < 4 + size:
                break
            body = bytes(self._buffer[4 : 4 + size])
            del self._buffer[: 4 + size]
            try:
                messages.append(self._decode(body))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise WireError(f"not a message of wire version {WIRE_VERSION}: {error}") from None
        return messages
