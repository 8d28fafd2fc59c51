"""A fleet on this machine: four agents with certificates and addresses of their own, and a job on them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gridctl.demo.errors import DemoError
from gridctl.errors import ConfigError
from gridctl.home import Home

FLEET = "demo"
NODES = ("n1", "n2", "n3", "n4")
SPARE = "n4"
READY_S = 90.0
POLL_S = 0.1


def address(node: str) -> str:
    """Every node has its own address on the loopback network."""
    return f"127.0.0.{10 + NODES.index(node)}"


class DemoFleet:
    """Everything that the demo starts. `close` leaves nothing running."""

    def __init__(self, root: Path, ranks_per_node: int) -> None:
        self.root = root
        self.home = Home.at(root / "operator")
        self.ranks_per_node = ranks_per_node
        self.world_size = ranks_per_node * 3
        self._children: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.environ = {**os.environ, "GRIDCTL_HOME": str(root / "operator"), "GRIDCTL_DEMO": str(root)}
        self.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(root))
        for name in (
            "GRIDAGENT_SOCKET",
            "GRIDAGENT_HOME",
            "RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        ):
            self.environ.pop(name, None)

    def has_room(self) -> bool:
        """Is every path short enough for a Unix socket? The controller's is the longest."""
        try:
            return bool(self.home.socket)
        except ConfigError:
            return False

    def found(self, recording: Path) -> None:
        """Writes certificates and configuration. The second node's hardware plays `recording`."""
        from gridctl.trust import Authority

        self.home.config.mkdir(parents=True)
        authority = Authority.ephemeral(self.home.trust, FLEET)
        authority.write_identity(self.home.trust, "operator", os.environ.get("USER") or "operator", [], 7)
        for node in NODES:
            folder = self.root / node
            folder.mkdir()
            authority.write_identity(folder / "trust", "node", node, [address(node)], 7)
            source = f'sources = ["replay:{recording}?node=n2&start=trigger"]' if node == "n2" else ""
            (folder / "agent.toml").write_text(
                f'node = "{node}"\nlisten = "{address(node)}:0"\nrack = "r1"\n'
                f'serial = "DEMO-{node.upper()}"\ngpus = 8\n'
                f'gpu_model = "none (CPU demo)"\ndriver = "none"\n{source}\n'
            )

    def start_agents(self, *, drill: bool) -> None:
        """Starts the four agents and writes fleet.toml. `drill`: they allow damage. Raises `DemoError`."""
        options = ["--allow-damage"] if drill else []
        for node in NODES:
            words = [*_gridagent("serve"), "--home", str(self.root / node), *options]
            self._spawn(f"agent {node}", words, node)
        lines = ["[fleet]", f'name = "{FLEET}"']
        for node in NODES:
            url_file = self.root / node / "url"
            self.wait(url_file.exists, f"the agent of {node} to listen")
            lines += [
                "[[node]]",
                f'name = "{node}"',
                f'url = "{url_file.read_text().strip()}"',
                'rack = "r1"',
            ]
        self.home.fleet_file.write_text("\n".join(lines) + "\n")

    def start_spares(self, count: int) -> None:
        for index in range(count):
            words = [*_gridagent("park"), "--home", str(self.root / SPARE)]
            self._spawn(f"spare {index}", words, SPARE, {"CUDA_VISIBLE_DEVICES": str(index)})

    def start_job(self, job: str, port: int, *, fsdp: bool, damaged: str = "", damage: str = "") -> None:
        """Starts one rank a process, `ranks_per_node` on each of the first three nodes."""
        folder = self.root / job
        folder.mkdir()
        for rank in range(self.world_size):
            node, local_rank = NODES[rank // self.ranks_per_node], rank % self.ranks_per_node
            words = [*_gridagent("exec"), "--home", str(self.root / node), "--job", job, "--"]
            words += [sys.executable, "-m", "gridctl.demo.train", str(folder), str(folder / "stop")]
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_RANK": str(local_rank),
                "MASTER_ADDR": address("n1"),
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": str(local_rank),
                "GRIDAGENT_DAMAGE": damage if node == damaged else "",
            }
            self._spawn(f"{job} rank {rank}", words + (["--fsdp"] if fsdp else []), node, environ)

    def step(self, job: str) -> int:
        """The newest step that every rank of the job has written down; -1 before the first."""
        return min(self._last_step(job, rank) for rank in range(self.world_size))

    def _last_step(self, job: str, rank: int) -> int:
        rows = read_log(self.root / job, rank)
        return int(str(rows[-1][0])) if rows else -1

    def stop_job(self, job: str, step: int) -> None:
        """The job ends before `step`, on every rank."""
        file = self.root / job / "stop"
        file.with_suffix(".new").write_text(str(step))
        file.with_suffix(".new").rename(file)
        done = [self.root / job / f"digests-{rank}.json" for rank in range(self.world_size)]
        self.wait(lambda: all(path.exists() for path in done), f"job {job} to end at step {step}", 150.0, job)

    def trigger_fault(self) -> None:
        (self.root / "n2" / "replay.go").touch()

    def wait(self, ready: Callable[[], bool], what: str, timeout_s: float = READY_S, job: str = "") -> None:
        """Waits until `ready()`; raises `DemoError` at the deadline, or if a process failed meanwhile."""
        until_s = time.monotonic() + timeout_s
        while not ready():
            for name, child in self._children:
                if child.poll() not in (None, 0):
                    raise DemoError(
                        f"{name} ended with {child.returncode} while waiting for {what}", self.tail(name)
                    )
            if time.monotonic() > until_s:
                raise DemoError(f"{what} took longer than {timeout_s:.0f} s", self.tail(job or "agent n1"))
            time.sleep(POLL_S)

    def tail(self, name: str) -> str:
        """The end of what a child wrote, for an error message."""
        logs = sorted(self.root.glob(f"{name.replace(' ', '-')}*.log"))
        return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs)

    def _spawn(self, name: str, words: list[str], node: str, environ: dict[str, str] | None = None) -> None:
        with (self.root / f"{name.replace(' ', '-')}.log").open("wb") as log:
            child = subprocess.Popen(
                words,
                env={**self.environ, "GRIDAGENT_HOME": str(self.root / node), **(environ or {})},
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append((name, child))

    def close(self) -> None:
        """Ends every process that was started here, also those that our children started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            alive = list(self._living())
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until_s = time.monotonic() + 5.0
            while time.monotonic() < until_s and any(True for _ in self._living()):
                for _, child in self._children:
                    child.poll()
                time.sleep(0.05)

    def _living(self) -> Iterator[int]:
        """Processes whose environment carries this demo's mark: a spare's agent may start further ones."""
        mark = f"GRIDCTL_DEMO={self.root}".encode()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def read_log(folder: Path, rank: int) -> list[list[object]]:
    """What a rank wrote: [step, loss as float.hex, unix time, pid] for each step."""
    try:
        lines = (folder / f"rank-{rank}.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last line, while it is being written
            rows.append(json.loads(line))
    return rows


def _gridagent(command: str) -> list[str]:
    return [sys.executable, "-m", "gridagent", command]
