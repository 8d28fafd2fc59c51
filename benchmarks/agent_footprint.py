"""What an agent costs a node that does nothing, one whose ranks report, and one with eight GPUs at 1 Hz.

The GPUs are the tests' stub of NVML, read through the real nvidia-ml-py in the agent's own child process; it
answers at once, so what a driver takes for a call is not in the figures. Prints, asserts nothing.

usage: python benchmarks/agent_footprint.py [SECONDS]
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real"))

from agents import Agent, SessionPeer, fleet, wait_for
from nvml_stub import Stub, compiled

REPORTS_PER_S = 4
STEPS_PER_REPORT = 5


def rss_mib(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 2**20


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    task = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in task.read_text().split()]


def measure(
    name: str, agent: Agent, seconds: float, peers: Sequence[SessionPeer] = (), scraped_each_s: float = 0.0
) -> None:
    """`scraped_each_s`: how often somebody reads /metrics meanwhile; 0: nobody."""
    assert agent.process is not None
    pids = [agent.process.pid, *children(agent.process.pid)]
    before, start_s, step = [cpu_s(pid) for pid in pids], time.monotonic(), 0
    scrape_s, client = start_s, agent.client("viewer")
    while (now_s := time.monotonic()) < start_s + seconds:
        for rank, peer in enumerate(peers):
            entries = [[step + i, time.time(), 0.05, 2.5, 1.0] for i in range(STEPS_PER_REPORT)]
            peer.send("progress", job="j", rank=rank, epoch=0, entries=entries)
        step += STEPS_PER_REPORT
        if scraped_each_s and now_s >= scrape_s:
            scrape_s += scraped_each_s
            client.request("GET", "/metrics")
        time.sleep(1 / REPORTS_PER_S)
    shares = [
        (cpu_s(pid) - used_s) / (now_s - start_s) * 100 for pid, used_s in zip(pids, before, strict=True)
    ]
    sizes = [rss_mib(pid) for pid in pids]
    parts = f" ({' + '.join(f'{size:.1f}' for size in sizes)}; {' + '.join(f'{s:.2f}' for s in shares)})"
    total = f"{sum(sizes):8.1f} MiB resident {sum(shares):8.2f} % of a core"
    print(f"{name:<30} {total}{parts if sizes[1:] else ''}", flush=True)


def with_gpus(seconds: float) -> None:
    """Agent + the process that reads NVML."""
    with tempfile.TemporaryDirectory() as folder, fleet() as made:
        stub = Stub(Path(folder))
        stub.set("count", 8)
        library = compiled(Path(folder) / "library", "-DFIXED")
        os.environ.update(GPU_STUB=folder, LD_LIBRARY_PATH=str(library))
        agent = made.agent(config='sources = ["nvml"]').start()
        text = "DCGM_FI_DEV_ROW_REMAP_PENDING{"
        wait_for("all GPUs", lambda: agent.client().request("GET", "/metrics").decode().count(text) == 8)
        measure("8 GPUs at 1 Hz", agent, seconds)
        measure("8 GPUs, scraped every 15 s", agent, seconds, scraped_each_s=15.0)


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with fleet() as made:
        agent = made.agent().start()
        measure("idle", agent, seconds)
        peers = [made.peer(agent, job="j", rank=rank, world_size=8) for rank in range(8)]
        measure("8 ranks, 20 steps/s each", agent, seconds, peers)
        with agent.client("viewer").stream(0):
            measure("the same, one reader behind", agent, seconds, peers)
    with_gpus(seconds)


if __name__ == "__main__":
    main()
