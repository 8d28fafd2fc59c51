"""Findings from what a device's driver reports. A value that is not known changes nothing."""

from collections.abc import Iterator, Mapping

import msgspec

from gridagent.signals.values import number
from gridctl.detect.policy import DetectPolicy, DeviceRow
from gridctl.model.findings import Finding


class Cleared(msgspec.Struct, frozen=True):
    """A finding of this kind no longer holds, by the word of the source that made it."""

    kind: str
    device: str = ""  #: "": the one whose sample it was
    layer: str = "device"


class Device:
    """One device of one node: its counters, and what it reports at present."""

    __slots__ = ("_last", "_name", "_node", "_policy", "_recovery", "changed", "rate")

    def __init__(self, policy: DetectPolicy, node: str, name: str) -> None:
        self._policy = policy
        self._node = node
        self._name = name
        self._last: dict[str, float] = {}
        self._recovery = 0.0
        self.rate = CorrectedRate(policy)
        self.changed = True  #: did the last sample change anything here?

    def feed(self, t_unix_s: float, values: Mapping[str, object]) -> Iterator[Finding | Cleared]:
        """Takes one sample: metric -> value."""
        self.changed = False
        for metric, row in self._policy.devices.items():
            value = number(values.get(metric))
            if value is None:
                continue
            last = self._last.get(metric)
            if value == last:
                continue
            self.changed = True
            self._last[metric] = value
            if row.change == "rise":
                if last is not None and value > last:
                    yield self._by_row(t_unix_s, row, f"{metric} went from {last:g} to {value:g}")
            elif value and not last:
                yield self._by_row(t_unix_s, row, f"{metric} is {value:g}")
            elif last and not value:
                yield Cleared(row.kind)
        yield from self._recovery_action(t_unix_s, number(values.get("recovery_action")))
        yield from self._corrected(t_unix_s, values)

    def _by_row(self, t_unix_s: float, row: DeviceRow, seen: str) -> Finding:
        return self._make(
            t_unix_s,
            row.kind,
            row.severity,
            row.action,
            when=row.when,
            preempt=row.preempt == "yes",
            why=f"{seen}: {row.meaning}",
            rule=f"device.{row.metric}",
            fault=row.fault,
        )

    def _recovery_action(self, t_unix_s: float, value: float | None) -> Iterator[Finding | Cleared]:
        if value is None or value == self._recovery:
            return
        self.changed = True
        self._recovery = value
        if value == 0:
            yield Cleared("recovery_action_pending")
            return
        row = self._policy.recovery.get(int(value))
        name = row.name if row else "an action that has no known meaning"
        yield self._make(
            t_unix_s,
            "recovery_action_pending",
            row.severity if row else "warning",
            row.action if row else "manual_review",
            when=row.when if row else "none",
            preempt=row is not None and row.preempt == "yes",
            why=f"recovery_action is {value:g}: the driver asks for: {name}",
            rule=f"recovery.{value:g}",
            fault="node",
        )

    def _corrected(self, t_unix_s: float, values: Mapping[str, object]) -> Iterator[Finding | Cleared]:
        limits = self._policy.thresholds.ecc_corrected_rate
        total, load_pct = number(values.get("ecc_sbe_total")), number(values.get("util_pct"))
        level, rate = self.rate.feed(t_unix_s, total, load_pct)
        self.changed |= self.rate.changed
        if level == "clear":
            yield Cleared("ecc_corrected_rate")
        elif level:
            critical = level == "critical"
            yield self._make(
                t_unix_s,
                "ecc_corrected_rate",
                "critical" if critical else "warning",
                "drain_and_replace_gpu" if critical else "observe",
                when="after_job" if critical else "none",
                preempt=False,
                why=f"at least {rate:.0f} corrected memory errors a second under load in {limits.samples} of "
                f"{limits.of} samples (limit {limits.critical_per_s if critical else limits.watch_per_s:g})",
                rule=f"device.ecc_corrected_rate.{level}",
                fault="node",
            )

    def _make(
        self,
        t_unix_s: float,
        kind: str,
        severity: str,
        action: str,
        *,
        when: str,
        preempt: bool,
        why: str,
        rule: str,
        fault: str,
    ) -> Finding:
        return Finding(
            t_unix_s=t_unix_s,
            node=self._node,
            device=self._name,
            kind=kind,
            severity=severity,
            action=action,
            preempt_job=preempt,
            when=when,
            why=[why],
            rule=rule,
            layer="device",
            fault=fault,
        )


class CorrectedRate:
    """Corrected errors a second: N of M samples under load; idle samples count neither way."""

    __slots__ = ("_last", "_level", "_limits", "_quiet", "_rates", "changed")

    def __init__(self, policy: DetectPolicy) -> None:
        self._limits = policy.thresholds.ecc_corrected_rate
        self._last: tuple[float, float] | None = None
        self._rates = (0.0,) * self._limits.of  #: the newest last
        self._quiet = 0
        self._level = ""
        self.changed = True  #: did the last sample change anything but the time?

    def feed(self, t_unix_s: float, total: float | None, load_pct: float | None) -> tuple[str, float]:
        """Returns the level that is newly reached ("watch", "critical", "clear") or "", and the rate."""
        self.changed = False
        if total is None:
            return "", 0.0
        last, self._last = self._last, (t_unix_s, total)
        self.changed = last is None or total != last[1]
        loaded = load_pct is not None and load_pct >= self._limits.load_util_pct
        if last is None or t_unix_s <= last[0] or total < last[1] or not loaded:
            return "", 0.0
        rate = (total - last[1]) / (t_unix_s - last[0])
        self.changed |= bool(rate or self._level or any(self._rates))
        self._rates = (*self._rates[1:], rate)
        self._quiet = self._quiet + 1 if self._rates[-1] < self._limits.watch_per_s / 2 else 0
        if self._level and self._quiet >= self._limits.clear_samples:
            self._level = ""
            return "clear", 0.0
        sustained = self._sustained()
        if sustained >= self._limits.critical_per_s:
            reached = "critical"
        else:
            reached = "watch" if sustained >= self._limits.watch_per_s else ""
        if reached and reached != self._level and self._level != "critical":
            self._level = reached
            return reached, sustained
        return "", sustained

    def passed_over(self, t_unix_s: float) -> None:
        """Until then samples came that changed nothing."""
        if self._last is not None and t_unix_s > self._last[0]:
            self._last = (t_unix_s, self._last[1])

    def _sustained(self) -> float:
        """The rate that the required number of the last samples reach."""
        return sorted(self._rates, reverse=True)[self._limits.samples - 1]
