"""What an agent costs a node that does nothing, and one whose ranks report. Prints, asserts nothing.

usage: python benchmarks/agent_footprint.py [SECONDS]
"""

import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real"))

from agents import Agent, SessionPeer, fleet

REPORTS_PER_S = 4
STEPS_PER_REPORT = 5


def rss_mib(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize() / 2**20


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, agent: Agent, seconds: float, peers: list[SessionPeer]) -> None:
    assert agent.process is not None
    pid = agent.process.pid
    before, start_s, step = cpu_s(pid), time.monotonic(), 0
    while (now_s := time.monotonic()) < start_s + seconds:
        for rank, peer in enumerate(peers):
            entries = [[step + i, time.time(), 0.05, 2.5, 1.0] for i in range(STEPS_PER_REPORT)]
            peer.send("progress", job="j", rank=rank, epoch=0, entries=entries)
        step += STEPS_PER_REPORT
        time.sleep(1 / REPORTS_PER_S)
    share = (cpu_s(pid) - before) / (now_s - start_s)
    print(f"{name:<28} {rss_mib(pid):8.1f} MiB resident {share * 100:8.2f} % of a core")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    with fleet() as made:
        agent = made.agent().start()
        measure("idle", agent, seconds, [])
        peers = [made.peer(agent, job="j", rank=rank, world_size=8) for rank in range(8)]
        measure("8 ranks, 20 steps/s each", agent, seconds, peers)
        with agent.client("viewer").stream(0):
            measure("the same, one reader behind", agent, seconds, peers)


if __name__ == "__main__":
    main()
