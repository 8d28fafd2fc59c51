"""Archives of evidence as files here: written a part at a time, kept only if they are what the node said.

What is in them is read again only if it is what the journal says.
"""

import contextlib
import hashlib
import os
import secrets
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from gridagent.wire import Evidence, StreamRecord

#: What a node may send, and what it may unpack to, whatever it says of itself.
BYTES_MAX = 1 << 30
_CHUNK_BYTES = 1 << 20


class NotAsTold(Exception):
    """What came is not what the node said it is."""


class ArchiveFile:
    """A file on its way. Raises `OSError` where it cannot be written, `NotAsTold`."""

    def __init__(self, path: Path, told: Evidence) -> None:
        if not 0 <= told.bytes <= BYTES_MAX:
            raise NotAsTold(f"an archive of {told.bytes} bytes is taken from nobody")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path, self._told = path, told
        self._part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # two may fetch it at once
        self._file: BinaryIO = os.fdopen(
            os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w+b"
        )
        self.size = 0

    def write(self, data: bytes) -> None:
        """Takes the next part."""
        self._file.write(data)
        self.size += len(data)
        if self.size > self._told.bytes:
            raise NotAsTold(f"more than the {self._told.bytes} bytes came that the node spoke of")

    def keep(self) -> None:
        """Checks every digest, and gives the file its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        digest = _digest(self._file)
        if (self.size, digest) != (self._told.bytes, self._told.sha256):
            raise NotAsTold(
                f"{self.size} bytes with digest {digest[:12]} came, the node spoke of {self._told.bytes} with"
                f" {self._told.sha256[:12]}"
            )
        self._file.seek(0)
        _check_items(self._file, self._told)
        self._file.close()
        self._part.rename(self._path)

    def drop(self) -> None:
        """Leaves nothing behind, unless it was kept."""
        with contextlib.suppress(OSError):  # a full disk does not take what was not written yet
            self._file.close()
        self._part.unlink(missing_ok=True)


def _check_items(file: BinaryIO, told: Evidence) -> None:
    wanted = {item.name: item for item in told.items if item.sha256}
    try:
        with tarfile.open(fileobj=file, mode="r:gz") as archive:
            for member in archive:
                item = wanted.pop(member.name, None)
                content = archive.extractfile(member) if item else None
                if item is None or content is None:
                    continue
                if member.size != item.bytes or _digest(content) != item.sha256:
                    raise NotAsTold(f"{item.name} in it is another than the node spoke of")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise NotAsTold(f"it is no archive: {error}") from None
    if wanted:
        raise NotAsTold(f"{', '.join(sorted(wanted))} is not in it")


def _digest(content: IO[bytes]) -> str:
    digest = hashlib.sha256()
    total = 0
    while chunk := content.read(_CHUNK_BYTES):
        total += len(chunk)
        if total > BYTES_MAX:
            raise NotAsTold(f"it unpacks to more than {BYTES_MAX} bytes")
        digest.update(chunk)
    return digest.hexdigest()


def spooled(path: Path, sha256: str) -> list[StreamRecord]:
    """What a node has told within the hour before an archive of it was taken, in order.

    Raises `OSError` where the file is not there, `NotAsTold` where it is another than the journal says.
    """
    with path.open("rb") as file:
        if (digest := _digest(file)) != sha256:
            raise NotAsTold(f"{path} has digest {digest[:12]}, the journal says {sha256[:12]}")
        file.seek(0)
        try:
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                found = [member for member in archive if member.name == "spool.jsonl"]
                content = archive.extractfile(found[0]) if found else None
                return [*_records(content)] if content else []
        except (tarfile.TarError, EOFError) as error:
            raise NotAsTold(f"{path} is no archive: {error}") from None


def _records(lines: IO[bytes]) -> Iterator[StreamRecord]:
    decode = msgspec.json.Decoder(StreamRecord).decode
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError):  # cut off where it was too much
            yield decode(line)
