"""A job's progress over time: hangs that nothing reports, and losses that are no numbers.

Utilisation is no progress: a deadlocked collective spins at 100 %. The step stands still and the power
falls. Where no hardware reports anything and all stop at once, changing nodes would not help.
"""

import math
import re
from collections.abc import Iterator, Sequence

import msgspec

from gridctl.detect.diagnose.reading import Row, log_lines, rows_in_order
from gridctl.detect.diagnose.ruling import limits, rule_says
from gridctl.model.diagnosis import Diagnosis, Material

_POWER = (
    "power_w",
    "power_w_mean",
    "power_mean_w",
    "mean_power_w",
    "avg_power_w",
    "power",
    "gpu_power_w",
    "watts",
)
_UTIL = (
    "util_pct",
    "util_pct_mean",
    "util",
    "gpu_util",
    "gpu_util_pct",
    "utilization",
    "utilization_gpu",
    "sm_util",
)
_ERRORS = (
    "xid_events",
    "xids",
    "xid_count",
    "nic_errors",
    "link_errors",
    "ib_errors",
    "hw_errors",
    "ecc_errors",
)
_VERSIONS = ("nccl", "nccl_version", "rccl", "driver", "torch", "torch_version", "cuda")
_NOT_FINITE = {"nan", "inf", "-inf", "+inf", "infinity", "-infinity"}
_LOSSES = ("loss", "train_loss", "lm_loss", "grad_norm", "gradnorm", "global_grad_norm")
_LOG_LOSS = re.compile(
    r"(?<![A-Za-z])(?P<name>(?:lm |train(?:ing)?[ _])?loss|grad(?:ient)?[ _]norm)[\"']? ?[:=] ?[\"']?"
    r"(?P<value>[-+]?(?:nan|inf(?:inity)?))(?![A-Za-z])",
    re.IGNORECASE,
)
_LOG_STEP = re.compile(r"(?:step|iter(?:ation)?)[\"']?[ :=]{1,3}(\d{1,12})", re.IGNORECASE)
_LOG_RANK = re.compile(r"\[?rank[ :=]?(\d{1,7})", re.IGNORECASE)
_JOBS_MAX = 65_536


class Mean(msgspec.Struct):
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        """One more value; None is none."""
        if value is not None:
            self.total += value
            self.count += 1

    def value(self) -> float | None:
        """The mean, None before the first value."""
        return self.total / self.count if self.count else None


class Job(msgspec.Struct):
    """One job's telemetry so far, in constant memory."""

    job: str
    step: float = -1.0
    lower: float | None = None  #: the last step, where it was below: two that rise are a restart
    moved_s: float | None = None  #: when the step last rose
    first_s: float | None = None
    last_s: float | None = None
    readings: int = 0
    longest_s: float = 0.0  #: the longest time from one step to the next while it ran
    power_w: Mean = msgspec.field(default_factory=Mean)  #: while the step rose
    still_power_w: Mean = msgspec.field(default_factory=Mean)  #: since it stands still
    still_util_pct: Mean = msgspec.field(default_factory=Mean)
    counted: dict[str, float] = {}  #: counter of errors -> its last value
    errors: float = 0.0
    versions: str = ""
    bad: dict[str, str] = {}  #: rank -> what was no number there
    bad_at: str = ""
    nulls: dict[str, int] = {}  #: (rank, name) -> records in a row without the value that came before

    def feed(self, row: Row) -> None:
        """One reading."""
        t_s, step = row.time_s(), row.number("step")
        self._numbers(row)
        for name in _ERRORS:
            if (count := row.number(name)) is not None:
                self.errors += max(count - self.counted.get(name, count), 0.0)
                self.counted[name] = count
        self.errors += row.number("xid") is not None
        if t_s is None or step is None or (self.last_s is not None and t_s < self.last_s):
            return  # a record that comes late tells nothing of how long something stood still
        self.readings += 1
        self.first_s = t_s if self.first_s is None else self.first_s
        self.last_s = t_s
        self.versions = self.versions or next((f"{n} {row.text(n)}" for n in _VERSIONS if row.text(n)), "")
        went_back = self.lower is not None and self.lower < step < self.step
        self.lower = step if step < self.step else None
        if step > self.step or went_back:
            if self.moved_s is not None:
                self.longest_s = max(self.longest_s, t_s - self.moved_s)
            self.step, self.moved_s = step, t_s
            self.power_w.total += self.still_power_w.total
            self.power_w.count += self.still_power_w.count
            self.still_power_w, self.still_util_pct = Mean(), Mean()
        self.still_power_w.add(row.number(*_POWER))
        self.still_util_pct.add(row.number(*_UTIL))

    def _numbers(self, row: Row) -> None:
        for name in _LOSSES:
            key = name.replace("_", "")
            if key not in row.values:
                continue
            value, rank = row.values[key], row.text("rank")
            word = value.strip().lower() if isinstance(value, str) else ""
            gone = self._gone(f"{rank} {name}", value)
            if word in _NOT_FINITE or gone or (isinstance(value, float) and not math.isfinite(value)):
                self.no_number(rank or "-", f"{name} is {value}", row.text("step"))

    def _gone(self, key: str, value: object) -> bool:
        """Strict JSON has no NaN: null again and again, where a number was before, stands for it."""
        if value is not None:
            if len(self.nulls) < 65_536:
                self.nulls[key] = 0
        elif key in self.nulls:
            self.nulls[key] += 1
        return self.nulls.get(key, 0) >= limits().hang["nulls"]

    def no_number(self, rank: str, what: str, step: str) -> None:
        """A loss or a norm was no number."""
        if len(self.bad) < 4096:
            self.bad.setdefault(rank, what)
        self.bad_at = self.bad_at or step

    def still_s(self) -> float:
        """How long the step has stood still at the end."""
        return 0.0 if self.last_s is None or self.moved_s is None else self.last_s - self.moved_s


