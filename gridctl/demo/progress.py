"""A bar on a terminal, lines elsewhere; both on stderr."""

import contextlib
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

WIDTH = 24


class Progress:
    """How far the demo is, in percent."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._started_s = time.monotonic()
        self._last = ""
        self._percent = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()

    def at(self, percent: int, what: str) -> None:
        """Shows `what` happens now. Never goes back."""
        self._percent = max(self._percent, percent)
        elapsed_s = time.monotonic() - self._started_s
        if self._terminal:
            filled = self._percent * WIDTH // 100
            line = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {elapsed_s:3.0f} s  {what}"
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
            self._stream.write(f"\r\x1b[K{line[: columns - 1]}")  # a wrapped line could not be drawn over
        elif what != self._last:
            self._stream.write(f"demo: {elapsed_s:3.0f} s  {what}\n")
        self._last = what
        self._stream.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The terminal belongs to a question meanwhile."""
        self._clear()
        yield

    def _clear(self) -> None:
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
