"""Completions in error that the mlx5 driver prints, and what slurmstepd prints of jobs that end badly."""

import re
from collections.abc import Iterator, Sequence

import msgspec

from gridagent.signals.lines import unwrap
from gridctl.detect.diagnose.reading import bare, log_lines
from gridctl.detect.diagnose.ruling import rule_says
from gridctl.model.diagnosis import Diagnosis, Material

#: drivers/infiniband/hw/mlx5/cq.c, dump_cqe().
_CQE = re.compile(
    r"(?:infiniband )?(?P<hca>\w{2,32}) ?: ?dump_cqe:\d{1,5}:\(pid \d{1,10}\): "
    r"(?:WC error: (?P<status>\d{1,4}), Message: (?P<text>[\w ]{1,60})|dump error cqe)"
)
_STEPD = re.compile(
    r"(?:slurmstepd: )?(?:error: )?(?:\*{3} )?(?:STEP|JOB|EXTERN STEP FOR) (?P<step>[\w.+]{1,40}) "
    r"STEPD TERMINATED ON (?P<node>[\w.-]{1,100}) AT \S{10,30} DUE TO JOB NOT ENDING WITH SIGNALS"
)
_OOM = re.compile(
    r"(?:slurmstepd: )?(?:error: )?Detected (?P<count>\d{1,9}) oom[_-]kill event(?:s|\(s\))? in "
    r"(?P<step>\w{1,10}Id=\S{1,60})"
)
_FLUSHED, _RETRY_EXCEEDED = 5, 12
_PLACES_MAX = 4096


class _Cqe(msgspec.Struct):
    lines: int = 0
    own: int = 0  #: not flushed
    line: str = ""


def rdma(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: the kernel's lines of completions in error."""
    found: dict[tuple[str, str], _Cqe] = {}
    for material in materials:
        for line in log_lines(material, "dump_cqe"):
            record = unwrap(line)
            match = _CQE.match(record.message) if record.kernel else None
            if match is None or (len(found) >= _PLACES_MAX and (record.host, match["hca"]) not in found):
                continue
            seen = found.setdefault((record.host, match["hca"]), _Cqe(line=record.message))
            seen.lines += 1
            seen.own += match["status"] is None or int(match["status"]) != _FLUSHED
    for (host, hca), seen in found.items():
        what = f"{host} {hca}: {seen.lines} completions in error, {seen.lines - seen.own} of them flushed"
        events = [{"host": host, "hca": hca, "completions": seen.lines}]
        rule = "nic.cqe-errors" if seen.own else "nic.cqe-flushed"
        yield rule_says(rule, [what.strip(), seen.line], events=events, raw_lines=seen.lines)


def slurmstepd(materials: Sequence[Material]) -> Iterator[Diagnosis]:
    """Layer: tasks that could not be killed, and those that were killed for their memory."""
    stuck: dict[str, str] = {}
    killed: dict[str, str] = {}
    for material in materials:
        for line in log_lines(material, "STEPD TERMINATED", "oom"):
            message = bare(line)
            if (match := _STEPD.match(message)) and len(stuck) < _PLACES_MAX:
                stuck.setdefault(match["node"], message)
            elif (match := _OOM.match(message)) and len(killed) < _PLACES_MAX:
                killed.setdefault(match["step"], message)
    for rule, seen, name in (("slurm.kill-failed", stuck, "node"), ("slurm.job-memory", killed, "step")):
        if seen:
            events = [{name: place} for place in seen]
            yield rule_says(rule, list(seen.values()), events=events, event_count=len(seen))
