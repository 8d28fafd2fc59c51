"""How long a job stands still when a node leaves it: gridctl's swap beside what else there is, in one run.

  gridctl         `gridctl demo`: real agents, controller, hand-over; a planned swap of one of three ranks
  torchrun        elastic restart of the same job: DDP over gloo, a checkpoint every ten steps, one of three
                  ranks killed halfway between two checkpoints; as it is, and with DDP's buckets pinned
  torchft         the same job as three replica groups and a spare; one group leaves politely; with the
                  lighthouse's own timeouts (heartbeat 5 s, join 60 s), and with 1 s for both

Pause: the worst excess of a step-to-step time over the median of all steps, on any rank; a step counts when
it is done for the first time. For gridctl from prepare to the end of watch, else from the leaving on.
Redone: steps that a rank did once more, at most. Identical: do all losses of all ranks equal, bit by bit,
those of the same system's undisturbed run?

torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: without it torch 2.13 keeps one store for all
restarts, new gloo workers read the addresses of dead ones, and the job uses up its restarts and ends (pytorch
issues 135712, 167288). torchft is no dependency of ours: `--install-torchft` installs torchft-nightly, for
this run only, into a throw-away environment that sees this one's torch.

usage: python benchmarks/swap_pause.py [--repetitions 3] [--install-torchft] [--only gridctl torchrun torchft]
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.launch import processes, wait

PEERS = Path(__file__).parent / "peers"
WORLD = 3
STEPS = 34
LEAVES_AT = 15  #: halfway between the checkpoints at 10 and 20
WARM_STEPS = 3  #: the first steps-to-step times say how a process starts


@dataclass(frozen=True)
class Row:
    """One step that some process did."""

    step: int
    loss: str
    t_unix_s: float
    pid: int
    rank: int | None  #: None: a spare


@dataclass
class Result:
    """One repetition of one system."""

    pause_ms: float
    redone: int
    identical: bool
    note: str = ""
    parts: dict[str, float] = field(default_factory=dict)


def rows(folder: Path, lane: int) -> list[Row]:
    """What was written to one log so far."""
    file = folder / f"rank-{lane}.jsonl"
    text = file.read_text() if file.exists() else ""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line, while it is being written
            found.append(Row(*json.loads(line)))
    return found


def pause_ms(lanes: list[list[Row]], since_unix_s: float) -> float:
    """The worst excess of a time between two new steps over the median, in any log, after `since_unix_s`."""
    worst = 0.0
    for lane in lanes:
        first: dict[int, float] = {}
        for row in lane:
            first.setdefault(row.step, row.t_unix_s)
        times = [first[step] for step in sorted(first)][WARM_STEPS:]
        gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(times)]
        median = statistics.median(gap for _, gap in gaps)
        worst = max([worst, *(gap - median for end, gap in gaps if end >= since_unix_s)])
    return worst * 1e3


def redone(lanes: list[list[Row]]) -> int:
    """Steps that were done a second time, in the log that has most of them."""
    return max(len(lane) - len({row.step for row in lane}) for lane in lanes)


def losses(lanes: list[list[Row]]) -> dict[tuple[int, int], str]:
    """(step, rank) -> the loss that counts: the last one."""
    return {(row.step, row.rank): row.loss for lane in lanes for row in lane if row.rank is not None}


# ------------------------------------------------------------------------------------------ the systems


class Gridctl:
    """The product, through its own demo, which compares with an undisturbed run by itself."""

    name = "gridctl swap"

    def measure(self, _folder: Path) -> Result:
        words = [sys.executable, "-c", "from gridctl.cli import main; main()", "demo"]
        words += ["--yes", "--reason", "benchmark", "-o", "json"]
        done = subprocess.run(words, capture_output=True, text=True)
        if not done.stdout:
            raise SystemExit(f"gridctl demo ended with {done.returncode}\n{done.stderr[-3000:]}")
        report: dict[str, Any] = json.loads(done.stdout)
        pause, steps = report["pause"], report["steps"]
        same = [*report["ranks"], *report["digests"].values()]
        parts = {"cut": pause["cut_ms"], "prepare": pause["prepare_excess_ms"], **pause["parts_ms"]}
        note = f"{steps['lost']} lost, {report['bytes'] / 1e6:.1f} MB moved"
        identical = all(one["identical"] for one in same)
        return Result(pause["worst_excess_ms"], steps["repeated"], identical, note, parts)


class Torchrun:
    """Elastic restart; one worker is killed."""

    def __init__(self, *options: str) -> None:
        self.options = options
        self.name = f"torchrun restart{', pinned buckets' if options else ''}"
        self._undisturbed: dict[tuple[int, int], str] = {}

    def measure(self, folder: Path) -> Result:
        if not self._undisturbed:
            self._undisturbed = losses(self._run(folder / "undisturbed", kill=False)[0])
        lanes, killed_s = self._run(folder / "killed", kill=True)
        new = min(row.t_unix_s for row in lanes[0] if row.t_unix_s > killed_s and row.pid != lanes[0][0].pid)
        note = f"first step executed {new - killed_s:.1f} s after the kill"
        same = losses(lanes) == self._undisturbed
        return Result(pause_ms(lanes, killed_s), redone(lanes), same, note)

    def _run(self, folder: Path, *, kill: bool) -> tuple[list[list[Row]], float]:
        folder.mkdir(parents=True)
        log, killed_s = folder / "log", 0.0
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
        words += ["--max-restarts=3", str(PEERS / "elastic.py"), str(folder), str(STEPS), *self.options]
        with processes(log) as start:
            job = start(words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
            if kill:
                wait("the job's first steps", log, lambda: len(rows(folder, 1)) >= LEAVES_AT)
                killed_s = time.time()
                os.kill(rows(folder, 1)[-1].pid, signal.SIGKILL)
            wait("torchrun's job", log, lambda: job.poll() is not None)
            if job.returncode:
                raise SystemExit(f"torchrun ended with {job.returncode}\n{log.read_text()[-3000:]}")
        return [rows(folder, rank) for rank in range(WORLD)], killed_s


class Torchft:
    """Three replica groups and a spare; the second group leaves."""

    def __init__(self, python: Path, heartbeat_ms: int, join_ms: int) -> None:
        self.python, self.heartbeat_ms, self.join_ms = python, heartbeat_ms, join_ms
        self.name = f"torchft leave, timeouts {heartbeat_ms / 1000:.0f} s, {join_ms / 1000:.0f} s"
        self._undisturbed: dict[tuple[int, int], str] = {}

    def measure(self, folder: Path) -> Result:
        if not self._undisturbed:
            self._undisturbed = losses(self._run(folder / "undisturbed", leaves=False))
        lanes = self._run(folder / "left", leaves=True)
        left_s = lanes[1][-1].t_unix_s
        ours = losses(lanes)
        differing = sorted(key for key, loss in self._undisturbed.items() if ours.get(key) != loss)
        note = f"first difference at step {differing[0][0]}" if differing else ""
        return Result(pause_ms([lanes[0], lanes[2]], left_s), redone(lanes), not differing, note)

    def _run(self, folder: Path, *, leaves: bool) -> list[list[Row]]:
        folder.mkdir(parents=True)
        log, groups = folder / "log", WORLD + 1
        serve = (
            "import time, torchft._torchft as t;"
            f"s = t.LighthouseServer(bind='127.0.0.1:0', min_replicas={WORLD},"
            f" join_timeout_ms={self.join_ms},"
            f" heartbeat_timeout_ms={self.heartbeat_ms});"
            f"open({str(folder / 'address')!r}, 'w').write(s.address() + '\\n'); time.sleep(1e6)"
        )
        address = folder / "address"
        with processes(log) as start:
            start([str(self.python), "-c", serve])
            wait("the lighthouse", log, lambda: address.exists() and address.read_text().endswith("\n"))
            children = []
            for group in range(groups):
                words = [str(self.python), str(PEERS / "torchft_group.py"), str(folder), str(STEPS)]
                words += [str(group), str(groups), str(LEAVES_AT if leaves and group == 1 else -1)]
                children.append(start(words, TORCHFT_LIGHTHOUSE=address.read_text().strip()))
            wait("torchft's job", log, lambda: all(child.poll() is not None for child in children[:WORLD]))
            if any(child.returncode for child in children[:WORLD]):
                raise SystemExit(f"a torchft group failed\n{log.read_text()[-3000:]}")
        return [rows(folder, group) for group in range(groups)]


def torchft_environment(folder: Path) -> Path:
    """A throw-away environment with torchft-nightly; sees the packages of this one. Returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    paths = {sysconfig.get_path("purelib"), str(Path(__file__).parents[1]), str(PEERS.parents[1] / "agent")}
    (Path(site) / "shared.pth").write_text("\n".join(sorted(paths)) + "\n")
    words = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "torchft-nightly"]
    subprocess.run(words, check=True)
    return python


