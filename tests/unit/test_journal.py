import hashlib
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent import journal
from gridagent.journal import Journal, JournalDamaged, JournalError, JournalLocked, read, verify

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def filled(directory: Path, count: int = 9, segment_bytes: int = 600) -> list[Path]:
    clock = iter(range(1000, 10_000))
    with Journal(directory, lambda: float(next(clock)), segment_bytes=segment_bytes) as log:
        for index in range(count):
            log.append("step", "tester", {"index": index})
    return sorted(directory.glob("*.jsonl"))


def test_records_come_back_and_the_chain_runs_over_segments(tmp_path: Path) -> None:
    segments = filled(tmp_path)
    assert len(segments) > 2
    records = list(read(tmp_path))
    assert [r.seq for r in records] == list(range(1, 10))
    assert [r.prev for r in records] == [journal.GENESIS, *(r.hash for r in records[:-1])]
    assert [r.data["index"] for r in records] == list(range(9))
    assert verify(tmp_path) == journal.Verification(
        ok=True, records=9, first_bad=None, what="", head=records[-1].hash
    )
    for after in range(11):
        assert [r.seq for r in read(tmp_path, after)] == list(range(after + 1, 10))


def test_the_hash_is_over_the_line_without_it(tmp_path: Path) -> None:
    """The contract of docs/architecture.md, checked with nothing but json and hashlib."""

    for path in filled(tmp_path):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            assert list(entry) == ["seq", "t_unix_s", "kind", "actor", "data", "prev", "hash"]
            digest = entry.pop("hash")
            bare = json.dumps(entry, separators=(",", ":"))
            assert hashlib.sha256(bare.encode()).hexdigest() == digest


@given(st.lists(st.dictionaries(st.text(), VALUES, max_size=4), max_size=6), st.integers(100, 900))
def test_any_data_survives(tmp_path_factory: pytest.TempPathFactory, items: list[dict], size: int) -> None:
    directory = tmp_path_factory.mktemp("j")
    with Journal(directory, segment_bytes=size) as log:
        returned = [log.append("note", "x\n'\"", item) for item in items]
    assert list(read(directory)) == returned
    assert [r.data for r in returned] == items
    assert verify(directory).ok


