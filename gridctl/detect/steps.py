"""The steps of a job, rank by rank: a rank that lags behind the others, and a loss that leaves its band.

Both are judged once a step is complete, so the order in which ranks report changes nothing. No clock of a
node is compared with another's: what a rank's own durations add up to says how late it is. Both only warn.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gridagent.signals.values import number
from gridctl.detect.device import Cleared
from gridctl.detect.policy import LossSpike, Straggler
from gridctl.model.findings import Finding

_JOBS_MAX = 1024
_RANKS_MAX = 1 << 17
#: So many steps may be under way at a time; what a rank has not reported of an older one is unknown.
_OPEN_MAX = 4
#: Of a normal distribution, the standard deviation is this many median absolute deviations.
_MAD = 1.4826
_SPREAD_MIN_SHARE = 0.02
#: An old lead or delay is forgotten by this share with every step.
_FORGET = 1 / 10


class _Report(msgspec.Struct, frozen=True, gc=False):
    node: str
    step_s: float | None
    loss: float | None


def center(values: list[float]) -> tuple[float, float]:
    """Median and robust standard deviation (from the median absolute deviation) of at least one value."""
    middle = _median(sorted(values))
    return middle, _MAD * _median(sorted(abs(value - middle) for value in values))


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class _Rank:
    __slots__ = ("behind_s", "history", "node", "said", "step")

    def __init__(self) -> None:
        self.step = float("-inf")
        self.node = ""
        self.behind_s = 0.0  #: what its steps took longer than those of the others, old ones forgotten
        self.history = 0  #: did it lag? The last steps as bits, the newest lowest
        self.said = False


class _Job:
    __slots__ = ("band", "closed", "epoch", "high", "open", "paces", "ranks", "spike", "steady")

    def __init__(self, band: int) -> None:
        self.open: dict[float, dict[int, _Report]] = {}
        self.closed = float("-inf")
        self.ranks: dict[int, _Rank] = {}
        self.epoch: object = None
        self.steady = 0  #: complete steps since the job, or its membership, began
        self.paces: deque[float] = deque(maxlen=32)  #: what the last steps took
        self.band: deque[tuple[float, float]] = deque(maxlen=band)  #: (step, loss) that were no spikes
        self.high = 0  #: was the loss above its band? As bits
        self.spike = False


Told = tuple[str, Finding | Cleared]  #: the node it is about ("": the job), and what


class Steps:
    """All jobs that report steps."""

    def __init__(self, straggler: Straggler, spike: LossSpike) -> None:
        self._straggler = straggler
        self._spike = spike
        self._jobs: dict[str, _Job] = {}

    def feed(self, t_s: float, node: str, v: Mapping[str, Any]) -> Iterator[Told]:
        """Takes one report of a rank."""
        name, step, rank = v.get("job"), number(v.get("step")), number(v.get("rank"))
        if not isinstance(name, str) or step is None or rank is None:
            return
        if (job := self._jobs.get(name)) is None:
            if len(self._jobs) >= _JOBS_MAX:
                return
            job = self._jobs[name] = _Job(self._spike.band)
        member = job.ranks.get(int(rank))
        epoch = v.get("epoch")
        if epoch != job.epoch or (member is not None and step <= member.step):
            yield from self._begin(job, step)
            job.epoch, member = epoch, None
        if member is None and len(job.ranks) >= _RANKS_MAX:
            return
        if member is None:
            member = job.ranks[int(rank)] = _Rank()
        member.step, member.node = step, node
        if step <= job.closed:
            return
        reports = job.open.setdefault(step, {})
        reports[int(rank)] = _Report(node, number(v.get("step_s")), number(v.get("loss")))
        while job.open:
            oldest = min(job.open)
            if len(job.open[oldest]) < len(job.ranks) and len(job.open) <= _OPEN_MAX:
                break
            yield from self._close(t_s, name, job, oldest)

    def pause(self, v: Mapping[str, Any]) -> None:
        """A hand-over goes on in a job: its steps are compared anew after it."""
        job = self._jobs.get(str(v.get("job")))
        if job is not None:
            job.steady = 0

    def _begin(self, job: _Job, step: float) -> Iterator[Told]:
        """The job begins again, perhaps with other nodes, and perhaps from an earlier step."""
        for node in sorted({rank.node for rank in job.ranks.values() if rank.said}):
            yield node, _ended("straggler")
        job.ranks.clear()
        job.open.clear()
        job.closed, job.steady = float("-inf"), 0
        job.paces.clear()
        kept = [(at, loss) for at, loss in job.band if at < step]
        job.band.clear()
        job.band.extend(kept)
        job.high = 0

    def _close(self, t_s: float, name: str, job: _Job, step: float) -> Iterator[Told]:
        reports = job.open.pop(step)
        job.closed = step
        job.steady += 1
        losses = [report.loss for report in reports.values() if report.loss is not None]
        if losses:
            yield from self._loss(t_s, name, job, step, center(losses)[0])
        took = {rank: report.step_s for rank, report in reports.items()}
        yield from self._lag(t_s, name, job, {rank: s for rank, s in took.items() if s is not None})

    def _lag(self, t_s: float, name: str, job: _Job, took: dict[int, float]) -> Iterator[Told]:
        limits = self._straggler
        if len(took) < limits.ranks_min:
            return
        middle_s, spread_s = center(list(took.values()))
        pace_s = center(list(job.paces))[0] if job.paces else middle_s
        job.paces.append(middle_s)
        if job.steady <= limits.start_steps:
            for settling in job.ranks.values():
                settling.behind_s, settling.history = 0.0, settling.history if settling.said else 0
            return
        least_s = max(limits.min_s, limits.share * pace_s)
        for which, step_s in took.items():
            member = job.ranks[which]
            behind_s = member.behind_s * (1 - _FORGET) + step_s - middle_s
            member.behind_s = max(-2 * least_s, min(behind_s, 2 * least_s))
        if middle_s > limits.special_step * pace_s:
            return  # all wait: an evaluation, a checkpoint
        behind_s, apart_s = center([job.ranks[rank].behind_s for rank in took])

        def late(value: float, usual: float, spread: float) -> bool:
            return value - usual >= max(least_s, limits.z * max(spread, _SPREAD_MIN_SHARE * middle_s))

        lagging = {
            rank
            for rank, step_s in took.items()
            if late(step_s, middle_s, spread_s) or late(job.ranks[rank].behind_s, behind_s, apart_s)
        }
        if len(lagging) > limits.share_max * len(took):
            return  # no single rank: the job, its data or its network
        yield from self._stragglers(t_s, name, job, took, lagging, middle_s)

    def _stragglers(
        self, t_s: float, name: str, job: _Job, took: dict[int, float], lagging: set[int], middle_s: float
    ) -> Iterator[Told]:
        limits = self._straggler
        ended: set[str] = set()
        for rank in sorted(took):
            member = job.ranks[rank]
            member.history = (member.history << 1 | (rank in lagging)) & ((1 << limits.of) - 1)
            if not member.said and member.history.bit_count() >= limits.samples:
                first = not any(other.said and other.node == member.node for other in job.ranks.values())
                member.said = True
                if first:
                    last = f"the last took {took[rank]:.3g} s, those of others {middle_s:.3g} s"
                    often = f"{limits.samples} of {limits.of} steps"
                    why = f"rank {rank} of {name} lags behind the others in {often}: {last}"
                    yield member.node, _lags(t_s, member.node, why)
            elif member.said and not member.history:
                member.said = False
                ended.add(member.node)
        still = {member.node for member in job.ranks.values() if member.said}
        for node in sorted(ended - still):
            yield node, _ended("straggler")

    def _loss(self, t_s: float, name: str, job: _Job, step: float, loss: float) -> Iterator[Told]:
        limits = self._spike
        high, middle = False, loss
        if len(job.band) >= limits.band_min:
            middle, spread = center([value for _, value in job.band])
            high = loss - middle >= max(limits.z * spread, limits.share * abs(middle))
        job.high = (job.high << 1 | high) & ((1 << limits.band) - 1)
        if high and job.high.bit_count() == limits.band:
            job.band.clear()  # it stays there: that is its level now
        if not high:
            job.band.append((step, loss))
        recent = job.high & ((1 << limits.of) - 1)
        if high and not job.spike and recent.bit_count() >= limits.samples:
            job.spike = True
            why = f"the loss of {name} is {loss:.4g} at step {step:.0f}, and was {middle:.4g} before"
            yield "", _spikes(t_s, why, limits)
        elif job.spike and not recent:
            job.spike = False


def _ended(kind: str) -> Cleared:
    return Cleared(kind, "node", "progress")


def _lags(t_s: float, node: str, why: str) -> Finding:
    return Finding(
        t_unix_s=t_s,
        node=node,
        device="node",
        kind="straggler",
        severity="warning",
        action="isolate_suspect_rank",
        when="after_job",
        why=[why],
        rule="progress.straggler",
        layer="progress",
        fault="unknown",
    )


def _spikes(t_s: float, why: str, limits: LossSpike) -> Finding:
    return Finding(
        t_unix_s=t_s,
        node="",
        device="node",
        kind="loss_spike",
        severity="warning",
        action="observe",
        why=[f"{why}: above its band in {limits.samples} of {limits.of} steps"],
        rule="progress.loss-spike",
        layer="progress",
        fault="unknown",
    )
