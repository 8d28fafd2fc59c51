"""`gridctl audit` with a real keyring, on a copy on another machine, and against a writer that is killed."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import COMMAND
from secret_service import secret_service

from gridagent.journal import Journal, read
from gridctl.history.audit import audit

WRITER = """
import sys
from gridagent.journal import Journal
log = Journal(sys.argv[1], segment_bytes=100_000)
print(f"opened {log.last_seq} {int(log.repair is not None)}", flush=True)
n = 0
while True:
    n += 1
    record = log.append("step", "writer", {"n": n, "filler": "x" * (n * 7919 % 20_000)})
    print(record.seq, record.hash, flush=True)
"""


@pytest.fixture(scope="module")
def keyring() -> Iterator[dict[str, str]]:
    with secret_service() as environment:
        yield environment


def gridctl(environment: dict[str, str], home: Path, *arguments: str, expect: int = 0) -> str:
    done = subprocess.run(
        [*COMMAND, *arguments],
        env={**environment, "GRIDCTL_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == expect, (arguments, done.stdout, done.stderr)
    return done.stdout


def fill(journal: Path, count: int) -> None:
    with Journal(journal) as log:
        for number in range(count):
            log.append(
                "audit", "x", {"what": "freeze", "who": "ann", "reason": f"number {number}", "scope": "fleet"}
            )


def test_signed_and_verified_on_another_machine(keyring: dict[str, str], tmp_path: Path) -> None:
    home, there = tmp_path / "home", tmp_path / "there"
    fill(home / "journal", 10)
    gridctl(keyring, home, "audit", "key", expect=2)
    gridctl(keyring, home, "audit", "checkpoint")
    public = gridctl(keyring, home, "audit", "key").strip()
    fill(home / "journal", 5)
    gridctl(keyring, home, "audit", "checkpoint")
    assert gridctl(keyring, home, "audit", "key").strip() == public, "made once"
    shutil.copytree(home / "journal", there / "journal")
    shutil.copy(home / "checkpoints.jsonl", there / "given.jsonl")
    bare = {name: text for name, text in os.environ.items() if name != "DBUS_SESSION_BUS_ADDRESS"}
    elsewhere = (
        "audit",
        "verify",
        "--path",
        str(there / "journal"),
        "--checkpoints",
        str(there / "given.jsonl"),
    )
    found = json.loads(gridctl(bare, there, *elsewhere, "--key", public, "-o", "json"))
    assert (found["ok"], found["records"], found["checkpoints"], found["covered_seq"]) == (True, 15, 2, 15)
    (segment,) = (there / "journal").glob("*.jsonl")
    segment.write_bytes(b"".join(segment.read_bytes().splitlines(keepends=True)[:12]))
    found = json.loads(gridctl(bare, there, *elsewhere, "--key", public, "-o", "json", expect=7))
    assert (found["ok"], found["first_bad"]) == (False, 13)
    gridctl(bare, there, "audit", "verify", "--path", str(there / "journal"))
    gridctl(bare, there, "audit", "verify", "--checkpoints", str(there / "none"), expect=2)


def test_without_a_keyring_nothing_is_signed(tmp_path: Path) -> None:
    fill(tmp_path / "journal", 3)
    gridctl(
        dict(os.environ) | {"DBUS_SESSION_BUS_ADDRESS": "unix:path=/nowhere"},
        tmp_path,
        "audit",
        "checkpoint",
        expect=1,
    )
    assert not (tmp_path / "checkpoints.jsonl").exists()


def test_who_did_what_and_the_way_to_a_siem(tmp_path: Path) -> None:
    fill(tmp_path / "journal", 4)
    environment = dict(os.environ)
    shown = json.loads(gridctl(environment, tmp_path, "audit", "show", "--actor", "ann", "-o", "json"))
    assert [act["text"] for act in shown] == [f"number {number}" for number in range(4)]
    assert json.loads(gridctl(environment, tmp_path, "audit", "show", "--actor", "bob", "-o", "json")) == []
    assert json.loads(gridctl(environment, tmp_path, "audit", "show", "--since", "1h", "-o", "json")) == shown
    assert (
        json.loads(gridctl(environment, tmp_path, "audit", "show", "--until", "2001-01-01", "-o", "json"))
        == []
    )
    lines = [json.loads(line) for line in gridctl(environment, tmp_path, "audit", "export").splitlines()]
    assert [line["event"]["sequence"] for line in lines] == [1, 2, 3, 4]
    rest = gridctl(environment, tmp_path, "audit", "export", "--after", "3").splitlines()
    assert [json.loads(line) for line in rest] == lines[3:]


def killed(folder: Path, times: int) -> None:
    """Kills a writer so often at random points, and looks at what it leaves."""
    chance = random.Random(times)
    acknowledged: dict[int, str] = {}
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            word, last, _ = process.stdout.readline().split()
            assert (word, int(last) >= max(acknowledged, default=0)) == ("opened", True)
            for _ in range(chance.randrange(1, 25)):
                seq, digest = process.stdout.readline().split()
                acknowledged[int(seq)] = digest
            process.send_signal(signal.SIGKILL)
            for line in process.stdout:
                if line.endswith("\n"):
                    seq, digest = line.split()
                    acknowledged[int(seq)] = digest
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        # Most kills fall between two writes: one in three leaves a line that was never finished.
        if chance.random() < 0.3:
            with sorted(folder.glob("*.jsonl"))[-1].open("ab") as file:
                file.write(b'{"seq":9,"t_unix_s":17' * chance.randrange(1, 4))
        found = audit(folder, [])
        assert (found.ok, found.records >= max(acknowledged)) == (True, True), found
        assert acknowledged.items() <= {r.seq: r.hash for r in read(folder)}.items()
    with Journal(folder) as log:
        torn = log.repair
    notes = [r.data for r in read(folder) if r.kind == "note"]
    assert all("repair" in note for note in notes)
    assert torn is None or notes, "what was cut off is reported"
    assert audit(folder, []).ok


def test_a_writer_that_is_killed_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    killed(tmp_path, 10)


@pytest.mark.matrix
def test_a_writer_that_is_killed_two_hundred_times(tmp_path: Path) -> None:
    killed(tmp_path, 200)