@given(st.data())
def test_cut_anywhere_in_the_last_segment_loses_no_whole_record(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("j")
    last = filled(directory)[-1]
    content = last.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    last.write_bytes(content[:cut])
    before = [r.seq for r in read(directory)]
    whole = content[:cut].count(b"\n") + (cut + 1 in {i + 1 for i, b in enumerate(content) if b == 10})
    first = json.loads(content.splitlines()[0])["seq"]
    with Journal(directory) as log:
        torn = cut > 0 and content[cut - 1 : cut] != b"\n"
        assert (log.repair is not None) == torn
        log.append("note", "after", {})
    after = list(read(directory))
    kept = [r.seq for r in after if r.actor == "tester"]
    assert kept == list(range(1, first + whole))
    assert set(before) <= set(kept)
    assert verify(directory).ok
    if log.repair:
        assert any(r.actor == "journal" and r.data["repair"]["bytes"] == log.repair.bytes for r in after)


def test_a_torn_tail_is_no_damage_to_readers(tmp_path: Path) -> None:
    last = filled(tmp_path)[-1]
    with last.open("ab") as file:
        file.write(b'{"seq":10,"t_un')
    assert [r.seq for r in read(tmp_path)] == list(range(1, 10))
    result = verify(tmp_path)
    assert result.ok
    assert result.torn_bytes == 15


def lines_of(segments: list[Path]) -> list[bytes]:
    return b"".join(path.read_bytes() for path in segments).splitlines(keepends=True)


TAMPER = {
    "change": (lambda rows: rows[3].replace(b'"index":3', b'"index":7'), 4, "changed"),
    "change the time": (lambda rows: rows[3].replace(b"1003.0", b"1004.0"), 4, "changed"),
    "garbage": (lambda rows: b"\xff\x00{{{\n", 4, "no record"),
    "drop": (lambda rows: b"", 4, "missing"),
    "insert a copy": (lambda rows: rows[3] + rows[3], 5, "repeated"),
    "cut in the middle": (lambda rows: rows[3][:40] + b"\n", 4, "cut"),
    "cut without a line end": (lambda rows: rows[3][:40], 4, "no record"),
}


@pytest.mark.parametrize("name", TAMPER)
def test_tampering_is_found_where_it_is(tmp_path: Path, name: str) -> None:
    change, first_bad, what = TAMPER[name]
    segments = filled(tmp_path, segment_bytes=1 << 20)
    rows = lines_of(segments)
    segments[0].write_bytes(b"".join(rows[:3]) + change(rows) + b"".join(rows[4:]))
    result = verify(tmp_path)
    assert not result.ok
    assert result.first_bad == first_bad
    assert result.records == first_bad - 1
    assert what in result.what


def forged(row: bytes, **changes: object) -> bytes:
    """A record changed by somebody who makes the hash fit again."""

    entry = json.loads(row) | changes
    entry.pop("hash")
    bare = json.dumps(entry, separators=(",", ":"))
    return bare[:-1].encode() + b',"hash":"%s"}\n' % hashlib.sha256(bare.encode()).hexdigest().encode()


def test_swap_reorder_and_forgery_are_found(tmp_path: Path) -> None:
    segments = filled(tmp_path, segment_bytes=1 << 20)
    rows = lines_of(segments)
    for order, first_bad in (
        ([0, 2, 1, *range(3, 9)], 2),
        ([*range(7), 8, 7], 8),
        ([8, *range(1, 8), 0], 1),
    ):
        segments[0].write_bytes(b"".join(rows[i] for i in order))
        assert verify(tmp_path).first_bad == first_bad
    segments[0].write_bytes(b"".join([*rows[:4], forged(rows[4], actor="mallory"), *rows[5:]]))
    result = verify(tmp_path)
    assert result.first_bad == 6
    assert "replaced" in result.what


def test_a_missing_or_swapped_segment_is_found(tmp_path: Path) -> None:
    segments = filled(tmp_path)
    first, second = segments[0].read_bytes(), segments[1].read_bytes()
    segments[0].write_bytes(second)
    segments[1].write_bytes(first)
    assert verify(tmp_path).first_bad == 1
    segments[0].write_bytes(first)
    segments[1].unlink()
    assert verify(tmp_path).first_bad == first.count(b"\n") + 1
    segments[0].unlink()
    assert verify(tmp_path).first_bad == 1


@given(st.data())
def test_any_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("j")
    segments = filled(directory, count=4, segment_bytes=1 << 20)
    content = bytearray(segments[0].read_bytes())
    position = data.draw(st.integers(0, len(content) - 2))  # the last line end gone is a torn tail
    content[position] = data.draw(st.integers(0, 255).filter(lambda b: b != content[position]))
    segments[0].write_bytes(content)
    assert not verify(directory).ok


def test_a_clock_that_goes_back_is_reported_and_no_damage(tmp_path: Path) -> None:
    clock = iter([5.0, 6.0, 4.0, 7.0, 6.5])
    with Journal(tmp_path, lambda: next(clock)) as log:
        for _ in range(5):
            log.append("note", "x", {})
    result = verify(tmp_path)
    assert result.ok
    assert (result.clock_back, result.clock_back_first) == (2, 3)


def test_one_writer_and_the_second_is_told_who(tmp_path: Path) -> None:

    with Journal(tmp_path), pytest.raises(JournalLocked, match=str(os.getpid())):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_a_damaged_end_is_refused_and_leaves_the_lock_free(tmp_path: Path) -> None:
    last = filled(tmp_path)[-1]
    last.write_bytes(last.read_bytes()[:-20] + b"x" * 19 + b"\n")
    for _ in range(2):
        with pytest.raises(JournalDamaged, match="damaged"):
            Journal(tmp_path)


def test_reading_stops_loudly_at_damage(tmp_path: Path) -> None:
    first = filled(tmp_path)[0]
    first.write_bytes(b"nonsense\n" + first.read_bytes())
    with pytest.raises(JournalDamaged, match="byte 0"):
        list(read(tmp_path))


def test_what_is_no_json_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with Journal(tmp_path) as log:
        log.append("note", "x", {"a": 1})
        for bad in ({"a": object()}, {"a": "\ud800"}):
            with pytest.raises(JournalError, match="JSON"):
                log.append("note", "x", bad)
        log.append("note", "x", {"a": 2})
    assert [r.data["a"] for r in read(tmp_path)] == [1, 2]
    with pytest.raises(JournalError, match="closed"):
        log.append("note", "x", {})


def test_follow_sees_new_records_over_segments(tmp_path: Path) -> None:
    log = Journal(tmp_path, segment_bytes=500)
    log.append("note", "x", {"n": 0})
    turns = iter(range(1, 8))

    def wait() -> bool:
        turn = next(turns, None)
        if turn is None:
            return False
        log.append("note", "x", {"n": turn})
        return True

    assert [r.data["n"] for r in journal.follow(tmp_path, 0, wait)] == list(range(8))
    assert [r.seq for r in journal.follow(tmp_path, 5, lambda: False)] == [6, 7, 8]
    log.close()


def test_readers_of_nothing(tmp_path: Path) -> None:
    assert list(read(tmp_path / "none")) == []
    assert verify(tmp_path / "none").ok


def test_threads_share_one_writer(tmp_path: Path) -> None:
    with Journal(tmp_path, segment_bytes=2000) as log:
        threads = [
            threading.Thread(target=lambda: [log.append("note", "t", {}) for _ in range(20)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verify(tmp_path).records == 80
