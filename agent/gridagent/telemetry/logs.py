"""What the sources of logs have in common: how far they came is kept in the agent's home, so that a restart
neither tells a line twice nor leaves one out."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from gridagent.telemetry import Reading
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import Tree, note

#: What is longer is cut; the kernel cuts its own lines at about 1 kB.
LINE_BYTES_MAX = 8192

P = TypeVar("P", bound=msgspec.Struct)


class LogProbe(Probe):
    """Reads a log on from where the last agent stopped. `cursor` is the file that says where that was."""

    KEEPS_PLACE = True
    INTERVAL_S = 0.2
    INTERVAL_MIN_S = 0.05

    def __init__(self, tree: Tree, cursor: Path, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(tree, clock)
        self._cursor = cursor
        self._taken: msgspec.Struct | None = None
        self._kept: msgspec.Struct | None = None
        self._refused = ""

    def position(self) -> msgspec.Struct | None:
        """How far the last read came."""
        raise NotImplementedError

    def taken(self) -> list[Reading]:
        self._taken = self.position()
        return self.keep()

    def close(self) -> None:
        self.keep()

    def keep(self) -> list[Reading]:
        """Writes down how far the spool has the log. A disk that refuses is told once, and costs no line."""
        if self._taken is None or self._taken == self._kept:
            return []
        part = self._cursor.with_suffix(".part")
        try:
            self._cursor.parent.mkdir(mode=0o700, exist_ok=True)
            part.write_bytes(msgspec.json.encode(self._taken))
            os.replace(part, self._cursor)  # not flushed: after a crash of the machine lines may come twice
            self._kept = self._taken
        except OSError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                what = f"{self._cursor} cannot be written: {error.strerror}"
                return [note(self.tree.source, "no-cursor", f"{what}; after a restart lines may come twice")]
        return []

    def kept(self, kind: type[P]) -> P | None:
        """What an earlier agent wrote down, None if there is nothing that can be read."""
        try:
            return msgspec.json.decode(self._cursor.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError):
            return None
