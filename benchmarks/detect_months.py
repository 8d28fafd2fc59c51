"""Months of a simulated fleet through the watchdog: what it missed, how late it was, whom it moved.

    python benchmarks/detect_months.py [--nodes 512] [--days 30] [--seeds 5] [--times 1] [--at-a-time 2]
        [--keep DIR] [--docs]

`--times` multiplies all rates, of faults and of noise alike: more events in fewer days. `--docs` writes the
table into docs/detection.md. One process a seed, `--at-a-time` of them (2) beside each other.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from gridctl.assess.hindsight import Hindsight
from gridctl.assess.rates import tables
from gridctl.assess.skill import Outcome, skills
from gridctl.cli.detect import as_row
from gridctl.detect.node import NodeWatch
from gridctl.detect.playback import TICK_S, Playback
from gridctl.detect.policy import builtin
from gridctl.detect.score import Judge, Score, quantile, total
from gridctl.ports.recording import Job, job_members
from gridctl.simulate.emit import Quiet, play
from gridctl.simulate.layout import fleet
from gridctl.simulate.plan import life
from gridctl.simulate.story import Story

DOCS = Path(__file__).parents[1] / "docs" / "detection.md"
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"


class Month:
    """A fleet's month under the watchdog, in the fleet's own time.

    What a node usually says is passed over from one event to the next, wherever the watchdog itself says that
    it changes nothing; tests/unit/test_months.py compares that with every record told.
    """

    def __init__(self, story: Story) -> None:
        who, policy = story.fleet, builtin()
        jobs = [Job(job, {str(rank): node for rank, node in enumerate(m)}) for job, m in who.jobs.items()]
        self._story = story
        self._playback = Playback(policy, who.nodes, job_members(jobs))
        self.watch = self._playback.watch
        self._shape = self._playback.ingest.shape
        self._usual: dict[Hashable, list[Any]] = {}
        self._told: list[dict[str, Any]] = []
        self.hindsight = Hindsight(tables(), who.nodes)
        self._ticked_s = 0.0

    def lines(self, hours: float, *, whole: bool = False) -> Iterator[dict[str, Any]]:
        """What the watchdog says; `whole`: told every single record."""
        records = play(self._story, hours) if whole else play(self._story, hours, self._passes)
        for record in records:
            while self._ticked_s + TICK_S <= record.t_unix_s:
                self._ticked_s += TICK_S
                self._told += self._playback.tick(self._ticked_s)
            self._told += self._playback.take(record, record.t_unix_s)
            self.hindsight.record(record)
            yield from self._told
            self._told.clear()

    def _passes(self, quiet: Quiet) -> bool:
        """Takes what a quiet node tells, if the watchdog says that none of its devices changes anything."""
        node, bodies = self.watch.node(quiet.node), self._bodies_of(quiet)
        works_as_spare = node.facts.spare and not quiet.idle  # its next step is its first, and counts
        if not node.calm(quiet.boot) or works_as_spare or None in bodies:
            return False
        if not all(self._takes(node, body, quiet, quiet.seconds[0]) for body in bodies):
            return False
        for body in bodies:
            # Between equal samples only main memory is looked at.
            for second in quiet.seconds[1:] if body.device == "node" else quiet.seconds[-1:]:
                taken = self._takes(node, body, quiet, second)
                assert taken, f"{quiet.node} is no longer quiet at {second} s"
        node.beats(quiet.boot, quiet.beats[0] + quiet.lag_s, quiet.beats.step, len(quiet.beats))
        for target in quiet.targets:
            self.watch.node(target).observers.probe(quiet.node, True, quiet.probed + quiet.lag_s)
        return True

    def _takes(self, node: NodeWatch, body: Any, quiet: Quiet, second: int) -> bool:
        free_mib = quiet.free_mib(second) if body.device == "node" else None
        t_s = second + quiet.lag_s
        return node.passes_plain(body, free_mib, t_s, t_s, self._shape.busy)

    def _bodies_of(self, quiet: Quiet) -> list[Any]:
        """Of each device its usual sample in plain form; None where a rule may see samples differ."""
        if quiet.like not in self._usual:
            self._usual[quiet.like] = [self._body_of(quiet, number) for number in range(quiet.devices)]
        return self._usual[quiet.like]

    def _body_of(self, quiet: Quiet, number: int) -> Any:
        at_s = quiet.seconds[0]
        lines = [
            self._shape.of(quiet.sample(number, at_s + later_s)) for later_s in range(0, 700_000, 14_001)
        ]
        for line in lines:
            self._shape.plain(line.v.v)
        return lines[0].v if all(line.v == lines[0].v for line in lines) else None


def month(nodes: int, days: float, seed: int, times: float) -> tuple[Score, list[Outcome]]:
    who = fleet(nodes, str(seed))
    hours = days * 24.0
    story = life(who, hours, times)
    truth, run = story.truth(), Month(story)
    judge = Judge(truth)
    for line in run.lines(hours):
        judge.feed(line)
        run.hindsight.line(line)
    return judge.score(f"seed {seed}", nodes, hours * 3600.0), run.hindsight.outcomes(truth)


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


def forecasts(outcomes: list[Outcome]) -> list[str]:
    """A row for each class of which a fault came: were the daily forecasts better than the base rate?"""
    lines = [
        "| class | forecasts | faults | Brier | of the base rate | skill | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for its in skills(outcomes):
        if its.events:
            skill = "-" if its.skill is None else f"{its.skill:.3f}"
            scores = f"{its.brier:.3g} | {its.brier_base:.3g} | {skill}"
            lines.append(f"| {its.name} | {its.forecasts} | {its.events} | {scores} | {its.verdict} |")
    bins = skills([msgspec.structs.replace(o, name="") for o in outcomes])[0].calibration if outcomes else []
    said = [f"{one.p_mean:.2g} said, {one.happened:.2g} came ({one.forecasts})" for one in bins]
    return [*lines, "", f"Calibration of all of them, for the day after: {'; '.join(said)}."]


def summary(score: Score, outcomes: list[Outcome], command: str, cpu_s: float) -> list[str]:
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
        "",
        *forecasts(outcomes),
    ]


def one_seed(arguments: argparse.Namespace, seed: int) -> tuple[Score, list[Outcome], float]:
    """A seed in a process of its own: nothing of one month is left for the next."""
    words = ("--nodes", arguments.nodes, "--days", arguments.days, "--times", arguments.times, "--seed", seed)
    kept = arguments.keep and arguments.keep / f"{'-'.join(map(str, words[1::2]))}.json"
    if not kept or not kept.exists():
        done = subprocess.run(
            [sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, check=True
        )
        told = done.stdout
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(told)
    else:
        told = kept.read_bytes()
    return msgspec.json.decode(told, type=tuple[Score, list[Outcome], float])


def report(seed: int, score: Score, used_s: float) -> None:
    """Says on stderr what one seed came to, and everything that was wrong."""
    print(f"seed {seed}: {used_s:.0f} s, {score.preemptions} preemptions", file=sys.stderr, flush=True)
    for text in score.unnecessary:
        print(f"  unnecessary: {text}", file=sys.stderr)
    for fault in score.missed():
        print(f"  missed: {fault.cause} {fault.kind} of {fault.node} at {fault.t:.0f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--times", type=float, default=1.0)
    parser.add_argument("--at-a-time", type=int, default=2)
    parser.add_argument(
        "--keep", type=Path, help="a folder for seeds that are done: the next run goes on there"
    )
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        told = month(arguments.nodes, arguments.days, arguments.seed, arguments.times)
        sys.stdout.buffer.write(msgspec.json.encode((*told, time.process_time())))
        return
    scores, outcomes, cpu_s = [], [], 0.0
    with ThreadPoolExecutor(arguments.at_a_time) as pool:
        seeds = range(1, arguments.seeds + 1)
        done = pool.map(lambda seed: one_seed(arguments, seed), seeds)
        for seed, (score, came, used_s) in zip(seeds, done, strict=True):
            scores.append(score)
            outcomes += came
            cpu_s += used_s
            report(seed, score, used_s)
    command = (
        f"python benchmarks/detect_months.py --nodes {arguments.nodes} --days {arguments.days:g}"
        f" --seeds {arguments.seeds} --times {arguments.times:g}"
    )
    text = "\n".join(summary(total(scores), outcomes, command, cpu_s)) + "\n"
    print(text)
    if arguments.docs:
        head, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        tail = rest.partition(END)[2]
        DOCS.write_text(f"{head}{BEGIN}\n{text}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
