"""The nodes and jobs of a simulated fleet, and the one clock-like thing a node has: its uptime."""

import random
from typing import Any

import msgspec

from gridctl.model.findings import WatchedNode
from gridctl.simulate.settings import settings

START = "2026-11-01T00:00:00Z"
_BUSES = ("18", "2a", "3a", "5d", "9a", "ab", "ba", "db")


class Fleet(msgspec.Struct, frozen=True):
    """Who there is. `jobs`: name -> the nodes of its ranks, in order."""

    seed: str
    nodes: list[WatchedNode]
    jobs: dict[str, list[str]]

    def chance(self, what: str) -> random.Random:
        """Random numbers for one purpose: what another purpose draws changes nothing here."""
        return random.Random(f"{self.seed}/{what}")

    @property
    def gpus(self) -> int:
        """Of each node."""
        return self.nodes[0].gpus

    def job_of(self, node: str) -> str:
        return next((job for job, members in self.jobs.items() if node in members), "")

    def spares(self) -> list[str]:
        return [node.name for node in self.nodes if node.spare]

    def header(self, name: str) -> dict[str, Any]:
        """The first line of its recordings."""
        jobs = [
            {"id": job, "ranks": {str(rank): node for rank, node in enumerate(members)}}
            for job, members in self.jobs.items()
        ]
        nodes = msgspec.to_builtins(self.nodes)
        pace_s = float(settings().pace.sample_s)
        return {
            "recording": 1,
            "name": name,
            "start": START,
            "interval_s": pace_s,
            "nodes": nodes,
            "jobs": jobs,
        }


def fleet(nodes: int, seed: str, gpus: int = 0, rack_nodes: int = 0) -> Fleet:
    """A fleet of so many nodes; jobs side by side, the last nodes are spares."""
    layout = settings().layout
    rack_nodes = rack_nodes or layout.rack_nodes
    spares = max(1, int(nodes * layout.spare_share))
    all_nodes = []
    for index in range(nodes):
        rack = index // rack_nodes
        all_nodes.append(
            WatchedNode(
                name=f"r{rack + 1:02d}-n{index % rack_nodes + 1}",
                rack=f"r{rack + 1:02d}",
                nvlink_domain=f"d{rack + 1:02d}",
                cooling_zone=f"z{rack // layout.zone_racks + 1:02d}",
                gpus=gpus or layout.gpus,
                spare=index >= nodes - spares,
            )
        )
    jobs: dict[str, list[str]] = {}
    first = 0
    for number, share in enumerate(layout.job_shares, start=1):
        size = max(1, int(nodes * share))
        members = [node.name for node in all_nodes[first : first + size] if not node.spare]
        if members:
            jobs[f"train-{number}"] = members
        first += size
    return Fleet(seed, all_nodes, jobs)


def pci(gpu: int) -> str:
    """The address of a node's GPU, as NVML writes it in lower case."""
    return f"0000:{_BUSES[gpu % 8]}:{gpu // 8:02x}.0"


def uptime_s(node: str) -> float:
    """For how long the node had been up when the recording began; of its own for each."""
    return 100_000.0 + random.Random(f"uptime/{node}").random() * 3_000_000.0
