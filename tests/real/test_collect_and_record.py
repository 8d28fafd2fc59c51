"""`gridctl collect` and `gridctl record` with real agents and a real controller."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, DEADLINE_S, data, environment, gridctl
from swap_fleet import SwapFleet, swap_fleet, wait_for

from gridagent.journal import read
from gridctl.model.runs import Incident

RECORDING = Path(__file__).parents[2] / "recordings" / "ecc-storm.jsonl.gz"


@pytest.fixture
def fleet() -> Iterator[SwapFleet]:
    with swap_fleet() as made:
        yield made


def audits(fleet: SwapFleet) -> list[dict[str, Any]]:
    return [r.data for r in read(fleet.home.journal) if r.data.get("what") == "evidence"]


def test_evidence_of_a_node_is_fetched_checked_and_journaled(fleet: SwapFleet) -> None:
    fleet.nodes("n1", "n2")
    calls = data(fleet.root, "collect", "n1", "--dry-run")
    assert [call["url"].partition("/v1/")[2] for call in calls] == ["status", "ops", "evidence/ID"]
    assert audits(fleet) == []
    out = fleet.root / "here"
    found = json.loads(gridctl(fleet.root, "collect", "n1", "--out", str(out), "-o", "json").stdout)
    file = Path(found["file"])
    assert file.parent == out
    assert hashlib.sha256(file.read_bytes()).hexdigest() == found["sha256"]
    with tarfile.open(file) as archive:
        assert {"manifest.json", "spool.jsonl", "status.json"} <= set(archive.getnames())
    asked, taken = audits(fleet)
    assert (asked["state"], taken["state"], taken["sha256"]) == ("asked", "collected", found["sha256"])
    assert "@" in taken["who"]
    fleet.agents["n2"].end()
    gone = gridctl(fleet.root, "collect", "n2", "--out", str(out), expect=5)
    assert "n2 does not answer" in gone.stderr
    assert "nobody tries again" in gone.stderr
    assert audits(fleet)[-1]["code"] == "node-unreachable"
    assert "n9" in gridctl(fleet.root, "collect", "n9", expect=4).stderr
    assert "read-only" in gridctl(fleet.root, "--read-only", "collect", "n1", expect=3).stderr
    (fleet.root / "no").write_text("a file")
    refused = gridctl(fleet.root, "collect", "n1", "--out", str(fleet.root / "no"), expect=3)
    assert "choose another --out" in refused.stderr


def test_an_incidents_evidence_is_taken_once_and_what_is_recorded_replays_as_it_was_live(
    fleet: SwapFleet,
) -> None:
    fleet.nodes("n1")
    fleet.nodes("n2", config=f'sources = ["replay:{RECORDING}?node=n2&speed=40&start=trigger"]')
    client = fleet.controller()
    wait_for("both are followed", lambda: {"n1", "n2"} <= client.health()["followed"].keys())
    file = fleet.root / "live.jsonl.gz"
    command = [*COMMAND, "record", "--out", str(file)]
    with subprocess.Popen(
        command, env=environment(fleet.root), stderr=subprocess.PIPE, text=True
    ) as recorder:
        assert recorder.stderr
        assert "recording 2 nodes" in recorder.stderr.readline()
        begun = client.health()["followed"]["n1"]
        wait_for("it has begun", lambda: client.health()["followed"]["n1"] > begun + 1)
        (fleet.agents["n2"].home / "replay.go").touch()
        incident = wait_for("an incident opens", lambda: next(iter(client.view("incidents", Incident)), None))
        shown = gridctl(fleet.root, "incident", "show", incident.id).stdout
        assert f"gridctl collect {incident.id}" in shown
        first = data(fleet.root, "collect", incident.id, "--out", str(fleet.root))
        again = data(fleet.root, "collect", incident.id, "--out", str(fleet.root / "again"))
        assert (again["id"], again["sha256"]) == (first["id"], first["sha256"])
        assert first["incident"] == incident.id
        assert first["file"] in gridctl(fleet.root, "incident", "show", incident.id).stdout
        wait_for("it is decided", lambda: client.one("incident", incident.id, Incident).decision)
        told = findings(fleet)
        seen = fleet.agents["n2"].client().status().stream_seq
        wait_for("the stream is heard to here", lambda: client.health()["followed"]["n2"] > seen)
        recorder.send_signal(signal.SIGINT)
        assert recorder.wait(DEADLINE_S) == 0, recorder.stderr.read()
    with gzip.open(file, "rt") as lines:
        assert json.loads(lines.readlines()[0])["recording"] == 1
    replayed = subprocess.run(
        [*COMMAND, "replay", str(file), "-o", "json"],
        env=environment(fleet.root),
        capture_output=True,
        check=True,
    )
    assert b"could not be read" not in replayed.stderr
    lines = [json.loads(line) for line in replayed.stdout.splitlines()]
    found = [(x["node"], x["kind"], x["device"]) for x in lines if x["type"] == "finding"]
    assert found[: len(told)] == told
    assert ("n2", "faulty") in [(x["node"], x["kind"]) for x in lines if x["type"] == "verdict"]


def findings(fleet: SwapFleet) -> list[tuple[str, str, str]]:
    """What the watchdog has found, live."""
    records = [
        r.data for r in read(fleet.home.journal) if r.kind == "finding" and r.data["type"] == "finding"
    ]
    return [(d["node"], d["kind"], d["device"].removeprefix("pci:")) for d in records]


def test_a_recording_ends_after_its_time_and_has_the_nodes_that_were_named(fleet: SwapFleet) -> None:
    line = "a line of two\u2028lines"
    log = fleet.root / "a.log"
    log.write_text("")
    fleet.nodes("n1", "n2", config=f'sources = ["log:{log}?as=torch"]')
    client = fleet.controller()
    wait_for("both are followed", lambda: {"n1", "n2"} <= client.health()["followed"].keys())
    log.write_text(f"{line}\n")
    file = fleet.root / "short.jsonl"
    gridctl(fleet.root, "record", "--out", str(file), "--node", "n1", "--for", "3s")
    lines = [json.loads(text) for text in file.read_text().split("\n")[:-1]]
    assert {record["node"] for record in lines[1:]} == {"n1"}
    assert [node["name"] for node in lines[0]["nodes"]] == ["n1"]
    assert "beat" in {record["kind"] for record in lines[1:]}
    before = file.read_bytes()
    for arguments, code in (
        (("--out", str(file)), 2),
        (("--out", str(fleet.root / "x.zst")), 2),
        (("--out", str(fleet.root / "y.jsonl"), "--for", "soon"), 2),
        (("--out", str(fleet.root / "y.jsonl"), "--node", "n9"), 4),
    ):
        gridctl(fleet.root, "record", *arguments, expect=code)
    assert file.read_bytes() == before
    assert not (fleet.root / "y.jsonl").exists()
    seen = fleet.agents["n1"].client().status().stream_seq
    wait_for("the line ended no stream", lambda: client.health()["followed"]["n1"] > seen)


def test_a_controller_that_dies_ends_the_recording_well(fleet: SwapFleet) -> None:
    fleet.nodes("n1")
    client = fleet.controller()
    wait_for("it is followed", lambda: "n1" in client.health()["followed"])
    file = fleet.root / "cut.jsonl.gz"
    command = [*COMMAND, "record", "--out", str(file)]
    with subprocess.Popen(
        command, env=environment(fleet.root), stderr=subprocess.PIPE, text=True
    ) as recorder:
        assert recorder.stderr
        recorder.stderr.readline()
        begun = client.health()["followed"]["n1"]
        wait_for("records come", lambda: client.health()["followed"]["n1"] > begun + 2)
        os.kill(fleet.controller_pid(), signal.SIGKILL)
        assert recorder.wait(DEADLINE_S) == 5
        assert "no controller answers" in recorder.stderr.read()
    with gzip.open(file, "rt") as lines:
        assert len(lines.readlines()) > 1, "the file was closed, to its last byte"
