"""The watch after a swap: are the job's steps what they were before? Pure.

The pause itself lies in the first step after the boundary, so step times are held against the band by
their median. A slower median is told but does not hold the run: it is a finding about the node.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

import msgspec

from gridagent.wire import Member, StepEntry

GRAD_NORM_FACTOR = 4.0
STEP_TIME_FACTOR = 2.0


#: rank -> its finished steps
Entries = Mapping[int, list[StepEntry]]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the watch saw. `problem` is "" if all is inside the band."""

    steps: int
    problem: str = ""
    note: str = ""
    step_s_before: float = 0.0
    step_s_after: float = 0.0


class Told(NamedTuple):
    """What an agent says of a rank of the new membership, from what it heard of the process itself."""

    state: str
    epoch: int
    step: int  #: the newest that has ended


def wants(members: Iterable[Member], steps: int, heard: Mapping[int, int], told: Mapping[int, Told]) -> str:
    """What a watch of so many steps still lacks: a job that stands and records that do not come look alike
    from afar. `heard`: rank -> its steps of the new epoch in the stream.
    """
    nodes = {member.rank: member.node for member in members if member.role != "source"}
    texts = []
    for rank in sorted(rank for rank, count in heard.items() if count < steps):
        seen = told.get(rank)
        says = f"{seen.state}, epoch {seen.epoch}, step {seen.step}" if seen else "nothing of it"
        texts.append(
            f"rank {rank} on {nodes[rank]}: {heard[rank]} of {steps} steps came, its agent says {says}"
        )
    return "; ".join(texts)


def judge(before: Entries, after: Entries) -> Verdict:
    """Losses must be finite, gradient norms at most 4 x the band's largest.

    JSON has no NaN and no infinity: they arrive as None. Where the band has a value in every step, None
    is one of them; where the band has none either, the script does not report it (or a grad scaler
    skips steps), and nothing is said.
    """
    old = [entry for entries in before.values() for entry in entries]
    new = [entry for entries in after.values() for entry in entries]
    times_before = [entry.step_s for entry in old if entry.step_s > 0]
    times_after = [entry.step_s for entry in new if entry.step_s > 0]
    verdict = Verdict(
        steps=min((len(entries) for entries in after.values()), default=0),
        problem=next((text for rank in sorted(after) for text in _problems(rank, after[rank], old)), ""),
        step_s_before=median(times_before) if times_before else 0.0,
        step_s_after=median(times_after) if times_after else 0.0,
    )
    if times_before and verdict.step_s_after > STEP_TIME_FACTOR * max(times_before):
        note = f"steps take {verdict.step_s_after:.3g} s, before {verdict.step_s_before:.3g} s"
        return msgspec.structs.replace(verdict, note=note)
    return verdict


def _problems(rank: int, entries: list[StepEntry], band: list[StepEntry]) -> Iterator[str]:
    norms = [entry.grad_norm for entry in band if _finite(entry.grad_norm)]
    has_losses = bool(band) and all(_finite(entry.loss) for entry in band)
    has_norms = bool(band) and len(norms) == len(band)
    limit = GRAD_NORM_FACTOR * max((norm for norm in norms if norm is not None), default=math.inf)
    for entry in entries:
        where = f"rank {rank}, step {entry.step}"
        if not _finite(entry.loss) and (has_losses or entry.loss is not None):
            yield f"{where}: the loss is not a finite number"
        if has_norms and (entry.grad_norm is None or not entry.grad_norm <= limit):
            norm = "not a finite number" if entry.grad_norm is None else f"{entry.grad_norm:.4g}"
            yield f"{where}: the gradient norm is {norm}, the band ends at {limit:.4g}"


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
