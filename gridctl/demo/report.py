"""What the demo shows: the swapped run held against the undisturbed one, step by step."""

import hashlib
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from gridctl.demo.fleet import read_log

CATEGORIES = ("parameters", "optimizer", "buffers", "rng")


def ranks(swap: Path, control: Path, world_size: int) -> list[dict[str, Any]]:
    """For every rank both runs' losses and the first step at which they differ (None: nowhere)."""
    found = []
    for rank in range(world_size):
        ours, theirs = _losses(swap, rank), _losses(control, rank)
        pairs = zip(ours, theirs, strict=False)
        difference = next((step for step, (one, other) in enumerate(pairs) if one != other), None)
        if difference is None and len(ours) != len(theirs):
            difference = min(len(ours), len(theirs))
        found.append(
            {
                "rank": rank,
                "losses_hex": ours,
                "control_losses_hex": theirs,
                "identical": difference is None,
                "first_difference": difference,
            }
        )
    return found


def _losses(folder: Path, rank: int) -> list[str]:
    return [str(row[1]) for row in read_log(folder, rank)]


def steps(swap: Path, world_size: int) -> dict[str, int]:
    """Steps that some rank never wrote down, and steps that it wrote down twice."""
    lost = repeated = 0
    for rank in range(world_size):
        seen = [int(str(row[0])) for row in read_log(swap, rank)]
        lost += len(set(range(max(seen) + 1)) - set(seen)) if seen else 0
        repeated += len(seen) - len(set(seen))
    return {"lost": lost, "repeated": repeated}


def digests(swap: Path, control: Path, world_size: int) -> dict[str, dict[str, Any]]:
    """The final state of both runs by category, over all ranks."""
    ours, theirs = _digests(swap, world_size), _digests(control, world_size)
    return {
        name: {"swap": ours[name], "control": theirs[name], "identical": ours[name] == theirs[name]}
        for name in CATEGORIES
    }


def _digests(folder: Path, world_size: int) -> dict[str, str]:
    proofs = [json.loads((folder / f"digests-{rank}.json").read_text()) for rank in range(world_size)]
    return {
        name: hashlib.sha256(" ".join(proof[name] for proof in proofs).encode()).hexdigest()
        for name in CATEGORIES
    }


def pause(
    swap: Path, world_size: int, window: tuple[float, float], boundary_unix_s: float, cut: dict[str, Any]
) -> dict[str, Any]:
    """The worst excess of one step-to-step time over the median, on any rank, within `window` (unix s).

    The median is that of all steps of the run. `prepare_excess_ms` is the worst excess before the boundary.
    """
    worst = before = 0.0
    for rank in range(world_size):
        times = [float(str(row[2])) for row in read_log(swap, rank)]
        gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(times)]
        median = statistics.median(gap for _, gap in gaps)
        for end, gap in gaps:
            if window[0] <= end <= window[1]:
                worst = max(worst, gap - median)
                if end < boundary_unix_s:
                    before = max(before, gap - median)
    parts = cut.get("parts_ms", {})
    return {
        "worst_excess_ms": round(worst * 1e3, 1),
        "cut_ms": round(float(cut.get("cut_ms", 0.0)), 1),
        "prepare_excess_ms": round(before * 1e3, 1),
        "parts_ms": {
            name: round(float(parts.get(name, 0.0)), 1)
            for name in ("capture", "transport", "verify", "switch")
        },
    }
