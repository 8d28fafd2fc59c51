"""A served agent with eight GPUs: what its pages show, what it weighs, what a hanging driver does to it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Agent, Fleet, fleet, wait_for
from nvml_stub import Stub, library, stub

__all__ = ["library", "stub"]  # fixtures

RSS_MIB_MAX = 80


@pytest.fixture
def agent(stub: Stub) -> Iterator[Agent]:
    stub.set("count", 8)
    with fleet() as world:
        yield served(world)


def served(world: Fleet) -> Agent:
    return world.agent(config='sources = ["nvml"]').start()


def children(pid: int) -> list[int]:
    """Processes of an agent that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(stat.parent.name))
    return found


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def metrics(agent: Agent) -> str:
    return agent.client().request("GET", "/metrics").decode()


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


def test_eight_gpus_are_on_the_pages_and_the_agent_is_light(agent: Agent) -> None:
    assert agent.process is not None
    wait_for("all GPUs on the page", lambda: metrics(agent).count("gridagent_gpu_remap_pending{") == 8)
    page = metrics(agent)
    assert 'gridagent_gpu_temp_celsius{device="gpu:7"} 41.0' in page
    assert 'gridagent_gpu_lost{device="gpu:0"} 0.0' in page
    (child,) = children(agent.process.pid)
    assert rss_mib(agent.process.pid) <= RSS_MIB_MAX
    assert rss_mib(child) <= RSS_MIB_MAX
    with agent.client().stream(0) as records:
        sample = next(record["v"] for record in records if record["kind"] == "sample")
    assert (sample["device"], sample["pci"], sample["serial"]) == ("gpu:0", "0000:1a:00.0", "7700000000")


def test_a_hanging_driver_holds_up_neither_the_agent_nor_its_end(agent: Agent, stub: Stub) -> None:
    assert agent.process is not None
    client = agent.client()
    stub.set("3/temp", "hang")
    wait_for("a call hangs", lambda: stub.lines("hanging"))
    with client.stream(0) as records:
        kinds = (record["kind"] for record in records)
        assert [kind for kind, _ in zip(kinds, range(20), strict=False)].count("beat") > 0
    assert client.status().node == "n1"
    assert agent.end() == 0


def test_a_hanging_child_does_not_outlive_a_killed_agent(agent: Agent, stub: Stub) -> None:
    assert agent.process is not None
    stub.set("3/temp", "hang")
    wait_for("a call hangs", lambda: stub.lines("hanging"))
    left = children(agent.process.pid)
    agent.end(signal.SIGKILL)
    wait_for("its processes end", lambda: not any(map(runs, left)))
