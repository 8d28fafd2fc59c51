"""Writing recordings: what is written is read again, also of a file that nobody closed; bounded readers."""

import asyncio
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gridagent.wire import NodeStatus, RankStatus, StreamRecord
from gridctl.control import taps
from gridctl.control.taps import Tap, Taps, beginning
from gridctl.errors import ConfigError, Refused
from gridctl.model.findings import WatchedNode
from gridctl.model.fleet import Node
from gridctl.ports.lines import Lines
from gridctl.ports.recorder import Recorder
from gridctl.ports.recording import Header, Job, Recording

HEADER = Header(
    recording=1,
    name="own",
    start="2026-11-30T12:00:00.000+00:00",
    nodes=[WatchedNode(name="n1", rack="r1", gpus=8)],
    jobs=[Job(id="j", ranks={"0": "n1"})],
)
START_UNIX_S = 1_000_000.0


def record(t_s: float, node: str = "n1", kind: str = "log", seq: int = 1, **v: Any) -> StreamRecord:
    return StreamRecord(seq=seq, boot="b", t_unix_s=START_UNIX_S + t_s, node=node, kind=kind, v=v)


def read(path: Path) -> tuple[Header, list[tuple[float, str, str, dict[str, Any]]], int]:
    recording = Recording(path)
    found = [(r.t_unix_s, r.node, r.kind, r.v) for r in recording.records()]
    recording.close()
    return recording.header, found, recording.unreadable


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    line = "two\u2028lines \x1b[31m \x85 end"
    with Recorder(tmp_path / name, HEADER, START_UNIX_S) as recorder:
        recorder.write(record(1.25, line=line))
        clash = {"id": "x", "kind": "node.cordon", "t": 3}
        recorder.write(msgspec.structs.replace(record(1.5, kind="op"), v=clash))
        recorder.write(record(-2.0, node="n2"))
    header, found, unreadable = read(tmp_path / name)
    assert (header, unreadable) == (HEADER, 0)
    assert found == [
        (1.25, "n1", "log", {"line": line}),
        (1.5, "n1", "op", {"id": "x", "op_kind": "node.cordon", "op_t": 3}),
        (-2.0, "n2", "log", {}),
    ]
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_a_node_keeps_its_order_unless_its_clock_jumps(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.jsonl", HEADER, START_UNIX_S) as recorder:
        for t_s, node in ((5.0, "n1"), (4.5, "n1"), (1.0, "n2"), (6.0, "n1"), (-500.0, "n1"), (-499.0, "n1")):
            recorder.write(record(t_s, node))
    times = [(t, node) for t, node, *_ in read(tmp_path / "a.jsonl")[1]]
    assert times == [(5, "n1"), (5, "n1"), (1, "n2"), (6, "n1"), (-500, "n1"), (-499, "n1")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_recorder_that_is_killed_leaves_what_it_has_flushed(tmp_path: Path, name: str) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from test_recorder import *\n"
        "now = [0.0]\n"
        "recorder = Recorder(Path(sys.argv[1]), HEADER, START_UNIX_S, lambda: now[0])\n"
        "for n in range(100):\n"
        "    recorder.write(record(float(n), line=str(n * 7919)))\n"
        "now[0] = 10.0\n"
        "recorder.flush()\n"
        "recorder.write(record(200.0))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / name
    done = subprocess.run([sys.executable, "-c", code, str(path), str(Path(__file__).parent)], check=False)
    assert done.returncode == -9
    assert [t for t, *_ in read(path)[1]][:100] == [float(n) for n in range(100)]


def test_another_file_is_not_overwritten_and_a_wrong_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        Recorder(tmp_path / "a.jsonl", HEADER, START_UNIX_S)
    with pytest.raises(ConfigError, match="is named"):
        Recorder(tmp_path / "a.zst", HEADER, START_UNIX_S)
    assert (tmp_path / "a.jsonl").read_text() == "mine"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_an_error_that_closes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: opened("/dev/full", os.O_WRONLY))

    def fill() -> None:
        with Recorder(tmp_path / "a.jsonl.gz", HEADER, START_UNIX_S) as recorder:
            while True:
                recorder.write(record(1.0, line=os.urandom(5000).hex()))

    with pytest.raises(OSError, match="No space"):
        fill()


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=8))
def test_lines_are_the_same_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    lines, found = Lines(), []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        found += lines.feed(data[start:end])
    assert found == data.split(b"\n")[:-1]


def test_a_tap_has_its_nodes_from_now_on() -> None:
    async def main() -> None:
        onward: list[int] = []
        all_taps = Taps(lambda record: onward.append(record.seq))
        with all_taps.open(frozenset({"n1"}), {"n1": 5}) as tap:
            for number in (5, 6):
                all_taps.feed(record(1.0, seq=number))
            all_taps.feed(record(1.0, node="n2", seq=9))
            assert [r.seq for r in await tap.batch(10.0)] == [6]
            assert await tap.batch(0.01) == []
            all_taps.feed(record(2.0, seq=1))  # the node has got a new disk, and counts anew
            assert [r.seq for r in await tap.batch(10.0)] == [1]
        all_taps.feed(record(1.0, seq=7))
        assert await tap.batch(0.01) == []
        assert onward == [5, 6, 9, 1, 7]

    asyncio.run(main())


def test_a_tap_that_is_not_read_is_bounded_and_says_what_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taps, "KEPT_MAX", 3)

    async def main() -> None:
        tap = Tap(frozenset(), {})
        for number in range(1, 8):
            tap.feed(record(float(number), seq=number))
        found = await tap.batch(10.0)
        assert [r.seq for r in found[:3]] == [1, 2, 3]
        assert (found[3].kind, found[3].v["records"], found[3].v["last"]) == ("gap", 4, 7)
        tap.feed(record(9.0, seq=8))
        assert [(r.kind, r.seq) for r in await tap.batch(10.0)] == [("log", 8)]

    asyncio.run(main())


def test_the_beginning_names_nodes_and_jobs_of_what_is_recorded() -> None:
    def node(name: str, rank: int) -> Node:
        ranks = [
            RankStatus(job="j", rank=rank, world_size=2, session=name, pid=1, epoch=0, step=1, connected=True)
        ]
        status = NodeStatus(
            node=name,
            url="",
            serial="",
            boot_id="",
            version="",
            now_unix_s=0.0,
            rack="r1",
            ranks=ranks,
            stream_seq=7,
        )
        return Node(name=name, url="u", reachable=True, status=status)

    nodes = {"n1": node("n1", 0), "n2": node("n2", 1), "n3": Node(name="n3", url="u", rack="r9")}
    told, before = beginning(nodes, frozenset(), 5.0)
    assert [(n.name, n.rack, n.spare) for n in told.nodes] == [
        ("n1", "r1", False), ("n2", "r1", False), ("n3", "r9", False),
    ]  # fmt: skip
    assert (told.jobs, before) == ({"j": {"0": "n1", "1": "n2"}}, {"n1": 7, "n2": 7})
    assert beginning(nodes, frozenset({"n2"}), 5.0)[0].jobs == {"j": {"1": "n2"}}
    with pytest.raises(Refused, match="no node n9"):
        beginning(nodes, frozenset({"n9"}), 5.0)


def test_the_header_is_strict_json(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.jsonl", HEADER, START_UNIX_S):
        pass
    header = json.loads((tmp_path / "a.jsonl").read_text())
    assert header["nodes"][0]["name"] == "n1"
    assert header["jobs"] == [{"id": "j", "ranks": {"0": "n1"}}]
