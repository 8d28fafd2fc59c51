"""The spool: what is told is kept, in order, once, whatever happens to the disk or the process."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridagent.telemetry import spool as module
from gridagent.telemetry.spool import Spool


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SYNC_S", 0.0)
    monkeypatch.setattr(module, "RETRY_S", 0.0)


def opened(folder: Path, bytes_max: int = 1 << 20, segment_bytes: int = 1 << 16) -> Spool:
    folder.mkdir(exist_ok=True)
    return Spool(folder, "n", "b", bytes_max=bytes_max, segment_bytes=segment_bytes, clock=lambda: 1000.0)


async def running(spool: Spool, work: Callable[[], Any]) -> Any:
    """Runs `work` (a coroutine function) beside the spool's writer, then closes the spool."""
    writer = asyncio.ensure_future(spool.run())
    try:
        return await asyncio.wait_for(work(), 60)
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        spool.close()


async def read(spool: Spool, after: int, until: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    async for chunk in spool.follow(after):
        assert chunk.endswith(b"\n")
        records += map(json.loads, chunk.splitlines())
        if records and records[-1]["seq"] >= until:
            break
    return records


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.lists(st.text(max_size=40), max_size=5), max_size=8),
    after=st.integers(0, 30),
    segment_bytes=st.integers(1, 400),
)
def test_a_reader_gets_what_a_list_would_hold(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[str]], after: int, segment_bytes: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    twin: list[tuple[int, str]] = []
    for batch in batches:  # each batch by a process of its own
        spool = opened(folder, segment_bytes=segment_bytes)

        async def tell(spool: Spool = spool, batch: list[str] = batch) -> None:
            for text in batch:
                twin.append((spool.append("note", {"text": text}), text))
                await asyncio.sleep(0)

        asyncio.run(running(spool, tell))
    assert [seq for seq, _ in twin] == list(range(1, len(twin) + 1))
    wanted = [(seq, text) for seq, text in twin if seq > after]
    if wanted:
        spool = opened(folder, segment_bytes=segment_bytes)
        found = asyncio.run(running(spool, lambda: read(spool, after, twin[-1][0])))
        assert [(record["seq"], record["v"]["text"]) for record in found] == wanted


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 400), junk=st.just(b"") | st.binary(max_size=30).map(lambda junk: b"#" + junk))
def test_any_torn_end_is_cut_off_and_no_seq_is_given_twice(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    spool = opened(folder)
    for number in range(5):
        spool.append("note", {"n": number})
    spool.close()
    path = next(folder.glob("*.jsonl"))
    whole = path.read_bytes()
    kept = whole[: min(cut, len(whole))]
    path.write_bytes(kept + junk)
    again = opened(folder)
    assert again.seq == kept.count(b"\n")
    assert path.read_bytes() == kept[: kept.rfind(b"\n") + 1]
    assert again.append("note", {}) == kept.count(b"\n") + 1
    again.close()


def test_a_live_reader_waits_and_goes_on(tmp_path: Path) -> None:
    spool = opened(tmp_path)

    async def work() -> list[dict[str, Any]]:
        reader = asyncio.ensure_future(read(spool, 0, 3))
        for number in range(3):
            await asyncio.sleep(0.01)
            assert not reader.done()
            spool.append("note", {"n": number})
        return await reader

    assert [record["v"]["n"] for record in asyncio.run(running(spool, work))] == [0, 1, 2]


def test_the_oldest_goes_when_it_is_full_and_a_gap_tells_which(tmp_path: Path) -> None:
    spool = opened(tmp_path, bytes_max=4000, segment_bytes=1000)

    async def work() -> list[dict[str, Any]]:
        for number in range(200):
            spool.append("note", {"n": number})
            await asyncio.sleep(0)
        await read(spool, 0, 200)
        return await read(spool, 0, spool.seq)

    found = asyncio.run(running(spool, work))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.jsonl")) < 5100
    seqs = {record["seq"] for record in found}
    assert found[0]["seq"] > 1
    assert [record["seq"] for record in found] == list(range(found[0]["seq"], found[-1]["seq"] + 1))
    gaps = [record["v"] for record in found if record["kind"] == "gap"]
    assert gaps
    assert all(not seqs & set(range(gap["first"], gap["last"] + 1)) for gap in gaps)
    assert all(gap["records"] == gap["last"] - gap["first"] + 1 for gap in gaps)
    assert gaps[-1]["last"] == found[0]["seq"] - 1


def test_while_the_disk_is_full_records_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = opened(tmp_path)
    write = os.write
    refusals = iter(range(3))

    def refuse(fd: int, data: bytes) -> int:
        if next(refusals, None) is None:
            return write(fd, data)
        write(fd, bytes(data)[:10])  # a full disk takes a part first
        raise OSError(errno.ENOSPC, "no space")

    async def work() -> list[dict[str, Any]]:
        spool.append("note", {"n": 0})
        await read(spool, 0, 1)
        monkeypatch.setattr(os, "write", refuse)
        for number in (1, 2):
            spool.append("note", {"n": number})
        return await read(spool, 0, 3)

    assert [record["v"]["n"] for record in asyncio.run(running(spool, work))] == [0, 1, 2]


def test_what_is_stored_outlives_the_process_and_a_disk_that_hangs_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 10)
    spool = opened(tmp_path)
    hangs, ends = threading.Event(), threading.Event()

    def hang(fd: int) -> None:
        hangs.set()
        assert ends.wait(60)

    async def work() -> list[dict[str, Any]]:
        spool.append("note", {"n": 0})
        await spool.stored()
        (segment,) = tmp_path.iterdir()
        assert b'"n":0' in segment.read_bytes()
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", hang)
            assert await asyncio.to_thread(hangs.wait, 60)
            for number in range(1, 30):
                spool.append("note", {"n": number})
            assert len(spool._pending) == 10
            waits = asyncio.ensure_future(spool.stored())
            await asyncio.sleep(0)
            assert not waits.done()
            ends.set()
            await waits
        return await read(spool, 0, 31)

    found = asyncio.run(running(spool, work))
    assert [record["v"] for record in found if record["kind"] == "gap"] == [
        {"first": 2, "last": 20, "records": 19}
    ]
    assert [record["v"]["n"] for record in found if record["kind"] == "note"] == [0, *range(20, 30)]


