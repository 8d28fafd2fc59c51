"""The chair's records of one hand-over: a small file whose space is taken before anything starts.

Decision and owner must be on disk before anybody is told. A disk that fills up in the middle of a
pause must not stand in the way, so the space is allocated when the hand-over is opened; a disk that
is full then refuses the hand-over.
"""

import json
import os
from pathlib import Path
from typing import Any

_SPACE_BYTES = 64 << 10


class RecordFile:
    """`FOLDER/HANDOVER.jsonl`: lines of JSON, then zeros up to its fixed size.

    Raises `OSError` that names the file, of which nothing is left then.
    """

    def __init__(self, folder: str | Path, handover: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"{handover}.jsonl"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._offset = 0
        try:
            os.posix_fallocate(self._fd, 0, _SPACE_BYTES)
            os.fsync(self._fd)
        except OSError as error:
            os.close(self._fd)
            path.unlink()
            error.filename = str(path)
            raise
        directory = os.open(folder, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record and flushes it to disk. Raises `OSError`."""
        line = json.dumps(record, sort_keys=True).encode() + b"\n"
        if self._offset + len(line) >= _SPACE_BYTES:
            raise OSError("a hand-over's records outgrew their file")
        os.pwrite(self._fd, line, self._offset)
        os.fdatasync(self._fd)
        self._offset += len(line)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
