"""A simulated recording as files: the recording itself and its truth beside it."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from gridagent.wire import StreamRecord
from gridctl.model.truth import Truth
from gridctl.ports.recording import truth_path


def write(path: Path, header: dict[str, Any], records: Iterable[StreamRecord], truth: Truth) -> int:
    """Writes both, line by line; returns how many records. The same bytes for the same input."""
    encode = msgspec.json.Encoder().encode
    count = 0
    with path.open("wb") as raw:
        packed = path.suffix == ".gz"
        out = cast(BinaryIO, gzip.GzipFile("", "wb", 6, raw, mtime=0)) if packed else raw
        out.write(encode(header) + b"\n")
        for record in records:
            line = {"t": record.t_unix_s, "node": record.node, "kind": record.kind, **record.v}
            out.write(encode(line) + b"\n")
            count += 1
        if packed:
            out.close()
    truth_path(path).write_bytes(msgspec.json.format(encode(truth), indent=1) + b"\n")
    return count
