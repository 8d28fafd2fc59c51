"""How long `gridctl diagnose` takes for a large log, and how much memory, beside only reading it.

usage: python benchmarks/bulk_logs.py [MB ...]          default: 100

For each size a kernel log and a job's log (torch, NCCL, the program's own lines) are written into a temporary
folder. Most lines are of no interest; one in fifty tells of a fault. Floor: a Python that reads the same file
as text and splits it into lines. Each figure is of a process of its own, its peak as the kernel counts it.
Asserts nothing.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

#: Weight and form of a line; {n} is a number, {k} a digit.
KERNEL = (
    (20, "systemd[1]: Started Session {n} of User root."),
    (12, "IPv6: ADDRCONF(NETDEV_CHANGE): eth{k}: link becomes ready"),
    (20, 'audit: type=1400 audit({n}.1:4{k}): apparmor="ALLOWED" operation="open" pid={n} comm="sshd"'),
    (10, "EXT4-fs (nvme{k}n1p2): mounted filesystem with ordered data mode, opts (null)"),
    (18, "mlx5_core 0000:{k}a:00.0: ACCESS_REG(0x805) op_mod(0x1) failed, status bad parameter(0x3)"),
    (18, "docker0: port {k}(veth{n:x}) entered disabled state"),
    (1, "pcieport 0000:4{k}:01.0: AER: Corrected error received: 0000:4{k}:00.0"),
    (1, "NVRM: Xid (PCI:0000:4{k}:00): 31, pid={n}, name=python3, Ch 0000000{k}, MMU Fault: FAULT_PDE"),
)
JOB = (
    (30, "[rank{k}]: node-{k}:3101:{n} [{k}] NCCL INFO Channel {k:02d}/0 : {k}[{k}] -> 1[1] via P2P/CUMEM"),
    (22, "{k}: iteration {n}/ 500000 | elapsed time (ms): 8123.{k} | lm loss: 2.1{n} | grad norm: 0.{n}"),
    (
        14,
        "[rank{k}]:[I1126 09:14:33.{n} ProcessGroupNCCL.cpp:1031] [PG ID 0 Rank {k}] broadcast took 0.{n} ms",
    ),
    (22, "INFO:root:step {n}, loss=2.{n}, lr=0.0001, tokens/s=1{n}, mem=61.{k} GB"),
    (
        10,
        "checkpoint.py:{n}: UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    ),
    (
        1,
        "node-{k}:3101:{n} [{k}] transport/net_ib.cc:1401 NCCL WARN NET/IB: Got completion from peer "
        "10.0.0.9<45112> with status=12 opcode=0 len=0 vendor err 129 (Send) hca mlx5_{k}",
    ),
    (
        1,
        "[rank{k}]:[E1126 09:14:33.{n} ProcessGroupNCCL.cpp:629] [Rank {k}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum={n}, OpType=ALLREDUCE, NumelIn=1) ran for 600{k} milliseconds",
    ),
)
FLOOR = "import sys\nfor line in open(sys.argv[1], encoding='utf-8', errors='replace'): pass"
PRODUCT = "from gridctl.cli import main; main()"


def lines(forms: tuple[tuple[int, str], ...], stamp: Callable[[int], str]) -> Iterator[str]:
    """Lines without end, the same each time."""
    chance = random.Random(1)
    weights = [weight for weight, _ in forms]
    number = 0
    while True:
        for _, form in chance.choices(forms, weights, k=1000):
            number += 1
            yield stamp(number) + form.format(n=chance.randrange(10**6), k=number % 8) + "\n"


def write(path: Path, size_bytes: int, source: Iterator[str]) -> None:
    """A log of about this size."""
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:
        while size_bytes > 0:
            size_bytes -= file.write(next(source))


def measured(arguments: list[str], stdin: Path | None = None) -> tuple[float, float]:
    """Seconds and peak resident MB of a Python with these arguments; `stdin` comes through a pipe."""
    begin = time.perf_counter()
    cat = subprocess.Popen(["cat", str(stdin)], stdout=subprocess.PIPE) if stdin else None
    child = subprocess.Popen(
        [sys.executable, "-c", *arguments],
        stdin=cat.stdout if cat else subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if cat:
        cat.communicate()
    if child.returncode:
        sys.exit(f"{arguments[1:]} ended with {child.returncode}")
    return time.perf_counter() - begin, usage.ru_maxrss / 1024


def row(what: str, size_mb: float, took: tuple[float, float], floor_s: float) -> None:
    """One line of the table."""
    seconds, peak_mb = took
    speed = f"{seconds:.1f} s | {size_mb / seconds:.1f} MB/s | {seconds / floor_s:.0f}"
    print(f"| {what} | {speed} | {peak_mb:.0f} MB |", flush=True)


def main() -> None:
    sizes_mb = [int(argument) for argument in sys.argv[1:]] or [100]
    print(f"load at the start: {os.getloadavg()[0]:.1f}\n")
    print("| log | time | speed | times the floor | peak resident |\n|---|---|---|---|---|")
    logs = (
        ("kernel", KERNEL, lambda n: f"[{n / 7:12.6f}] "),
        ("job", JOB, lambda n: ""),
    )
    for size_mb in sizes_mb:
        for name, forms, stamp in logs:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{name}.log"
                write(path, size_mb * 1_000_000, lines(forms, stamp))
                floor = measured([FLOOR, str(path)])
                of = f"{name} log, {size_mb} MB"
                row(f"{of}: read and split only", size_mb, floor, floor[0])
                row(f"{of}: a file", size_mb, measured([PRODUCT, "diagnose", str(path)]), floor[0])
                row(f"{of}: a pipe", size_mb, measured([PRODUCT, "diagnose"], path), floor[0])


if __name__ == "__main__":
    main()