def progress(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: telemetry of training jobs."""
    jobs: dict[str, Job] = {}
    for row in rows_in_order(materials, "step iter"):
        has_loss = any(name.replace("_", "") in row.values for name in _LOSSES)
        if row.get("step") is None or (row.time_s() is None and not has_loss):
            continue
        name = row.text("job")
        if name in jobs or len(jobs) < _JOBS_MAX:
            jobs.setdefault(name, Job(name)).feed(row)
    for material in materials:
        _log(jobs, material)
    well = []
    for job in jobs.values():
        found = [diagnosis for diagnosis in (_no_number(job), _hang(job)) if diagnosis is not None]
        yield from found
        if not found and job.readings > 2 and job.longest_s > 0:
            well.append(job)
    if well and len(well) == len(jobs):
        what = f"job {well[0].job or '-'} went on to step {well[0].step:g}"
        yield rule_says("progress.well", [what], event_count=0)


def _log(jobs: dict[str, Job], material: Material) -> None:
    """A training program's own lines: "iteration 1200 | lm loss: NAN | grad norm: 0.2"."""
    for line in log_lines(material, "nan", "NaN", "NAN", "inf", "Inf", "INF"):
        begin = line[:2000].lower()
        if ("loss" in begin or "norm" in begin) and (match := _LOG_LOSS.search(line[:2000])):
            step, rank = _LOG_STEP.search(line[:2000]), _LOG_RANK.search(line[:200])
            what = f"{match['name']} is {match['value']}"
            jobs.setdefault("", Job("")).no_number(rank[1] if rank else "-", what, step[1] if step else "")


def _no_number(job: Job) -> Diagnosis | None:
    if not job.bad:
        return None
    ranks = sorted(job.bad)
    what = f"{job.bad[ranks[0]]} at step {job.bad_at or 'unknown'}, on {len(ranks)} ranks"
    events = [{"rank": rank, "seen": seen} for rank, seen in sorted(job.bad.items())]
    return rule_says("progress.no-number", [what], events=events)


def _hang(job: Job) -> Diagnosis | None:
    limit = limits().hang
    still_s = job.still_s()
    usual_s = max(job.longest_s, limit["still_min_s"] / limit["steps"])
    if job.readings < 3 or still_s < limit["steps"] * usual_s:
        return None
    before_w, now_w = job.power_w.value(), job.still_power_w.value()
    util_pct = job.still_util_pct.value()
    fell = util_pct is None or util_pct >= limit["util_min_pct"]  # else it is idle: it may have ended
    fell = (
        fell
        and before_w is not None
        and now_w is not None
        and now_w <= before_w * (1 - limit["power_fall_min"])
    )
    if not fell and still_s < limit["alone_s"]:
        return None
    what = [f"job {job.job or '-'} stands at step {job.step:g} for {still_s:g} s"]
    util = _known(util_pct)
    what.append(f"power went from {_known(before_w)} to {_known(now_w)} W, utilisation {util} %")
    counted = (
        f"{job.errors:g} errors of hardware reported" if job.counted else "errors of hardware are not known"
    )
    what += [counted, f"all ran {job.versions}"] if job.versions else [counted]
    event = {
        "job": job.job,
        "step": job.step,
        "still_s": still_s,
        "power_fell": fell,
        "suspect": job.versions,
    }
    return rule_says("progress.hang-errors" if job.errors else "progress.silent-hang", what, events=[event])


def _known(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f}"
