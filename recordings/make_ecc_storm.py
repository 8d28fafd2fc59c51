"""Makes `ecc-storm.jsonl.gz` and its truth: memory of one GPU fails under load, and the driver says so.

After public reports: corrected errors that climb from a few hundred to many thousands a second under load
while nothing else is said (github.com/NVIDIA/NVSentinel issue 1748), a row that waits for its replacement
(github.com/leptonai/gpud pull 987), then a double-bit error with the lines that follow it and the driver's
advice to drain and reset (github.com/wtdcode/vllm-backport issue 62). All values and addresses are made up.

    python recordings/make_ecc_storm.py [FOLDER]

The same bytes each time.
"""

import gzip
import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 20261101
SECONDS = 40
GPUS = 8
NODES = ("n1", "n2", "n3", "n4")
SPARE = "n4"
SICK_NODE, SICK_GPU = "n2", 3
PENDING_T, FATAL_T = 8.0, 12.0
BUSES = ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")
UPTIME_S = 812_345.0

Line = dict[str, Any]


def pci(gpu: int) -> str:
    return f"0000:{BUSES[gpu]}:00.0"


def header() -> Line:
    nodes = [
        {
            "name": name,
            "rack": "r1",
            "nvlink_domain": "d1",
            "cooling_zone": "z1",
            "gpus": GPUS,
            "spare": name == SPARE,
        }
        for name in NODES
    ]
    ranks = {str(rank): name for rank, name in enumerate(NODES) if name != SPARE}
    return {
        "recording": 1,
        "name": "ecc-storm",
        "start": "2026-11-01T03:12:00Z",
        "interval_s": 1.0,
        "nodes": nodes,
        "jobs": [{"id": "demo", "ranks": ranks}],
    }


def corrected_per_s(t_s: float) -> float:
    """Corrected errors of the sick GPU: doubling every 1.6 seconds, up to 17,700 a second."""
    return min(150.0 * math.pow(2.0, t_s / 1.6), 17_700.0)


def sample(chance: random.Random, t_s: int, node: str, gpu: int, corrected: int) -> Line:
    sick = (node, gpu) == (SICK_NODE, SICK_GPU)
    busy = node != SPARE
    fatal = sick and t_s >= FATAL_T
    temp_c = (66 if busy else 31) + chance.randint(-2, 2)
    values = {
        "temp_c": temp_c,
        "mem_temp_c": temp_c + (14 if sick else 9),
        "power_w": (642 if busy else 78) + chance.randint(-20, 20),
        "power_limit_w": 700,
        "sm_clock_mhz": 1905 if busy else 345,
        "throttle": 0 if busy else 1,
        "util_pct": (98 if busy else 0) + (chance.randint(-3, 2) if busy else 0),
        "mem_used_mib": 64_872 + gpu * 16 if busy else 4,
        "ecc_sbe_total": corrected if sick else gpu % 3,
        "ecc_dbe_total": int(fatal),
        "ecc_sram_ue_total": 0,
        "remap_corr_total": 8 if sick and t_s >= PENDING_T else 0,
        "remap_uncorr_total": int(fatal),
        "remap_pending": int(sick and t_s >= PENDING_T),
        "remap_failed": 0,
        "retired_pages": None,
        "pcie_replay_total": 0,
        "pcie_gen": 5 if busy else 1,
        "pcie_gen_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "nvlink_crc_total": 11 + gpu,
        "nvlink_replay_total": 0,
        "nvlink_recovery_total": 0,
        "nvlink_down": 0,
        "recovery_action": 4 if fatal else 0,
    }
    return {
        "t": t_s + 0.3,
        "node": node,
        "kind": "sample",
        "device": f"gpu:{gpu}",
        "pci": pci(gpu),
        "v": values,
    }


def kernel_lines() -> Iterator[Line]:
    bus = BUSES[SICK_GPU]
    process = "pid=51200, name=python3"
    xids = (
        f"48, {process}, DBE (double-bit error) FBPA: 9, subp: 1",
        f"171, {process}, Additional to Xid 48/94 ECC errors: DRAM",
        f"63, {process}, Row Remapper: New row marked for remapping, reset gpu to activate.",
        f"154, {process}, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)",
    )
    texts = (
        f"NVRM: GPU at PCI:0000:{bus}:00: GPU-00000000-0000-4000-8000-000000000203",
        *(f"NVRM: Xid (PCI:0000:{bus}:00): {xid}" for xid in xids),
    )
    for index, text in enumerate(texts):
        t_s = round(FATAL_T + index * 0.0002, 4)
        line = f"3,{90_210 + index},{round((UPTIME_S + t_s) * 1e6)},-;{text}"
        yield {"t": t_s, "node": SICK_NODE, "kind": "log", "source": "kmsg", "line": line}


def lines() -> Iterator[Line]:
    chance = random.Random(SEED)
    corrected = 0.0
    for t_s in range(SECONDS):
        if t_s == FATAL_T:
            yield from kernel_lines()
        corrected += corrected_per_s(t_s) * chance.uniform(0.97, 1.03)
        for number, node in enumerate(NODES):
            yield {"t": t_s + 0.1, "node": node, "kind": "beat", "boot": f"b0070{number + 1}", "seq": t_s + 1}
            for gpu in range(GPUS):
                yield sample(chance, t_s, node, gpu, round(corrected))
            inlet = {"inlet_c": 23.5, "edac_ce_total": 0, "edac_ue_total": 0, "load1": 21.0}
            yield {"t": t_s + 0.4, "node": node, "kind": "sample", "device": "node", "v": inlet}
            if node != SPARE:
                yield {
                    "t": t_s + 0.5,
                    "node": node,
                    "kind": "progress",
                    "job": "demo",
                    "rank": number,
                    "step": t_s * 2,
                    "loss": round(3.2 - 0.01 * t_s, 4),
                    "step_s": 0.5,
                    "grad_norm": None,
                }


def truth() -> Line:
    return {
        "faults": [
            {
                "t": 1.0,
                "node": SICK_NODE,
                "device": f"gpu:{SICK_GPU}",
                "kind": "ecc_uncorrectable_dram",
                "fault": "node",
                "preempt_job": True,
                "preempt_from": FATAL_T,
                "decisive_t": FATAL_T,
                "pci": pci(SICK_GPU),
                "also": ["ecc_corrected_rate", "row_remap_pending", "recovery_action_pending"],
                "note": "errors under load, a pending remap, then Xid 48 and advice to drain and reset",
            }
        ],
        "must_not_preempt": [name for name in NODES if name != SICK_NODE],
        "counts": {"incidents": 1, "evictions": 1},
    }


def recording() -> bytes:
    """The compressed recording; without a time stamp in it, so that its bytes never change."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (header(), *lines()))
    return gzip.compress(text.encode(), compresslevel=9, mtime=0)


def main(folder: Path) -> None:
    (folder / "ecc-storm.jsonl.gz").write_bytes(recording())
    (folder / "ecc-storm.truth.json").write_text(json.dumps(truth(), indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