def test_a_reader_of_a_spool_that_is_gone_is_told_all_of_the_new_one(tmp_path: Path) -> None:
    spool = opened(tmp_path)

    async def work() -> list[dict[str, Any]]:
        for number in (1, 2):
            spool.append("note", {"n": number})
        await read(spool, 0, 2)
        return await read(spool, 1000, 2)

    assert [record["seq"] for record in asyncio.run(running(spool, work))] == [1, 2]


def test_garbage_at_the_end_is_cut_off_line_by_line(tmp_path: Path) -> None:
    spool = opened(tmp_path)

    async def tell() -> None:
        spool.append("note", {"n": 1})

    asyncio.run(running(spool, tell))
    (segment,) = tmp_path.iterdir()
    sound = segment.read_bytes()
    segment.write_bytes(sound + b"x\n" * (1 << 12) + b"\n\n\0\0")
    again = opened(tmp_path)
    assert (again.seq, segment.read_bytes()) == (1, sound)
    again.close()


def test_what_the_disk_never_took_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PENDING_MAX", 10)
    spool = opened(tmp_path)
    full = True
    write = os.write

    def refuse(fd: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, "no space")
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse)

    async def work() -> list[dict[str, Any]]:
        nonlocal full
        for _ in range(25):
            spool.append("note", {})
        while len(spool._pending) > 10:
            await asyncio.sleep(0.001)
        for _ in range(5):
            spool.append("note", {})
        while len(spool._pending) > 10:
            await asyncio.sleep(0.001)
        full = False
        return await read(spool, 0, 31)

    found = asyncio.run(running(spool, work))
    seqs = {record["seq"] for record in found}
    lost = {
        seq
        for gap in (record["v"] for record in found if record["kind"] == "gap")
        for seq in range(gap["first"], gap["last"] + 1)
    }
    assert (lost, seqs) == (set(range(1, 21)), set(range(21, 32)))


def test_a_time_that_is_none_becomes_now(tmp_path: Path) -> None:
    spool = opened(tmp_path)
    spool.append("note", {"x": float("nan")}, float("inf"))
    spool.close()
    record = json.loads(next(tmp_path.glob("*.jsonl")).read_bytes())
    assert (record["t_unix_s"], record["v"]) == (1000.0, {"x": None})
