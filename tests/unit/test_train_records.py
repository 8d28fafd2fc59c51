"""The chair's records: on disk one by one, readable after a crash at any byte."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.train.records import RecordFile

RECORDS: list[dict[str, Any]] = [{"kind": "commit", "epoch": 1}, {"kind": "run", "text": "ü\n\0"}]


def read_records(path: Path) -> list[dict[str, Any]]:
    """All whole records of a file."""
    data = path.read_bytes().split(b"\0", 1)[0]
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def test_what_was_appended_is_read(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "new", "ho-1")
    for record in RECORDS:
        file.append(record)
    assert read_records(tmp_path / "new" / "ho-1.jsonl") == RECORDS  # before it is closed
    file.close()
    file.close()


def test_an_id_is_used_once(tmp_path: Path) -> None:
    RecordFile(tmp_path, "ho-1").close()
    with pytest.raises(FileExistsError):
        RecordFile(tmp_path, "ho-1")


def test_a_full_disk_refuses_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        RecordFile(tmp_path, "ho-1")
    assert len(os.listdir("/proc/self/fd")) == before


def test_records_never_outgrow_their_space(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "ho-1")
    file.append({"found": "x" * 60000})
    with pytest.raises(OSError, match="outgrew"):
        file.append({"found": "x" * 6000})
    file.append({"fits": True})
    assert read_records(tmp_path / "ho-1.jsonl")[1:] == [{"fits": True}]
    file.close()


@given(st.integers(0, 200))
def test_a_torn_record_does_not_count(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("r")
    file = RecordFile(folder, "ho-1")
    for record in RECORDS:
        file.append(record)
    file.close()
    path = folder / "ho-1.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:cut] + bytes(len(data) - cut))
    whole = data[:cut].count(b"\n")
    assert read_records(path) == RECORDS[:whole]
