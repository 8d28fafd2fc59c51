"""Opens what `gridctl diagnose` is given: small inputs are held, large ones read anew whenever asked for.

Of all inputs together at most `HELD_BYTES` are held. What cannot be read a second time (a pipe) and is larger
lies in a temporary file without a name meanwhile.
"""

import codecs
import io
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from gridctl.errors import ConfigError
from gridctl.model.diagnosis import WHOLE_CHARS_MAX, Material

HELD_BYTES = 32 << 20
_BLOCK_BYTES = 256 << 10


@contextmanager
def materials(paths: Iterable[Path]) -> Iterator[list[Material]]:
    """The materials of files; "-" is standard input. They can be read until the context ends.

    Raises `OSError` where a file cannot be read, `ConfigError` where there is no room for a large pipe.
    A file that grows meanwhile is read as far as it went at first.
    """
    with ExitStack() as closing:
        shelf = _Shelf(closing)
        yield [shelf.take(path) for path in paths]


class _Shelf:
    def __init__(self, closing: ExitStack) -> None:
        self._closing = closing
        self._room_bytes = HELD_BYTES

    def take(self, path: Path) -> Material:
        if str(path) == "-":
            return self._take(str(path), sys.stdin.buffer, None)
        with path.open("rb") as file:
            return self._take(str(path), file, path)

    def _take(self, name: str, file: BinaryIO, path: Path | None) -> Material:
        again = _is_regular(file)
        begin = file.tell() if again else 0
        first = file.read(self._room_bytes + 1)
        if len(first) <= self._room_bytes:
            self._room_bytes -= len(first)
            return Material(name, first.decode("utf-8-sig", errors="replace"))
        if not again:
            file = self._copied(name, first, file)
            return Material(name, _pieces_of(file, 0, file.tell()))
        end = os.fstat(file.fileno()).st_size
        return Material(name, _pieces_of_file(path, end) if path else _pieces_of(file, begin, end))

    def _copied(self, name: str, first: bytes, file: BinaryIO) -> BinaryIO:
        try:
            copy = tempfile.TemporaryFile(prefix="gridctl-diagnose-")  # noqa: SIM115
            self._closing.callback(copy.close)
            copy.write(first)
            while block := file.read(_BLOCK_BYTES):
                copy.write(block)
            copy.flush()
        except OSError as error:
            raise ConfigError(
                f"{name} is a pipe of more than {HELD_BYTES >> 20} MiB, and {tempfile.gettempdir()} cannot "
                f"take it ({error.strerror}): name a folder with room in TMPDIR, or save it and give the file"
            ) from None
        return cast(BinaryIO, copy)


def _is_regular(file: BinaryIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except io.UnsupportedOperation:  # no file at all
        return False


def _pieces_of_file(path: Path, size_bytes: int) -> Callable[[], Iterator[str]]:
    """Opened for each look: thousands of logs may be given, and a process may have a thousand files open."""

    def pieces() -> Iterator[str]:
        with path.open("rb") as file:
            yield from _pieces_of(file, 0, size_bytes)()

    return pieces


def _pieces_of(file: BinaryIO, begin: int, end: int) -> Callable[[], Iterator[str]]:
    """By place, for several looks may be under way at a time."""

    def blocks() -> Iterator[bytes]:
        for at in range(begin, end, _BLOCK_BYTES):
            yield os.pread(file.fileno(), min(_BLOCK_BYTES, end - at), at)

    return lambda: whole_lines(blocks())


def whole_lines(blocks: Iterable[bytes]) -> Iterator[str]:
    """UTF-8 in pieces that end with a line; of a line longer than `WHOLE_CHARS_MAX` the rest is left out."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    held: list[str] = []
    held_chars = 0
    for block in _decoded(decoder, blocks):
        cut = block.rfind("\n") + 1
        if cut:
            yield "".join([*held, block[:cut]])
            held, held_chars = [], 0
        if cut < len(block) and held_chars <= WHOLE_CHARS_MAX:
            held.append(block[cut:])
            held_chars += len(block) - cut
    if held:
        yield "".join(held)


def _decoded(decoder: codecs.IncrementalDecoder, blocks: Iterable[bytes]) -> Iterator[str]:
    for block in blocks:
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)
