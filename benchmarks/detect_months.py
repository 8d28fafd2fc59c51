"""Months of a simulated fleet through the watchdog: what it missed, how late it was, whom it moved.

    python benchmarks/detect_months.py [--nodes 512] [--days 30] [--seeds 5] [--times 1] [--docs]

`--times` multiplies all rates, of faults and of noise alike: more events in fewer days. `--docs` writes the
table into docs/detection.md. One process a seed, one after the other on one core.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from gridctl.cli.detect import as_row
from gridctl.detect.playback import Playback
from gridctl.detect.policy import builtin
from gridctl.detect.score import Judge, Score, quantile, total
from gridctl.ports.recording import Job, job_members
from gridctl.simulate.emit import play
from gridctl.simulate.layout import fleet
from gridctl.simulate.plan import life

DOCS = Path(__file__).parents[1] / "docs" / "detection.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"


def month(nodes: int, days: float, seed: int, times: float) -> Score:
    who = fleet(nodes, str(seed))
    hours = days * 24.0
    story = life(who, hours, times)
    jobs = [Job(job, {str(rank): node for rank, node in enumerate(m)}) for job, m in who.jobs.items()]
    playback = Playback(builtin(), who.nodes, job_members(jobs))
    judge = Judge(story.truth())
    for record in play(story, hours):
        for line in playback.feed(record):
            judge.feed(line)
    return judge.score(f"seed {seed}", nodes, hours * 3600.0)


def by_class(score: Score) -> list[str]:
    """A row for each class: how many, how late, how many were missed."""
    lines = ["| class | moves the job | faults | missed | median s | p99 s |", "|---|---|---|---|---|---|"]
    keys = sorted({(not f.fault.preempt_job, f.fault.cause) for f in score.faults})
    for stays, cause in keys:
        known = {"cause": cause, "preempt_job": not stays}
        delays_s = score.delays_s(**known)
        count = sum(f.fault.cause == cause and f.fault.preempt_job is not stays for f in score.faults)
        median, late = quantile(delays_s, 0.5), quantile(delays_s, 0.99)
        shown = " | ".join("-" if v is None else f"{v:.3g}" for v in (median, late))
        lines.append(f"| {cause} | {'-' if stays else 'yes'} | {count} | {count - len(delays_s)} | {shown} |")
    return lines


def summary(score: Score, command: str, cpu_s: float) -> list[str]:
    row: dict[str, Any] = as_row(score)
    bound = row["unnecessary_share_bound_95"]
    most = "-" if bound is None else f"{100 * bound:.2f} %"
    return [
        f"`{command}`: {cpu_s:.0f} s of processor time for {row['node_months']:.1f} node-months.",
        "",
        *by_class(score),
        "",
        f"* Preemptions: {row['preemptions']}, of them unnecessary: {row['unnecessary']}"
        f" (with 95 % confidence not more than {most} of all preemptions).",
        f"* Unnecessary preemptions for each node-month: {row['unnecessary']} / {row['node_months']:.1f}.",
        f"* The slowest decisive fault that a line tells of: {row['streamed_decisive_max_s']} s;"
        f" that values or silence tell of: {row['polled_decisive_max_s']} s.",
        f"* Time in which a node was blind: {100 * (row['blind_share'] or 0):.3f} % of all.",
    ]


def one_seed(arguments: argparse.Namespace, seed: int) -> tuple[Score, float]:
    """A seed in a process of its own: nothing of one month is left for the next."""
    words = ("--nodes", arguments.nodes, "--days", arguments.days, "--times", arguments.times, "--seed", seed)
    done = subprocess.run([sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=tuple[Score, float])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--times", type=float, default=1.0)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        score = month(arguments.nodes, arguments.days, arguments.seed, arguments.times)
        sys.stdout.buffer.write(msgspec.json.encode((score, time.process_time())))
        return
    scores, cpu_s = [], 0.0
    for seed in range(1, arguments.seeds + 1):
        score, used_s = one_seed(arguments, seed)
        scores.append(score)
        cpu_s += used_s
        print(f"seed {seed}: {used_s:.0f} s, {score.preemptions} preemptions", file=sys.stderr, flush=True)
        for text in score.unnecessary:
            print(f"  unnecessary: {text}", file=sys.stderr)
        for fault in score.missed():
            print(f"  missed: {fault.cause} {fault.kind} of {fault.node} at {fault.t:.0f} s", file=sys.stderr)
    command = (
        f"python benchmarks/detect_months.py --nodes {arguments.nodes} --days {arguments.days:g}"
        f" --seeds {arguments.seeds} --times {arguments.times:g}"
    )
    text = "\n".join(summary(total(scores), command, cpu_s)) + "\n"
    print(text)
    if arguments.docs:
        head, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        tail = rest.partition(END)[2]
        DOCS.write_text(f"{head}{BEGIN}\n{text}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
