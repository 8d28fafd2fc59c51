"""Processes beside each other: many that read, one that appends, one that compacts and is killed at times."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from gridagent.journal import Journal, verify
from gridctl.history import History
from gridctl.history.compact import Place, compact
from gridctl.history.seal import line_of
from gridctl.home import Home
from gridctl.model.policy import Kept

READERS = 20

#: Reads until the writer is done; ends with an error at the first answer that cannot be.
READ = """
import sys
from pathlib import Path
from gridctl.history import History

journal, done = Path(sys.argv[1]), Path(sys.argv[2])
last = reads = 0
history = None
print("ready", flush=True)
while True:
    ended = done.exists()
    history = History(journal) if reads % 3 == 0 else history
    count, newest, opened, closed = history.query(
        "SELECT count(*), max(seq), (SELECT count(*) FROM row_incidents WHERE state = 'open'), "
        "(SELECT count(*) FROM row_incidents WHERE state = 'closed') FROM records"
    )[1][0]
    assert count == (newest or 0), f"{count} records up to {newest}"
    assert count >= last, f"{count} records after {last}"
    assert opened - closed in (0, 1), f"{opened} opened, {closed} closed"
    last = count
    reads += 1
    if ended:
        break
print(reads, last, flush=True)
"""

COMPACT = """
import sys
from pathlib import Path
from gridctl.history.compact import Place, compact
from gridctl.home import Home
from gridctl.model.policy import Kept

place = Place.of(Home.at(sys.argv[1]), Kept())
print("ready", flush=True)
while True:
    compact(place, Kept())
    print("once", flush=True)
"""


def started(code: str, *words: object) -> "subprocess.Popen[str]":
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def append(log: Journal, number: int) -> None:
    for state in ("open", "closed"):
        log.append("incident", "x", {"incident": f"i{number}", "state": state, "text": "y" * 200})


def test_readers_beside_a_writer_that_appends_and_one_that_compacts(tmp_path: Path) -> None:
    place = Place.of(Home.at(tmp_path), Kept())
    done = tmp_path / "done"
    with Journal(place.journal, segment_bytes=8000) as log:
        append(log, 0)
        compactor = started(COMPACT, tmp_path)
        readers = [started(READ, place.journal, done) for _ in range(READERS)]
        try:
            assert compactor.stdout is not None
            for number in range(1, 12):
                append(log, number)
                assert compactor.stdout.readline() == "once\n"
        finally:
            end(compactor)
            done.touch()
        for reader in readers:
            out, _ = reader.communicate(timeout=300)
            assert reader.returncode == 0
            assert int(out.split()[1]) == 24


@pytest.mark.parametrize("seed", [1, 2])
def test_a_compactor_that_is_killed_at_any_point_loses_nothing(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    place = Place.of(Home.at(tmp_path), Kept())
    child = started(COMPACT, tmp_path)
    moments = iter(range(10**9))
    with Journal(place.journal, lambda: 1.7e9 + 5000.0 * next(moments), segment_bytes=8000) as log:
        for number in range(12):
            append(log, number)
            # Some way into a compaction: as many files later as chance says.
            seen, more = files(place), chance.randrange(1, 6)
            while len(files(place) - seen) < more and child.poll() is None and grown(child):
                pass
            end(child)
            rows = History(place.journal).query("SELECT count(*), max(seq) FROM records")[1]
            assert rows == [(2 * number + 2, 2 * number + 2)]
            child = started(COMPACT, tmp_path)
    end(child)
    found = compact(place, Kept())
    assert (found.sealed_seq, found.problem, found.damaged) == (24, "", ())
    history = History(place.journal)
    sealed = history.query("SELECT seq, t_unix_s, kind, actor, data, prev FROM records ORDER BY seq")[1]
    content = b"".join(path.read_bytes() for path in sorted(place.journal.glob("0*.jsonl")))
    assert b"".join(line_of(*row)[0] for row in sealed) == content
    assert verify(place.journal).ok
    catalog = place.store.catalog()
    named = {file.path for file in catalog.files} | {file.path for file in catalog.replaced}
    assert set(place.store.paths()) == named  # nothing is left behind


def end(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def files(place: Place) -> set[str]:
    """Everything that lies in the store, in the making too."""
    return {f"{folder}/{name}" for folder, _, names in os.walk(place.store.where) for name in names}


def grown(child: "subprocess.Popen[str]") -> bool:
    """Has it not come to the end of a compaction yet? Then there may be more to come."""
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    try:
        return not os.read(child.stdout.fileno(), 1)
    except BlockingIOError:
        return True
