"""What the nodes tell: spooled, taken into Parquet, thinned as it gets older."""

import asyncio
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gridagent.wire import StreamRecord
from gridctl.control.keeper import Keeper
from gridctl.control.taps import Taps
from gridctl.history import History, HistoryError
from gridctl.history.compact import Place, compact, retain
from gridctl.history.spool import Spool, spooled
from gridctl.history.stats import stats
from gridctl.history.telemetry import due
from gridctl.home import Home
from gridctl.model.policy import Kept

DAY_S = 86_400.0
NODES = ("n1", "n2")


def place_in(folder: Path) -> Place:
    return Place.of(Home.at(folder), Kept())


def sample(seq: int, t_unix_s: float, node: str = "n1", **values: Any) -> StreamRecord:
    v = {"device": "gpu:0", "v": values or {"temp_c": 40.0 + seq % 10}}
    return StreamRecord(seq=seq, boot="b", t_unix_s=t_unix_s, node=node, kind="sample", v=v)


def step(seq: int, t_unix_s: float, number: int, **more: Any) -> StreamRecord:
    v = {"job": "j", "rank": 0, "epoch": 1, "step": number, "step_s": 0.5, "loss": 2.0, **more}
    return StreamRecord(seq=seq, boot="b", t_unix_s=t_unix_s, node="n1", kind="progress", v=v)


def ask(place: Place, sql: str) -> list[tuple[Any, ...]]:
    return History(place.journal, place.store, place.spool).query(sql)[1]


def spool(place: Place, records: list[StreamRecord], now_unix_s: float) -> Spool:
    """Written and ended: a second file stands behind it."""
    writer = Spool(place.spool)
    writer.write(records, now_unix_s)
    writer.close()
    writer.write([sample(10**9, now_unix_s, "last", end=1)], now_unix_s)
    writer.close()
    return writer


