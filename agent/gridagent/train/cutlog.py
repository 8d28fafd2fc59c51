"""What a chair notes while a hand-over runs, and the report that it makes of it."""

import time
from collections.abc import Callable
from typing import Any

from gridagent import wire
from gridagent.train.transaction_events import Phase
from gridagent.train.transaction_messages import Report

_ENDS = (Phase.RUNNING, Phase.ABORTED, Phase.RETURNED, Phase.DEAD)


class CutLog:
    """Times of phases, and what sources and targets measured."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, Phase], float] = {}
        self._parts_ms: dict[str, float] = {}
        self._bytes: dict[str, int] = {}  #: rank -> what it moved
        self._digests: dict[str, dict[str, str]] = {}

    def entered(self, machine: str, phase: Phase) -> float:
        """The "member" or the "chair" of this process entered a phase; returns the time, unix seconds."""
        return self._times.setdefault((machine, phase), time.time())

    def measured(self, metrics: dict[str, Any]) -> None:
        """One end of a transfer tells its times; of several, the slowest counts."""
        for part, value in metrics["parts_ms"].items():
            self._parts_ms[part] = max(self._parts_ms.get(part, 0.0), float(value))
        self._bytes[str(metrics["rank"])] = int(metrics["bytes"])
        self._digests[str(metrics["rank"])] = dict(metrics["digests"])

    def report(self, handover: str, ended: Report, session_of: Callable[[str], str]) -> wire.CutReport:
        """The pause runs from the first time that this process knew of a standing rank to the end."""
        now_s = time.time()
        standing = ("member", Phase.PREPARED), ("chair", Phase.PREPARED)
        began_s = min(self._times.get(key, now_s) for key in standing)
        ended_s = max(self._times.get(("chair", phase), 0.0) for phase in _ENDS)
        parts_ms = dict(self._parts_ms)
        committed_s = self._times.get(("chair", Phase.COMMITTED))
        if committed_s is not None:
            parts_ms["switch"] = (ended_s - committed_s) * 1e3
        return wire.CutReport(
            handover=handover,
            outcome=ended.outcome,
            epoch=ended.epoch,
            boundary_step=ended.boundary,
            reason=ended.reason,
            found=list(ended.found),
            parts_ms=parts_ms,
            cut_ms=max(0.0, (ended_s - began_s) * 1e3),
            state_bytes=sum(self._bytes.values()),
            digests=self._digests,
            owners={str(rank): session_of(party) for rank, party in ended.owners},
            t_boundary_unix_s=began_s,
            t_resume_unix_s=ended_s,
        )
