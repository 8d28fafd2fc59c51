"""The journal against a real kill -9 and a real full disk."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gridagent.journal import Journal, JournalFull, read, verify

WRITER = """
import sys
from gridagent.journal import Journal
log = Journal(sys.argv[1], segment_bytes=200_000)
print(f"opened {log.last_seq}", flush=True)
n = 0
while True:
    n += 1
    record = log.append("step", "writer", {"n": n, "filler": "x" * (n * 7919 % 60_000)})
    print(record.seq, record.hash, flush=True)
"""


def test_kill_9_loses_nothing_acknowledged(tmp_path: Path) -> None:
    chance = random.Random(7)
    acknowledged: dict[int, str] = {}
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("opened")
            for _ in range(chance.randrange(1, 40)):
                seq, digest = process.stdout.readline().split()
                acknowledged[int(seq)] = digest
            process.send_signal(signal.SIGKILL)
            for line in process.stdout:  # acknowledged between the last look and the kill
                if line.endswith("\n"):
                    seq, digest = line.split()
                    acknowledged[int(seq)] = digest
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        stored = {record.seq: record.hash for record in read(tmp_path)}
        assert acknowledged.items() <= stored.items()
        assert verify(tmp_path).ok
    with Journal(tmp_path) as log:
        assert log.last_seq >= max(acknowledged)


def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        with pytest.raises(Exception, match=f"written by process {process.pid}"):
            Journal(tmp_path)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    target = tmp_path / "disk"
    target.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(target)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield target
    subprocess.run(["umount", str(target)], check=True)


def append_until_full(log: Journal) -> int:
    for written in range(1000):
        try:
            log.append("step", "x", {"filler": "y" * 3000})
        except JournalFull as error:
            assert "no space left" in str(error)  # noqa: PT017
            return written
    return 1000


@pytest.mark.parametrize("segment_bytes", [20_000, 1 << 20])
def test_a_full_disk_is_told_and_outlived(small_disk: Path, segment_bytes: int) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 100_000)
    folder = small_disk / "journal"
    log = Journal(folder, segment_bytes=segment_bytes)
    written = append_until_full(log)
    assert 10 < written < 1000
    with pytest.raises(JournalFull):
        log.append("step", "x", {"filler": "y" * 3000})
    assert verify(folder) == verify(folder)
    assert verify(folder).torn_bytes == 0
    assert verify(folder).records == written
    ballast.unlink()
    assert log.append("step", "x", {"filler": "y" * 3000}).seq == written + 1
    log.close()
    with Journal(folder) as again:
        assert again.repair is None
        assert again.last_seq == written + 1
    assert verify(folder).ok
