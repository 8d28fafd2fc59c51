"""How fast a year of a large fleet answers: saved questions, reports, lists of incidents.

    python benchmarks/history_year.py [--nodes 1024] [--times 36] [--keep DIR]

Makes a year (`year.py`), seals it with `gridctl history compact`, adds samples at the tier that is kept for
ever (an hour, two metrics a GPU), and asks. Every command is run as a person types it, from the start of its
process to its end. `--keep`: a folder for what was made; the next run takes it from there.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import duckdb
import msgspec
import year

from gridctl.history import History
from gridctl.history.catalog import File
from gridctl.history.store import LocalStore
from gridctl.simulate.layout import fleet

QUESTIONS = (
    "mttr mtbf false-preemptions lemons swaps spare-use lost-gpu-hours recovered-cost slo covariance".split()
)
METRICS = {"temp_c": (62.0, 12.0), "power_w": (610.0, 80.0)}
AGAIN = 5
GRIDCTL = [sys.executable, "-c", "from gridctl.cli import main; main()"]


def gridctl(home: Path, *arguments: str) -> tuple[float, float, str]:
    """Seconds from the start of a command's process to its end, its peak of memory in MiB, and its output."""
    environment = {**os.environ, "GRIDCTL_HOME": str(home)}
    with tempfile.TemporaryFile() as out:
        begun_s = time.perf_counter()
        process = subprocess.Popen([*GRIDCTL, *arguments], env=environment, stdout=out)
        _, status, used = os.wait4(process.pid, 0)
        took_s = time.perf_counter() - begun_s
        if status:
            sys.exit(f"gridctl {' '.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
        out.seek(0)
        return took_s, used.ru_maxrss / 1024, out.read().decode()


def samples(home: Path, nodes: int) -> int:
    """A year of hourly samples, as retention leaves them. Returns how many rows there are."""
    store = LocalStore(home / "history")
    names = [node.name for node in fleet(nodes, "1").nodes]
    made: list[File] = []
    connection = duckdb.connect()
    connection.execute("CREATE TABLE nodes AS SELECT unnest($1) AS node", [names])
    with store.writing() as making:
        for month in range(12):
            begin_s, end_s = (year.BEGIN_UNIX_S + (month + n) * year.YEAR_H / 12 * 3600 for n in (0, 1))
            path = making / f"samples-{month}.parquet"
            connection.execute(
                f"COPY ({_samples(begin_s, end_s)}) TO '{path}' (FORMAT parquet, COMPRESSION zstd)"
            )
            rows = connection.execute(f"SELECT count(*) FROM read_parquet('{path}')").fetchall()[0][0]
            period = time.strftime("%Y-%m", time.gmtime(begin_s + 86400.0))
            file = File(
                table="samples",
                path=f"samples/{period}-3600.parquet",
                period=period,
                rows=rows,
                bytes=path.stat().st_size,
                sha256="",
                first=begin_s,
                last=end_s,
                span_s=3600,
            )
            store.put(file.path, path)
            made.append(file)
        store.replace(store.catalog().with_files(made, [], time.time()))
    return sum(file.rows for file in made)


def _samples(begin_s: float, end_s: float) -> str:
    """Values that drift with the hour of the day and differ from GPU to GPU, with noise."""
    noise = "(hash(node, gpu, t) % 1000) / 1000.0"
    parts = [
        f"SELECT t AS t_unix_s, 3600::INTEGER AS span_s, node, 'gpu:' || gpu AS device, '{metric}' AS metric,"
        f" round({mean} + {spread} * ({noise} - 0.5) + {spread} * sin(t / 13751), 1)::DOUBLE AS value,"
        f" round({mean} - {spread} - {noise}, 1)::DOUBLE AS low,"
        f" round({mean} + {spread} + {noise}, 1)::DOUBLE AS high,"
        f" round({mean} + {noise}, 1)::DOUBLE AS last, 3600::BIGINT AS n"
        " FROM nodes, range(8) AS g(gpu),"
        f" (SELECT unnest(range({begin_s:.0f}, {end_s:.0f}, 3600))::DOUBLE AS t)"
        for metric, (mean, spread) in METRICS.items()
    ]
    return f"SELECT * FROM ({' UNION ALL '.join(parts)}) ORDER BY node, device, metric, t_unix_s"


def timed(what: Callable[[], object]) -> list[float]:
    """Milliseconds of some calls, the quickest first."""
    found = []
    for _ in range(AGAIN):
        begun_s = time.perf_counter()
        what()
        found.append((time.perf_counter() - begun_s) * 1000.0)
    return sorted(found)


def make(home: Path, nodes: int, times: float) -> dict[str, float]:
    """Makes the year, unless it is there. Returns what that cost and how large it is."""
    note = home / "made.json"
    if note.exists():
        found: dict[str, float] = json.loads(note.read_bytes())
        return found
    begun_s = time.perf_counter()
    records, incidents = year.write(home / "journal", nodes, times, "1")
    made_s = time.perf_counter() - begun_s
    (home / "fleet.toml").write_text('[fleet]\nname = "year"\n')
    sealed_s, sealed_mib, _ = gridctl(home, "history", "compact")
    rows = samples(home, nodes)
    sizes = {
        folder: sum(p.stat().st_size for p in (home / folder).rglob("*") if p.is_file())
        for folder in ("journal", "history")
    }
    sample_bytes = sum(p.stat().st_size for p in (home / "history" / "samples").glob("*"))
    figures = {
        "records": records,
        "incidents": incidents,
        "made_s": made_s,
        "sealed_s": sealed_s,
        "sealed_mib": sealed_mib,
        "samples": rows,
        "bytes_a_sample": sample_bytes / rows,
        "journal_bytes": sizes["journal"],
        "sealed_bytes": sizes["history"] - sample_bytes,
    }
    note.write_bytes(msgspec.json.encode(figures))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--times", type=float, default=36.0)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    home = arguments.keep or Path(tempfile.mkdtemp(prefix="gridctl-year-"))
    home.mkdir(parents=True, exist_ok=True)
    try:
        for name, value in make(home, arguments.nodes, arguments.times).items():
            print(f"{name:16} {value:,.2f}")
        ask(home)
    finally:
        if not arguments.keep:
            shutil.rmtree(home)


def ask(home: Path) -> None:
    history = History(home / "journal")
    opened_ms = timed(lambda: History(home / "journal").query("SELECT count(*) FROM incidents"))
    print(f"\nopening a history and counting incidents: {opened_ms[0]:.0f} to {opened_ms[-1]:.0f} ms")
    incident = history.query(
        "SELECT incident FROM incidents WHERE runs > 0 ORDER BY opened_unix_s DESC LIMIT 1 OFFSET 100"
    )[1][0][0]
    commands = [("ask", name) for name in QUESTIONS]
    commands += [("incident", "report", incident, "--format", "md"), ("incidents", "--all")]
    print(f"\n{'command':44} {'ms, median':>10} {'worst':>8} {'RSS MiB':>8}")
    worst = []
    for command in commands:
        runs = [gridctl(home, *command) for _ in range(AGAIN)]
        took_ms = sorted(took * 1000.0 for took, _, _ in runs)
        worst.append(took_ms[-1])
        print(
            f"{'gridctl ' + ' '.join(command):44} {took_ms[AGAIN // 2]:10.0f} {took_ms[-1]:8.0f}"
            f" {max(mib for _, mib, _ in runs):8.0f}"
        )
    floor_ms = timed(lambda: gridctl(home, "version"))
    print(f"{'gridctl version (the floor)':44} {floor_ms[AGAIN // 2]:10.0f} {floor_ms[-1]:8.0f}")
    print(f"this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
