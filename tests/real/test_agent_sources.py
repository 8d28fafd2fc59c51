"""A real agent over a tree of files in the place of a node's /sys, /proc and /dev."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import Agent, Fleet, fleet

Record = dict[str, Any]


@pytest.fixture
def world() -> Iterator[Fleet]:
    with fleet() as made:
        yield made


def node_of(root: Path) -> None:
    for name, text in {
        "proc/sys/kernel/random/boot_id": "boot-of-the-tree",
        "proc/loadavg": "1.5 1 1 1/2 3",
        "sys/class/net/eth5/operstate": "up",
        "sys/class/net/eth5/device/vendor": "0x15b3",
        "sys/devices/system/edac/mc/mc0/ce_count": "6",
        "sys/devices/system/edac/mc/mc0/ue_count": "0",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    (root / "dev").mkdir()


def kernel_says(root: Path, seq: int, text: str) -> None:
    with (root / "dev/kmsg").open("a") as ring:
        ring.write(f"4,{seq},{int(time.monotonic() * 1e6)},-;{text}\n")


def until(agent: Agent, after: int, enough: Callable[[list[Record]], bool]) -> list[Record]:
    found: list[Record] = []
    with agent.client().stream(after) as stream:
        for record in stream:
            found.append(record)
            if enough(found):
                break
    return found


def said(records: list[Record]) -> list[str]:
    return [record["v"]["line"].partition(";")[2] for record in records if record["kind"] == "log"]


def told(records: list[Record], device: str, metric: str) -> list[Any]:
    samples = [record["v"] for record in records if record["kind"] == "sample"]
    return [v["v"][metric] for v in samples if v["device"] == device and metric in v["v"]]


def test_files_become_records_and_a_restart_tells_no_line_twice(world: Fleet, tmp_path: Path) -> None:
    node_of(tmp_path)
    kernel_says(tmp_path, 1, "first")
    sources = ["kmsg", "ethernet?interval=0.2", "edac", "system", "rapl", "infiniband"]
    agent = world.agent(config=f"sources = {json.dumps(sources)}\nsysroot = {json.dumps(str(tmp_path))}\n")
    agent.start()
    devices = ("nic:eth5", "state"), ("node", "edac_ce_total"), ("node", "load1")
    found = until(agent, 0, lambda seen: bool(said(seen)) and all(told(seen, *what) for what in devices))
    assert said(found) == ["first"]
    assert {record["boot"] for record in found} == {"boot-of-the-tree"}
    assert "gridagent_node_edac_ce_total" in agent.client("viewer").request("GET", "/metrics").decode()
    agent.end(signal.SIGTERM)
    kernel_says(tmp_path, 2, "while nobody listened")
    agent.start()
    kernel_says(tmp_path, 3, "and after")
    more = until(agent, found[-1]["seq"], lambda seen: "and after" in said(seen))
    assert said(more) == ["while nobody listened", "and after"]


def test_a_file_that_hangs_silences_one_source_only(world: Fleet, tmp_path: Path) -> None:
    node_of(tmp_path)
    state = tmp_path / "sys/class/net/eth5/operstate"
    state.unlink()
    os.mkfifo(state)
    sources = ["ethernet?interval=0.1&deadline=0.2", "system?interval=0.1"]
    agent = world.agent(config=f"sources = {json.dumps(sources)}\nsysroot = {json.dumps(str(tmp_path))}\n")
    agent.start()

    def hangs(seen: list[Record]) -> bool:
        return any(record["v"].get("state") == "hang" for record in seen)

    until(agent, 0, hangs)
    found = until(agent, 0, lambda seen: hangs(seen) and len(told(seen, "node", "load1")) > 10)
    assert sum(record["v"].get("state") == "hang" for record in found) == 1
    assert agent.end(signal.SIGTERM) == 0
