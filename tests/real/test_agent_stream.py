"""What a node tells: the stream over restarts, its readers' certificates, recordings, metrics."""

import gzip
import http.client
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import DEADLINE_S, Agent, Fleet, Refused, fleet, wait_for

STEPS = 120


@pytest.fixture
def world() -> Iterator[Fleet]:
    with fleet() as made:
        yield made


class Reader:
    """Follows a node's stream in a thread and resumes after the last seq, as a controller does."""

    def __init__(self, agent: Agent) -> None:
        self.records: list[dict[str, Any]] = []
        self.stop = threading.Event()
        self._agent = agent
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self.stop.is_set():
            try:
                after = self.records[-1]["seq"] if self.records else 0
                with self._agent.client().stream(after) as stream:
                    for record in stream:
                        self.records.append(record)
                        if self.stop.is_set():
                            return
            except (OSError, http.client.HTTPException, json.JSONDecodeError, ValueError):
                self.stop.wait(0.05)

    def steps(self) -> list[int]:
        return [r["v"]["step"] for r in self.records if r["kind"] == "progress"]

    def end(self) -> None:
        self.stop.set()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()


def test_the_stream_goes_on_over_restarts_without_loss_or_repeat(world: Fleet) -> None:
    agent = world.agent().start()
    reader = Reader(agent)
    try:
        peer = world.peer(agent, job="j", rank=0, world_size=1)
        for step in range(STEPS):
            if step in (40, 80):  # what was told before must be there, whatever ends the agent
                wait_for("all steps arrived", lambda step=step: len(reader.steps()) == step)
                agent.end(signal.SIGKILL if step == 40 else signal.SIGTERM)
                agent.start()
                wait_for("the session is back", lambda: world.known(agent, peer.session))
            entry = [step, 1000.0 + step, 0.01, 1.5, None]
            peer.send("progress", job="j", rank=0, epoch=0, entries=[entry])
        wait_for("all steps arrived", lambda: len(reader.steps()) >= STEPS)
    finally:
        reader.end()
    assert reader.steps() == list(range(STEPS))
    seqs = [record["seq"] for record in reader.records]
    assert seqs == list(range(1, len(seqs) + 1))
    beats = [r for r in reader.records if r["kind"] == "beat"]
    assert [beat["v"]["seq"] for beat in beats].count(1) == 3  # one for every start
    assert {(r["node"], r["boot"]) for r in reader.records} == {("n1", agent.client().status().boot_id)}
    with agent.client().stream(after=7) as stream:
        assert next(stream) == reader.records[7]


def test_a_full_spool_drops_its_oldest_and_says_so(world: Fleet) -> None:
    agent = world.agent(config="spool_bytes_max = 20000\n").start()
    peer = world.peer(agent, job="j", rank=0, world_size=1)
    entries = [[step, 1000.0, 0.01, 1.5, None] for step in range(20)]

    def tell() -> bool:
        peer.send("progress", job="j", rank=0, epoch=0, entries=entries)
        return len(list((agent.home / "spool").glob("*.jsonl"))) > 2

    wait_for("several segments", tell)
    first = agent.home / "spool" / f"{1:020d}.jsonl"
    wait_for("the oldest segment is gone", lambda: tell() and not first.exists())
    with agent.client().stream(0) as stream:
        seqs = []
        for record in stream:
            seqs.append(record["seq"])
            if record["kind"] == "gap":
                break
    gap = record["v"]
    assert (gap["first"], gap["records"]) == (1, gap["last"])
    assert seqs == list(range(seqs[0], seqs[-1] + 1))
    assert seqs[0] > gap["last"]


def test_readers_only_and_not_once_revoked(world: Fleet) -> None:
    agent = world.agent().start()
    with pytest.raises(AssertionError, match="forbidden"), agent.client("n1").stream(0):
        pass
    with agent.client("viewer").stream(0) as stream:
        assert next(stream)["seq"] == 1
        world.authority.revoke("viewer/viewer-1")
        agent.client().request("PUT", "/v1/crl", world.authority.crl_pem())
        for _ in stream:  # ends: the agent closes it
            pass
    with pytest.raises(Refused, match="revoked"):
        agent.client("viewer").status()
    for who, pem in (("viewer", b""), ("n1", world.authority.crl_pem())):
        with pytest.raises(Refused, match="forbidden"):
            agent.client(who).request("PUT", "/v1/crl", pem)
    with pytest.raises(Refused, match="bad-request"):
        agent.client().request("PUT", "/v1/crl", b"nonsense")


LINES: list[dict[str, Any]] = [
    {
        "recording": 1,
        "name": "t",
        "start": "2026-11-01T00:00:00Z",
        "interval_s": 1.0,
        "nodes": [],
        "jobs": [],
    },
    {"t": 0.0, "node": "r1", "kind": "sample", "device": "gpu:0", "v": {"temp_c": 61.0, "ecc_sbe_total": 4}},
    {"t": 0.0, "node": "r2", "kind": "sample", "device": "gpu:0", "v": {"temp_c": 99.0}},
    {"t": 0.5, "node": "r1", "kind": "beat", "boot": "b", "seq": 1},
    {"t": 0.5, "node": "r1", "kind": "progress", "job": "x", "rank": 0, "step": 1},
    {"t": 1.0, "node": "r1", "kind": "log", "source": "kmsg", "line": "NVRM: Xid 48 \x1b[31m\u2028 {0} %s"},
    {"t": 2.0, "node": "r1", "kind": "sample", "device": "gpu:0", "v": {"temp_c": 70.5, "ecc_sbe_total": 9}},
]


def recorded(agent: Agent, name: str) -> Path:
    path = agent.home / name
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_recording_stands_in_for_the_hardware_once_it_is_triggered(world: Fleet) -> None:
    source = "replay:rec.jsonl.gz?node=r1&speed=20&start=trigger"
    agent = world.agent(config=f"sources = [{json.dumps(source)}]\n")
    recorded(agent, "rec.jsonl.gz")
    agent.start()
    with agent.client().stream(0) as stream:
        beats = 0
        for record in stream:
            assert record["kind"] == "beat"
            if (beats := beats + 1) == 2:
                break
        (agent.home / "replay.go").touch()
        played = []
        for record in stream:
            if record["kind"] != "beat":
                played.append({"kind": record["kind"], **record["v"]})
            if len(played) == 3:
                break
    wanted = [line for line in LINES[1:] if line["node"] == "r1" and line["kind"] in ("sample", "log")]
    assert played == [{k: v for k, v in line.items() if k not in ("t", "node")} for line in wanted]
    text = agent.client("viewer").request("GET", "/metrics").decode()
    assert 'gridagent_gpu_temp_celsius{device="gpu:0"} 70.5' in text.splitlines()
    assert 'gridagent_gpu_ecc_sbe_total{device="gpu:0"} 9.0' in text.splitlines()


def test_a_recording_that_breaks_off_is_told_and_ends_nothing(world: Fleet) -> None:
    agent = world.agent(config='sources = ["replay:rec.jsonl?node=r1"]\n')
    path = recorded(agent, "rec.jsonl")
    path.write_text(path.read_text()[:120] + "\n{broken")
    agent.start()
    with agent.client().stream(0) as stream:
        note = next(record for record in stream if record["kind"] == "note")
        assert "failed and is silent now" in note["v"]["text"]
        assert next(record for record in stream if record["kind"] == "beat")
