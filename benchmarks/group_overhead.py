"""What it costs that every collective goes through a forwarding group.

1. Microseconds a collective: small ones over gloo, bare and forwarded, in blocks that take turns; from Python
   (as scripts and FSDP2 call) and from C++ (as DDP's reducer calls); alone and with three ranks.
2. Times the number of collectives in a step of the demo's job, DDP and FSDP2, against the step's time.
3. The job itself over "gloo" and over "grid": two copies in the same three processes, one step of each in
   turn; and whole runs in pairs. Mean difference with a 95 % interval (Student's t).

usage: python benchmarks/group_overhead.py [--steps 200] [--pairs 4]
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.launch import run_ranks

PEERS = Path(__file__).parent / "peers"
WORLD = 3
#: 97.5 % quantile of Student's t by degrees of freedom; beyond, the normal one is near enough.
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
STUDENT |= {11: 2.20, 12: 2.18, 14: 2.14, 19: 2.09, 29: 2.05}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    count = len(values)
    if count < 2:
        return values[0], math.inf
    nearest = max((known for known in STUDENT if known <= count - 1), default=1)
    quantile = STUDENT[nearest] if count <= 31 else 1.96
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(count)


def trimmed(values: list[float]) -> list[float]:
    """Without the tenth at each end: a step in which the machine did something else says nothing."""
    cut = len(values) // 10
    return sorted(values)[cut : len(values) - cut]


def collectives(root: Path) -> dict[str, float]:
    """Prints the first table; returns the microseconds that forwarding adds with three ranks, by caller."""
    print(f"\n{'one collective, us':<22}{'ranks':>6}{'floats':>8}{'bare':>9}{'grid':>9}{'difference':>18}")
    added: dict[str, float] = {}
    for world in (1, WORLD):
        out = root / f"collectives-{world}.json"
        run_ranks([sys.executable, str(PEERS / "collectives.py"), str(out)], world, root / "log")
        for row in json.loads(out.read_text()):
            pairs = zip(row["forwarding"], row["bare"], strict=True)
            mean, half = interval(trimmed([grid - bare for grid, bare in pairs]))
            bare, grid = statistics.median(row["bare"]), statistics.median(row["forwarding"])
            print(
                f"{row['call']:<22}{row['world']:>6}{row['floats']:>8}{bare:>9.1f}{grid:>9.1f}"
                f"{f'{mean:+.1f} +- {half:.1f}':>18}"
            )
            if world == 1 and row["floats"] == 1:
                added[row["call"].rpartition(" ")[2]] = mean
    return added


def job(root: Path, backend: str, steps: int, fsdp: bool) -> dict[str, Any]:
    out = root / "steps.json"
    words = [sys.executable, str(PEERS / "steps.py"), str(out), backend, str(steps)]
    run_ranks(words + (["--fsdp"] if fsdp else []), WORLD, root / "log")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def show_turns(root: Path, steps: int, fsdp: bool, added_us: float) -> None:
    found = job(root, "both", steps, fsdp)
    grid, gloo = found["times_s"]["grid"], found["times_s"]["gloo"]
    step_ms = statistics.median(gloo) * 1e3
    mean, half = interval(trimmed([(a - b) * 1e3 for a, b in zip(grid, gloo, strict=True)]))
    product_ms = found["collectives"] * added_us / 1e3
    print(f"\n{'FSDP2' if fsdp else 'DDP'}: step {step_ms:.1f} ms, {found['collectives']} collectives a step")
    share = product_ms / step_ms
    print(f"  {found['collectives']} x {added_us:.1f} us = {product_ms:.3f} ms = {share:.2%} of it")
    print(
        f"  grid - gloo, {len(grid)} steps of each in turn: {mean:+.3f} ms +- {half:.3f}"
        f" = {mean / step_ms:+.2%} +- {half / step_ms:.2%}"
    )


def show_pairs(root: Path, steps: int, pairs: int, fsdp: bool) -> None:
    differences, medians = [], []
    for number in range(pairs):
        order = ("gloo", "grid") if number % 2 else ("grid", "gloo")
        found = {name: job(root, name, steps, fsdp)["times_s"][name] for name in order}
        medians.append(statistics.median(found["gloo"]))
        differences.append((statistics.median(found["grid"]) - medians[-1]) * 1e3)
    mean, half = interval(differences)
    step_ms = statistics.fmean(medians) * 1e3
    print(
        f"  grid - gloo, {pairs} pairs of whole runs, {steps} steps each: {mean:+.3f} ms +- {half:.3f}"
        f" = {mean / step_ms:+.2%} +- {half / step_ms:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=4)
    options = parser.parse_args()
    print(f"group_overhead: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    with tempfile.TemporaryDirectory(prefix="g") as temporary:
        root = Path(temporary)
        added = collectives(root)
        for fsdp in (False, True):
            show_turns(root, options.steps, fsdp, added["Python" if fsdp else "C++"])
            show_pairs(root, options.steps // 2, options.pairs, fsdp)


if __name__ == "__main__":
    main()
