"""Processes that read beside one that appends and one that compacts. Prints; ends with 1 at a wrong answer.

usage: python benchmarks/history_readers.py [SECONDS] [READERS]

Each reader asks again and again how many records there are, every third time as a new reader. A
wrong answer is an error of any kind, a hole in the numbers, fewer records than before, or half of an event.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gridagent.journal import Journal

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
READERS = int(sys.argv[2]) if len(sys.argv) > 2 else 20

READ = """
import sys, time
from pathlib import Path
from gridctl.history import History

journal, done = Path(sys.argv[1]), Path(sys.argv[2])
last, took = 0, []
while not done.exists():
    history = History(journal) if len(took) % 3 == 0 else history
    begin_s = time.monotonic()
    count, newest, halves = history.query(
        "SELECT count(*), max(seq), (SELECT count(*) FROM row_incidents WHERE data ->> '$.end' "
        "IS DISTINCT FROM 'end') FROM records")[1][0]
    took.append(time.monotonic() - begin_s)
    assert count == (newest or 0) and count >= last and not halves, (count, newest, last, halves)
    last = count
took.sort()
print(len(took), took[len(took) // 2], took[int(len(took) * 0.95)])
"""
COMPACT = """
import sys
from pathlib import Path
from gridctl.history.compact import Place, compact
from gridctl.home import Home
from gridctl.model.policy import Kept

home, done, times = Home.at(sys.argv[1]), Path(sys.argv[2]), 0
while not done.exists():
    compact(Place.of(home, Kept()), Kept())
    times += 1
print(times)
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        home, done = Path(folder), Path(folder) / "done"
        command = [sys.executable, "-c"]
        compactor = subprocess.Popen([*command, COMPACT, home, done], stdout=subprocess.PIPE, text=True)
        readers = [
            subprocess.Popen([*command, READ, home / "journal", done], stdout=subprocess.PIPE, text=True)
            for _ in range(READERS)
        ]
        until_s = time.monotonic() + SECONDS
        with Journal(home / "journal", segment_bytes=1 << 20) as log:
            while time.monotonic() < until_s:
                text = {"incident": f"i{log.last_seq}", "state": "open", "why": "y" * 500, "end": "end"}
                log.append("incident", "benchmark", text)
                time.sleep(0.002)  # some hundred records a second: more than a fleet in trouble
            records = log.last_seq
        done.touch()
        times = compactor.communicate()[0].strip()
        answers = [reader.communicate()[0].split() for reader in readers]
    failed = sum(bool(reader.returncode) for reader in [*readers, compactor])
    asked = sum(int(answer[0]) for answer in answers if answer)
    middle = sorted(float(answer[1]) for answer in answers if answer)
    print(f"{READERS} readers, 1 writer, 1 compactor, {SECONDS:.0f} s")
    print(f"records appended        {records}")
    print(f"compactions             {times or 'failed'}")
    print(f"questions answered      {asked}")
    print(f"processes that failed   {failed}")
    if middle:
        slow = max(float(answer[2]) for answer in answers if answer)
        print(f"a question takes        median {middle[len(middle) // 2]:.3f} s, at worst p95 {slow:.3f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
