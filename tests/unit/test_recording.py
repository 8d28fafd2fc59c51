"""Reading recordings, and playing them: torn, packed, unordered between nodes, from a newer writer."""

import gzip
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridctl.detect.playback import FleetClock, Playback
from gridctl.detect.policy import builtin
from gridctl.errors import ConfigError
from gridctl.model.findings import WatchedNode
from gridctl.ports.recording import Job, Recording, job_members

HEADER = {"recording": 1, "name": "own", "nodes": [{"name": "a7", "gpus": 2, "later": 1}], "jobs": []}
BEAT = {"t": 1.5, "node": "a7", "kind": "beat", "boot": "b-1", "seq": 1}
LOST = "[ 5.0] NVRM: Xid (PCI:0000:4e:00): 79, pid=3, name=a, GPU has fallen off the bus."


def write(path: Path, *lines: Any, tail: str = "") -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines) + tail
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def read(path: Path) -> tuple[list[tuple[float, str, str]], int]:
    recording = Recording(path)
    try:
        found = [(r.t_unix_s, r.node, r.kind) for r in recording.records()]
    finally:
        recording.close()
    return found, recording.unreadable


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz", "without-a-suffix"])
def test_what_is_unknown_or_torn_is_no_reason_to_fail(tmp_path: Path, name: str) -> None:
    newer = {"t": 2, "node": "a7", "kind": "hologram", "colour": "red"}
    path = write(tmp_path / name, HEADER, BEAT, newer, "not json", {"t": 3}, "", tail='{"t": 4.0, "no')
    assert read(path) == ([(1.5, "a7", "beat"), (2.0, "a7", "hologram")], 3)


def test_a_packed_file_that_ends_early_is_read_up_to_there(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl.gz", HEADER, *[BEAT | {"seq": n, "x": n * 7919 % 1000} for n in range(4000)]
    )
    path.write_bytes(path.read_bytes()[:-2000])
    found, _ = read(path)
    assert 100 < len(found) < 4000


def test_zstandard_is_read_where_a_library_is_there_or_refused_with_a_remedy(tmp_path: Path) -> None:
    if shutil.which("zstd") is None:
        pytest.skip("no zstd to pack with")
    path = write(tmp_path / "r.jsonl", HEADER, BEAT)
    subprocess.run(["zstd", "-q", str(path)], check=True)
    packed = path.with_suffix(".jsonl.zst")
    if any(importlib.util.find_spec(name) for name in ("zstandard", "pyzstd")):
        assert read(packed) == ([(1.5, "a7", "beat")], 0)
    else:
        with pytest.raises(ConfigError, match="zstandard"):
            read(packed)


@pytest.mark.parametrize("text", ["", "\n", "{}\n", "[1]\n", '{"recording": "x"}\n', "\x1f\x8b"])
def test_another_file_is_no_recording(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigError, match="no recording"):
        Recording(tmp_path / "x")


def test_records_carry_the_boot_of_the_last_beat(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", HEADER, BEAT, {"t": 2, "node": "a7", "kind": "log", "line": LOST})
    recording = Recording(path)
    assert [r.boot for r in recording.records()] == ["b-1", "b-1"]
    recording.close()


def test_jobs_by_node() -> None:
    jobs = [Job("j", {"0": "a", "1": "a", "2": "b"}), Job("k", {"0": "b"})]
    assert job_members(jobs) == {"a": {"j"}, "b": {"j", "k"}}


def test_one_clock_ahead_moves_nobody_elses_time() -> None:
    clock = FleetClock(["a", "b", "c", "d"])
    for second in range(100):
        assert clock.feed("a", second + 5000.0) <= second + 31.0
        for node in "bcd":
            clock.feed(node, float(second))
    assert clock.now_s == 99.0
    assert clock.feed("a", 5100.0) == pytest.approx(100.0, abs=31.0)


def test_a_clock_that_jumps_back_counts_on() -> None:
    clock = FleetClock(["a", "b", "c"])
    for second in range(50):
        for node in "abc":
            clock.feed(node, float(second))
    assert clock.feed("a", 10.0) == pytest.approx(49.0, abs=1.5)
    assert clock.now_s == 49.0


def test_a_silent_part_does_not_stop_the_time() -> None:
    clock = FleetClock([f"n{number}" for number in range(8)])
    for second in range(20):
        for number in (1, 2, 3):
            clock.feed(f"n{number}", float(second))
    assert clock.now_s == 19.0


def test_the_lines_have_the_keys_of_the_contract(tmp_path: Path) -> None:
    path = write(
        tmp_path / "r.jsonl",
        HEADER,
        BEAT,
        {"t": 2.0, "node": "a7", "kind": "log", "source": "kmsg", "line": LOST},
    )
    recording = Recording(path)
    playback = Playback(builtin(), recording.header.nodes, {})
    lines = [line for record in recording.records() for line in playback.feed(record)]
    recording.close()
    keys = "t type node device kind severity action preempt_job when why rule".split()
    assert all(list(line) == keys for line in lines)
    told = [(line["type"], line["kind"], line["device"], line["preempt_job"]) for line in lines]
    assert told == [
        ("verdict", "healthy", "node", False),
        ("finding", "gpu_lost", "0000:4e:00.0", True),
        ("incident", "gpu_lost", "0000:4e:00.0", False),
        ("verdict", "faulty", "node", False),
        ("decision", "gpu_lost", "0000:4e:00.0", True),
    ]


def test_the_command_prints_one_object_a_line_and_twice_the_same(tmp_path: Path) -> None:
    lost = {"t": 2.0, "node": "a7", "kind": "log", "source": "kmsg", "line": LOST}
    path = write(tmp_path / "r.jsonl.gz", HEADER, BEAT, "torn", lost)
    command = [sys.executable, "-c", "from gridctl.cli.app import invoke; invoke()", "replay", str(path)]
    once, again = (subprocess.run([*command, "-o", "json"], capture_output=True, check=True) for _ in "ab")
    assert once.stdout == again.stdout
    kinds = [json.loads(line)["type"] for line in once.stdout.splitlines()]
    assert kinds == ["verdict", "finding", "incident", "verdict", "decision"]
    assert b"1 lines could not be read" in once.stderr
    table = subprocess.run(command, capture_output=True, check=True).stdout
    assert b"gpu_lost" in table


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
KIND = st.sampled_from(["sample", "log", "beat", "progress", "probe", "note", "gap", "new"])
FIELDS = (
    "device",
    "v",
    "source",
    "line",
    "boot",
    "job",
    "rank",
    "step",
    "loss",
    "target",
    "rtt_us",
    "action",
)


@given(
    st.lists(st.tuples(st.floats(-10, 500), KIND, st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5)))
)
def test_whatever_a_record_holds_nothing_breaks(lines: list[tuple[float, str, dict[str, Any]]]) -> None:
    from gridagent.wire import StreamRecord

    playback = Playback(builtin(), [WatchedNode(name="a")], {"a": {"j"}})
    for seq, (t_s, kind, v) in enumerate(lines):
        record = StreamRecord(seq=seq, boot="", t_unix_s=t_s, node="ab"[seq % 2], kind=kind, v=v)
        list(playback.feed(record))