# ----------------------------------------------------------------------------------------------- report


def span(values: list[float], unit: float = 1.0) -> str:
    """Median and range."""
    low, middle, high = min(values) / unit, statistics.median(values) / unit, max(values) / unit
    return f"{middle:.0f} ({low:.0f} to {high:.0f})" if len(values) > 1 else f"{middle:.0f}"


def show(results: dict[str, list[Result]]) -> None:
    base = statistics.median(r.pause_ms for r in next(iter(results.values())))
    print(f"\n{'':<34}{'pause ms, median (range)':>28}{'ratio':>8}{'redone':>8}  identical")
    for name, found in results.items():
        pauses = [result.pause_ms for result in found]
        ratio = statistics.median(pauses) / base if base > 0 else float("nan")
        again = "/".join(sorted({str(result.redone) for result in found}))
        same = f"{sum(result.identical for result in found)} of {len(found)}"
        print(f"{name:<34}{span(pauses):>28}{ratio:>8.1f}{again:>8}  {same}")
    for name, found in results.items():
        for part in found[0].parts:
            print(f"{name}, {part}: {span([result.parts[part] for result in found])} ms")
        for note in sorted({result.note for result in found if result.note}):
            print(f"{name}: {note}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--install-torchft", action="store_true")
    parser.add_argument("--only", nargs="+", choices=("gridctl", "torchrun", "torchft"))
    options = parser.parse_args()
    print(f"swap_pause: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start", flush=True)
    with tempfile.TemporaryDirectory(prefix="g") as temporary:
        root = Path(temporary)
        systems: list[Any] = [Gridctl(), Torchrun(), Torchrun("--pinned-buckets")]
        if options.install_torchft:
            python = torchft_environment(root / "torchft")
            systems += [Torchft(python, 5_000, 60_000), Torchft(python, 1_000, 1_000)]
        else:
            print("torchft is left out; --install-torchft installs it for this run", flush=True)
        systems = [s for s in systems if not options.only or type(s).__name__.lower() in options.only]
        results: dict[str, list[Result]] = {system.name: [] for system in systems}
        for number in range(options.repetitions):
            for system in systems:
                result = system.measure(root / f"{systems.index(system)}-{number}")
                results[system.name].append(result)
                print(f"round {number + 1}: {system.name}: {result}", flush=True)
        show(results)


if __name__ == "__main__":
    main()
