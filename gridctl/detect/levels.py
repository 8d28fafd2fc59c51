"""Values that say something only if they stay: N of M samples, and a quiet row of samples to end it.

The rows stand in policy/levels.tsv. A row costs a device 8 bytes of history, and its last increases.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from gridagent.signals.values import number
from gridctl.detect.device import Cleared
from gridctl.detect.policy import LevelRow
from gridctl.model.findings import Finding


class Levels:
    """The rows of one device. A value that is not known counts neither way."""

    __slots__ = ("_at_s", "_history", "_last", "_name", "_node", "_rises", "_rows", "_said", "changed")

    def __init__(self, rows: list[LevelRow], node: str, name: str) -> None:
        self._rows = rows
        self._node = node
        self._name = name
        self._history = [0] * len(rows)  #: the last samples as bits, the newest lowest
        self._said = 0  #: rows that hold at present, as bits
        self._last: dict[int, float] = {}
        self._at_s: dict[int, float] = {}  #: when a counter whose rate counts was read last
        self._rises: dict[int, deque[float]] = {}
        self.changed = True  #: did the last sample change anything here?

    def feed(self, t_unix_s: float, values: Mapping[str, object]) -> Iterator[Finding | Cleared]:
        """Takes one sample: metric -> value."""
        self.changed = False
        load_pct = number(values.get("util_pct"))
        for index, row in enumerate(self._rows):
            if row.load_pct and (load_pct is None or load_pct < row.load_pct):
                continue
            value = number(values.get(row.metric))
            if value is None:
                continue
            if row.test == "rises":
                holds, ended = self._rising(index, row, t_unix_s, value)
            elif row.test == "rate":
                holds, ended = self._rate(index, row, t_unix_s, value)
            else:
                holds, ended = self._staying(index, row, values, value)
            bit = 1 << index
            if holds and not self._said & bit:
                self._said |= bit
                yield self._finding(t_unix_s, row, value)
            elif ended and self._said & bit:
                self._said &= ~bit
                if not self._still(row):
                    yield Cleared(row.kind, self._name, row.layer)

    def _still(self, gone: LevelRow) -> bool:
        """Does another row hold what this one said?"""
        said = [row for index, row in enumerate(self._rows) if self._said >> index & 1]
        return any((row.kind, row.layer) == (gone.kind, gone.layer) for row in said)

    def _staying(
        self, index: int, row: LevelRow, values: Mapping[str, object], value: float
    ) -> tuple[bool, bool]:
        if row.test == "at_least":
            hit = value >= row.value
        elif row.test == "at_most":
            hit = value <= row.value
            if not hit:
                self.changed |= index not in self._last
                self._last[index] = value
            elif index not in self._last:
                return (
                    False,
                    False,
                )  # it never was better: a port that is not used, a sensor that is not wired
        elif row.test == "mask":
            hit = value >= 0 and bool(int(value) & int(row.value))
        else:
            limit = number(values.get(f"{row.metric}_max"))
            hit = limit is not None and 0 < value < limit
        return self._counted(index, row, hit)

    def _counted(self, index: int, row: LevelRow, hit: bool) -> tuple[bool, bool]:
        history = (self._history[index] << 1 | hit) & ((1 << row.of) - 1)
        self.changed |= history != self._history[index]
        self._history[index] = history
        return history.bit_count() >= row.count, history == 0

    def _rate(self, index: int, row: LevelRow, t_unix_s: float, value: float) -> tuple[bool, bool]:
        last, last_s = self._last.get(index), self._at_s.get(index)
        self._last[index], self._at_s[index] = value, t_unix_s
        self.changed |= value != last
        if last is None or last_s is None or value < last or t_unix_s <= last_s:
            return False, False
        return self._counted(index, row, value - last >= row.value * (t_unix_s - last_s))

    def passed_over(self, t_unix_s: float, form: Any) -> None:
        """At that time an equal sample came and was not fed: counters whose rate counts were read."""
        for index, at_s in self._at_s.items():
            if t_unix_s > at_s and number(getattr(form, self._rows[index].metric)) is not None:
                self._at_s[index] = t_unix_s

    def _rising(self, index: int, row: LevelRow, t_unix_s: float, value: float) -> tuple[bool, bool]:
        last = self._last.get(index)
        self._last[index] = value
        rises = self._rises.get(index)
        self.changed |= value != last or bool(rises)
        if last is not None and value > last:  # a counter that goes down has been reset
            if rises is None:
                rises = self._rises[index] = deque(maxlen=row.count)
            rises.append(t_unix_s)
        if not rises:
            return False, False
        within = len(rises) == row.count and t_unix_s - rises[0] <= row.window_s
        ended = t_unix_s - rises[-1] > row.window_s
        if ended:
            del self._rises[index]
        return within, ended

    def _finding(self, t_unix_s: float, row: LevelRow, value: float) -> Finding:
        if row.test == "rises":
            seen = f"{row.metric} went up {row.count} times within {row.window_s:.0f} s, to {value:g}"
        elif row.test == "rate":
            limit = f"{row.value:g} a second in {row.count} of {row.of} readings"
            seen = f"{row.metric} went up by at least {limit}, to {value:g}"
        else:
            seen = f"{row.metric} is {value:g}, like in {row.count} of {row.of} samples"
        return Finding(
            t_unix_s=t_unix_s,
            node=self._node,
            device=self._name,
            kind=row.kind,
            severity=row.severity,
            action=row.action,
            when=row.when,
            why=[f"{seen}: {row.meaning}"],
            rule=f"level.{row.rule}",
            layer=row.layer,
            fault=row.fault,
        )
