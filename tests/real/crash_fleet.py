"""The fleet of the crash matrix: real agents under a real controller, made as new after every cell."""

import contextlib
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from agents import Agent
from agents import Client as AgentClient
from fleet import Run, TrainingFleet
from forkserver import Process
from swap_fleet import wait_for

from gridctl.home import Home


class CrashFleet(TrainingFleet):
    """Ranks 0, 1, 2 on n1, n2, n3, spares on the last node. Rank 1 leaves, rank 0 has the chair."""

    def __init__(self, nodes: int = 4) -> None:
        super().__init__(nodes)
        self.homes = 0

    def agent(self, name: str = "n1", config: str = "") -> Agent:
        return super().agent(name, f'serial = "SN-{name}"\n{config}')

    def _fork(self, run: Run, what: str, argv: list[str], environment: dict[str, str]) -> Process:
        return super()._fork(run, what, argv, {**environment, **dict(run.job.env)})  # the spare's too

    def home(self) -> Home:
        """A new operator's home."""
        self.homes += 1
        folder = self.root / f"c{self.homes}"
        folder.mkdir()
        (folder / "trust").symlink_to(self.authority.trust_dir)
        home = Home.at(folder)
        nodes = [f'[[node]]\nname = "{a.name}"\nurl = "{a.url}"\n' for a in self.agents.values()]
        home.fleet_file.write_text("\n".join(['[fleet]\nname = "testfleet"\n', *nodes]))
        return home

    def ranks(self, job: str) -> list[Any]:
        """What the agents say of a job's processes: RankStatus."""
        return [rank for a in self.agents.values() for rank in a.client().status().ranks if rank.job == job]

    def let_go(self, left: str) -> None:
        """Makes all nodes as they were. `left`: a run that did not end; else every node must be free."""
        for agent in self.agents.values():
            client = agent.client()
            fence = wait_for(f"the lease on {agent.name} is free", partial(_leased, client))
            if left:
                client.op("run.end", run=left, holder="matrix", fence=fence)
            client.op("node.uncordon", run="matrix", holder="matrix", fence=fence)
            client.lease("matrix", fence, ttl_s=0.0)
            wait_for("no spare is left", partial(no_spare, client))


def _leased(client: AgentClient) -> int:
    fence = client.status().fence + 1
    return fence if client.lease("matrix", fence)["granted"] else 0


def no_spare(client: AgentClient) -> bool:
    spares = client.status().spares
    for spare in spares:
        with contextlib.suppress(ProcessLookupError):
            os.kill(spare.pid, signal.SIGKILL)
    return not spares


def sockets_of(pid: int) -> "Counter[str]":
    """TCP sockets of a process, by their state.

    The kernel's table is no snapshot: while other processes open and close theirs, a line may be read twice
    or not at all. So a count stands once it was read three times in a row.
    """
    last, again = _read_sockets(pid), 0
    while again < 2:
        found = _read_sockets(pid)
        last, again = found, again + 1 if found == last else 0
    return last


def _read_sockets(pid: int) -> "Counter[str]":
    names = {"01": "established", "0A": "listen"}
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd))
    states: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in inodes:
                states[words[9]] = names.get(words[3], words[3])
    return Counter(states.values())
