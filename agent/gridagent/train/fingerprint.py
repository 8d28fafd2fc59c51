"""One digest of all that is a rank's own at the end of a step, in a file that outlives the process.

Whoever speaks for a dead rank puts its state together from a replica and a memory, and must not be believed:
the digest of what came out is compared with what the rank itself wrote down last. The file lies beside the
socket of the node's agent (`marks/SESSION`), which reads it once the process is gone. One write into the page
cache a step: it needs no agent that listens, and a killed process has written it.
"""

import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from torch import Tensor

from gridagent.train.packing import memory_of

_log = logging.getLogger("gridagent.train")
#: Of the values of registered objects only numpy's scalars are of a kind that msgspec does not know.
_encode = msgspec.msgpack.Encoder(enc_hook=lambda value: [value.dtype.str, value.tobytes()]).encode
#: A step, a blank and a SHA-256, with blanks to the end.
MARK_BYTES = 96


def fingerprint(layout: bytes, rng: bytes, buffers: Iterable[Tensor], objects: Iterable[object]) -> str:
    """Over tensors (by content), packed random states, and what registered objects hold, in their order."""
    digest = hashlib.sha256(layout)
    digest.update(rng)
    for buffer in buffers:
        digest.update(memory_of(buffer.detach().cpu().contiguous()))
    held = list(objects)
    try:
        digest.update(_encode(held))
    except OverflowError:  # an int of more than 64 bits
        digest.update(repr(held).encode())
    return digest.hexdigest()


class MarkFile:
    """Where this process writes its marks. What cannot be written is told once, and then missing."""

    def __init__(self, socket: str, session: str) -> None:
        self._path = Path(socket).parent / "marks" / session
        self._descriptor = -1
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            self._told(error)

    def write(self, step: int, digest: str) -> None:
        """The state at the start of `step`."""
        if self._descriptor < 0:
            return
        try:
            os.pwrite(self._descriptor, f"{step} {digest}\n".ljust(MARK_BYTES).encode(), 0)
        except OSError as error:
            self._told(error)

    def remove(self) -> None:
        """The rank has ended, or is somebody else's by now."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._path.unlink(missing_ok=True)

    def _told(self, error: OSError) -> None:
        _log.warning(
            "%s cannot be written (%s): if this rank dies, what takes its place cannot be compared with it",
            self._path,
            error,
        )
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
