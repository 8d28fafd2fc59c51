"""Main memory that is about to run out: said while there is time. A GPU's memory is full by design."""

from collections.abc import Iterator, Mapping

from gridagent.signals.values import number
from gridctl.detect.device import Cleared
from gridctl.detect.policy import MemoryTrend
from gridctl.model.findings import Finding

_LAYER = "trend"


class Memory:
    """The available memory of one node."""

    __slots__ = ("_limits", "_node", "_said", "_samples", "_total_mib")

    def __init__(self, limits: MemoryTrend, node: str) -> None:
        self._limits = limits
        self._node = node
        self._samples: list[tuple[float, float]] = []
        self._total_mib = 0.0  #: as told, else the most that was ever free
        self._said = False

    def feed(self, t_unix_s: float, values: Mapping[str, object]) -> Iterator[Finding | Cleared]:
        """Takes one sample of the node."""
        free_mib, limits = number(values.get("mem_avail_mib")), self._limits
        if free_mib is None:
            return
        self._total_mib = max(self._total_mib, number(values.get("mem_total_mib")) or 0.0)
        if not self._keep(t_unix_s, free_mib) or len(self._samples) < limits.samples:
            return
        third = limits.samples // 3
        plenty = free_mib > limits.share * self._total_mib
        if plenty and not self._said:
            return
        (early_s, early), (_, middle), (late_s, late) = (
            _middle(self._samples[part * third : (part + 1) * third]) for part in range(3)
        )
        falls = early > middle > late and late_s > early_s
        if self._said:
            if not falls:
                self._said = False
                yield Cleared("host_oom", "node", _LAYER)
            return
        if not falls:
            return
        left_s = late * (late_s - early_s) / (early - late)
        if left_s <= limits.left_s:
            self._said = True
            yield self._finding(t_unix_s, free_mib, left_s)

    def passes(self, t_unix_s: float, told: object) -> bool:
        """Takes what is free if that is plenty, and nothing is to be said of it; False: it is to be fed."""
        free_mib = number(told)
        if free_mib is None:
            return True
        if self._said or free_mib <= self._limits.share * max(self._total_mib, free_mib):
            return False
        self._keep(t_unix_s, free_mib)
        return True

    def _keep(self, t_unix_s: float, free_mib: float) -> bool:
        """Is this one of the samples that count? Others come too soon after one."""
        self._total_mib = max(self._total_mib, free_mib)
        if self._samples and 0 <= t_unix_s - self._samples[-1][0] < self._limits.every_s:
            return False
        self._samples = [*self._samples[-(self._limits.samples - 1) :], (t_unix_s, free_mib)]
        return True

    def _finding(self, t_unix_s: float, free_mib: float, left_s: float) -> Finding:
        share = free_mib / self._total_mib
        return Finding(
            t_unix_s=t_unix_s,
            node=self._node,
            device="node",
            kind="host_oom",
            severity="warning",
            action="manual_review",
            why=[
                f"{free_mib:.0f} MiB ({share:.0%}) are left and get less: none in {left_s:.0f} s at that rate"
            ],
            rule="memory.trend",
            layer=_LAYER,
            fault="app",
        )


def _middle(samples: list[tuple[float, float]]) -> tuple[float, float]:
    times, values = zip(*samples, strict=True)
    return sorted(times)[len(times) // 2], sorted(values)[len(values) // 2]
