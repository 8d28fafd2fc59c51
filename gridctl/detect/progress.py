"""Training progress, by job: a hang of all, and a loss that is no number any more. Both are the job's.

Utilisation is no progress: 512 GPUs that hung showed 100 % (github.com/marin-community/marin issue 7344).
A job whose GPUs are idle has ended, and one of whose nodes is known to be faulty or silent has its reason.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gridagent.signals.values import number
from gridctl.detect.heartbeat import Rhythm
from gridctl.detect.kernel import suppressed
from gridctl.detect.policy import Heartbeat, Progress
from gridctl.model.findings import Finding, Suppressed

_JOBS_MAX = 1024

#: Is the job, which was on these nodes, still on one of them?
Runs = Callable[[str, set[str]], bool]
#: Why the job may have stopped, since a time: (its nodes, since) -> reason, or "" if nothing is known.
Reason = Callable[[set[str], float], str]
#: Are GPUs of these nodes in use since then?
Busy = Callable[[set[str], float], bool]


class _Job:
    __slots__ = ("hangs", "lost", "nans", "nodes", "rhythm", "seen_finite", "step", "t_s")

    def __init__(self) -> None:
        self.rhythm = Rhythm()
        self.t_s = 0.0
        self.step = float("-inf")
        self.nodes: set[str] = set()
        self.hangs = False
        self.seen_finite = False
        self.nans = 0
        self.lost = False


class Jobs:
    """All jobs that report steps."""

    def __init__(self, limits: Progress) -> None:
        self._limits = limits
        self._rhythm = Heartbeat(
            silent_s=limits.hang_min_s,
            phi=limits.phi,
            intervals_min=limits.steps_min,
            spread_min_share=limits.spread_min_share,
            observers=1,
            misses=1,
        )
        self._jobs: dict[str, _Job] = {}

    def feed(self, t_s: float, node: str, v: Mapping[str, Any]) -> Iterator[Finding]:
        """Takes one report of a rank."""
        name, step = v.get("job"), number(v.get("step"))
        if not isinstance(name, str) or step is None:
            return
        if (job := self._jobs.get(name)) is None:
            if len(self._jobs) >= _JOBS_MAX:
                return
            job = self._jobs[name] = _Job()
        job.nodes.add(node)
        if step == job.step:
            return
        if step < job.step:
            job.nodes = {node}  # it has gone back to a checkpoint, perhaps with other nodes
        job.rhythm.beat(t_s, self._rhythm)
        job.t_s, job.step, job.hangs = t_s, step, False
        yield from self._loss(t_s, name, job, number(v.get("loss")))

    def _loss(self, t_s: float, name: str, job: _Job, loss: float | None) -> Iterator[Finding]:
        if loss is not None:
            job.seen_finite, job.nans, job.lost = True, 0, False
            return
        job.nans += job.seen_finite
        if job.nans >= self._limits.nan_steps and not job.lost:
            job.lost = True
            why = f"the loss of {name} was no finite number for {job.nans} steps, up to {job.step:.0f}"
            yield _finding(t_s, "numerical_corruption", "run_ab_test", "unknown", why, "progress.no-number")

    def tick(self, now_s: float, runs: Runs, reason: Reason, busy: Busy) -> Iterator[Finding | Suppressed]:
        """Lets time pass."""
        for name, job in sorted(self._jobs.items()):
            silent_s = now_s - job.t_s
            if job.hangs or not job.rhythm.known(self._rhythm):
                continue
            if not job.rhythm.silent(silent_s, self._rhythm) or not runs(name, job.nodes):
                continue
            if not busy(job.nodes, job.t_s + silent_s / 2):
                continue
            job.hangs = True
            why = f"no rank of {name} made a step for {silent_s:.0f} s, while its GPUs are in use"
            found = _finding(now_s, "silent_hang", "collect_stacks_then_restart", "app", why, "progress.hang")
            because = reason(job.nodes, job.t_s - silent_s)
            yield suppressed(found, because, rule="progress.explained") if because else found


def _finding(t_s: float, kind: str, action: str, fault: str, why: str, rule: str) -> Finding:
    return Finding(
        t_unix_s=t_s,
        node="",
        device="node",
        kind=kind,
        severity="critical",
        action=action,
        why=[why],
        rule=rule,
        layer="progress",
        fault=fault,
    )