def test_samples_are_seen_at_once_and_after_compaction(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    begin = float(int(time.time()) - 100)
    records = [sample(n + 1, begin + n / 2, node) for node in NODES for n in range(40)]
    records += [step(100 + n, begin + n, n, loss=None) for n in range(5)]
    odd = {"temp_c": "hot", "on": True, "a": None, "b": float("nan"), "c": 7}
    records += [sample(200, begin + 60, **odd), sample(201, begin + 61, x="y")]
    spool(place, records, time.time())
    question = "FROM samples WHERE node <> 'last' ORDER BY ALL"
    before = ask(place, question)
    assert len(before) == 41
    assert before[0][1:] == (1, "n1", "gpu:0", "temp_c", 41.5, 41.0, 42.0, 42.0, 2)
    progress = ask(place, "FROM progress ORDER BY t_unix_s")
    assert [row[5] for row in progress] == [0, 1, 2, 3, 4]
    assert progress[0][6:] == (0.5, None, None)
    assert compact(place, Kept()).samples == 41 + 5
    assert ask(place, question) == before
    assert ask(place, "FROM progress ORDER BY t_unix_s") == progress
    assert compact(place, Kept()).samples == 0
    assert stats(place, Kept()).bytes_per_sample


def test_what_was_taken_before_a_restart_is_not_taken_twice(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    begin = time.time() - 100
    records = [sample(n + 1, begin + n) for n in range(30)]
    first = Spool(place.spool)
    first.write(records[:20], begin)
    first.close()
    Spool(place.spool).write(records, begin)  # a controller reads the newest of a stream again
    reinstalled = [sample(1, begin + 50)]  # a node whose stream begins anew
    third = Spool(place.spool)
    third.write(records + reinstalled, begin)
    assert ask(place, "SELECT count(*), sum(n) FROM samples") == [(31, 31)]


def test_a_torn_line_is_nothing(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    begin = time.time() - 100
    Spool(place.spool).write([sample(1, begin), sample(2, begin + 1)], begin)
    path = spooled(place.spool)[-1]
    path.write_bytes(path.read_bytes()[:-9])
    again = Spool(place.spool)
    again.write([sample(2, begin + 1), sample(3, begin + 2)], begin)
    again.close()
    assert len(spooled(place.spool)) == 2
    assert ask(place, "SELECT count(*) FROM samples") == [(3,)]


def test_tiers(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    now = time.time()
    today = now // DAY_S * DAY_S
    for age_d in (100, 5, 0):
        begin = today - age_d * DAY_S
        made = [sample(n + 1, begin + n * 10, watt=float(n)) for n in range(36)]
        spool(place, [*made, *(step(500 + n, begin + n * 10, n) for n in range(36))], now - age_d)
    compact(place, Kept())
    of = "FROM samples WHERE metric = 'watt'"
    assert ask(place, f"SELECT span_s, count(*), sum(n), min(low), max(high) {of} GROUP BY 1 ORDER BY 1") == [
        (1, 36, 36, 0.0, 35.0),
        (60, 6, 36, 0.0, 35.0),
        (3600, 1, 36, 0.0, 35.0),
    ]
    assert ask(place, f"SELECT value, last {of} AND span_s = 3600") == [(17.5, 35.0)]
    day = "floor(t_unix_s / 86400)"
    assert ask(place, f"SELECT count(*) FROM progress GROUP BY {day} ORDER BY 1") == [(1,), (6,), (36,)]
    # What comes late joins the tier that its day is in; tiers never overlap.
    late = today - 5 * DAY_S
    spool(place, [sample(1, late + 1, "n3", watt=1.0)], now + 1)
    compact(place, Kept())
    assert set(ask(place, f"SELECT count(DISTINCT span_s) FROM samples GROUP BY {day}")) == {(1,)}
    assert ask(place, "SELECT span_s FROM samples WHERE node = 'n3'") == [(60,)]
    shorter = Kept(seconds_h=0.001, minutes_d=1)
    waiting = due(place.store.catalog(), shorter, now + 2 * DAY_S)
    assert waiting
    assert retain(place, Kept()) == []


def test_a_damaged_file_of_telemetry_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    spool(place, [sample(n + 1, time.time() - 100 + n) for n in range(30)], time.time())
    compact(place, Kept())
    path = Path(place.store.url(place.store.catalog().of("samples")[0].path))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(HistoryError, match=path.name):
        ask(place, "FROM samples")
    assert ask(place, "FROM events") == ask(place, "FROM progress") == []
    assert compact(place, Kept(), rebuild=True).damaged == (str(path),)
    ask(place, "FROM samples")


def test_a_full_spool_loses_the_newest_and_says_so(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    writer = Spool(place.spool, bytes_max=2000)
    begin = time.time() - 100
    for n in range(100):
        writer.write([sample(n + 1, begin + n)], begin)
    assert writer.lost
    assert "nothing has compacted" in writer.why
    kept = ask(place, "SELECT count(*) FROM samples")[0][0]
    assert kept + writer.lost == 100
    writer = Spool(place.spool)
    writer.write([sample(101, begin + 200)], begin + 400)
    assert ask(place, "SELECT count(*) FROM samples") == [(kept + 1,)]


FULL = """
import resource, sys, time
from pathlib import Path
from gridagent.wire import StreamRecord
from gridctl.history.spool import Spool
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
spool = Spool(Path(sys.argv[1]))
for n in range(100):
    spool.write([StreamRecord(seq=n + 1, boot="b", t_unix_s=1e9 + n, node="n", kind="sample",
                              v={"device": "d", "v": {"x": n}})], 1e9)
print(spool.lost, spool.why)
"""


def test_a_disk_that_takes_no_more_loses_telemetry_only(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FULL, place.spool], capture_output=True, text=True, check=True, timeout=120
    )
    lost, _, why = done.stdout.strip().partition(" ")
    assert int(lost) > 0
    assert why == "File too large"
    assert ask(place, "SELECT count(*) FROM samples") == [(100 - int(lost),)]


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root only")
def test_a_full_disk_leaves_room_to_the_journal(tmp_path: Path) -> None:
    from gridagent.journal import Journal

    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode()}")
    try:
        place = place_in(tmp_path)
        writer = Spool(place.spool)
        begin = time.time() - 100
        many = {f"metric_{n}": float(n) for n in range(1000)}
        for n in range(400):
            writer.write([sample(n + 1, begin + n, **many)], begin)
        assert "kept free for the journal" in writer.why
        with Journal(place.journal) as log:
            for _ in range(100):
                log.append("note", "x", {"text": "still there"})
        with pytest.raises(Exception, match="kept free for the journal"):
            compact(place, Kept())
        for path in place.spool.glob("*"):
            path.unlink()
        writer.close()
        assert compact(place, Kept()).sealed_seq == 100
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


async def _kept(home: Home, taps: Taps, count: int) -> None:
    clock = [0.0]
    keeper = Keeper(home, taps, lambda: clock[0])
    keeper.start()
    place = place_in(home.state)
    while not taps.taps:
        await asyncio.sleep(0)
    for n in range(count):
        taps.feed(sample(n + 1, time.time() - 10))
    while sum(path.stat().st_size for path in spooled(home.spool)) < 60 * count:
        await asyncio.sleep(0.01)
    await keeper.turn()
    assert place.store.catalog().generation == 0  # not due yet
    clock[0] = 1000.0
    await keeper.turn()
    assert keeper.child is not None
    assert await keeper.child.wait() == 0
    await keeper.turn()
    assert keeper.child is None
    await keeper.close()


def test_the_controller_spools_and_compacts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from gridagent.journal import Journal

    home = Home.at(tmp_path)
    with Journal(home.journal) as log:
        log.append("note", "x", {"text": "t"})
        with caplog.at_level(logging.WARNING):
            asyncio.run(_kept(home, Taps(lambda _: None), 50))
    assert caplog.text == ""
    assert place_in(tmp_path).store.catalog().sealed_seq == 1
    assert ask(place_in(tmp_path), "SELECT count(DISTINCT node) FROM samples") == [(1,)]


def test_tiers_follow_each_other() -> None:
    with pytest.raises(ValueError, match="seconds_h"):
        Kept(seconds_h=0)
