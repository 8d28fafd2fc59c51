"""What people did with the fleet's trust, one line an act: `trust/acts.jsonl`.

The commands that make, give and take certificates work without a controller, and the journal has one
writer: the controller, which takes these lines over (`gridctl.control.trustee`). Nothing secret is in them.
"""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from gridctl.trust.errors import TrustError

FILE = "acts.jsonl"

What = Literal["init", "renew-issuer", "enroll", "grant", "revoke"]


class Act(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One act. `serials`: of the certificates that it gave or took, in hexadecimal."""

    what: What
    target: str  #: a fleet, a node, operator/NAME, viewer/NAME or a serial
    who: str
    t_unix_s: float
    reason: str = ""
    serials: list[str] = []


def note(trust_dir: Path, act: Act) -> None:
    """Adds a line and flushes it to the disk. Raises `TrustError`; the act itself was done."""
    line = msgspec.json.encode(act) + b"\n"
    try:
        fd = os.open(trust_dir / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                line = b"\n" + line  # what a full disk tore stays torn alone
            if os.write(fd, line) != len(line):
                raise OSError("the disk is full")
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        text = f"{act.what} of {act.target} was done, but {trust_dir / FILE} cannot tell of it: {error}"
        raise TrustError(text) from None


def read_acts(trust_dir: Path) -> Iterator[tuple[int, Act]]:
    """Every act with its line's number. A line that is torn or not understood is left out."""
    try:
        lines = (trust_dir / FILE).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    for number, line in enumerate(lines):
        try:
            yield number, msgspec.json.decode(line, type=Act)
        except msgspec.MsgspecError:
            continue
