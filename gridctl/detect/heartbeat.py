"""How long a node may be silent, and who else cannot reach it."""

import math

from gridctl.detect.policy import Heartbeat

#: The newest interval counts this much: about the last twenty decide.
_NEWEST = 0.1
_OBSERVERS_MAX = 64
_SPREAD_MIN_S = 0.1


class Rhythm:
    """A phi-accrual failure detector: how unlikely is so long a silence, by the node's own rhythm?

    After Hayashibara et al., "The phi accrual failure detector" (2004); intervals are taken as normal,
    with a floor below their spread. 40 bytes a node.
    """

    __slots__ = ("_count", "_last_s", "_mean_s", "_spread_s")

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._mean_s = 0.0
        self._spread_s = 0.0
        self._count = 0

    def beat(self, now_s: float, limits: Heartbeat) -> None:
        """Takes one heartbeat. A gap that was itself a silence does not change the rhythm."""
        interval_s = now_s - self._last_s
        if interval_s < 0:
            return
        above_s = interval_s - self._mean_s
        # Up to the least spread above the mean phi is below 0.8: nearly every interval need not be weighed.
        if above_s > _SPREAD_MIN_S and self._suspicious(interval_s, limits):
            self._last_s = now_s
            return
        self._last_s = now_s
        if interval_s == math.inf:
            return
        self._count += 1
        weight = max(_NEWEST, 1 / self._count)
        if self._count > 1:
            self._spread_s += weight * (abs(above_s) - self._spread_s)
        self._mean_s += weight * above_s

    def beats(self, first_s: float, every_s: float, times: int, limits: Heartbeat) -> None:
        """Takes a row of heartbeats; once one of them has moved nothing, those after it do not, either."""
        for turn in range(times):
            before = (self._mean_s, self._spread_s)
            self.beat(first_s + turn * every_s, limits)
            if turn and self._count * _NEWEST >= 1 and before == (self._mean_s, self._spread_s):
                self._last_s = first_s + (times - 1) * every_s
                return

    def _suspicious(self, interval_s: float, limits: Heartbeat) -> bool:
        return self._count >= limits.intervals_min and self.phi(interval_s, limits) >= limits.phi

    def phi(self, silent_s: float, limits: Heartbeat) -> float:
        """-log10 of the probability that a sound node is silent for so long; 0 while too little is known."""
        if self._count < limits.intervals_min:
            return 0.0
        spread_s = max(self._spread_s, limits.spread_min_share * self._mean_s, _SPREAD_MIN_S)
        chance = 0.5 * math.erfc((silent_s - self._mean_s) / spread_s / math.sqrt(2.0))
        return -math.log10(max(chance, 1e-300))

    def known(self, limits: Heartbeat) -> bool:
        """Were there enough intervals to speak of a rhythm?"""
        return self._count >= limits.intervals_min

    def silent(self, silent_s: float, limits: Heartbeat) -> bool:
        """Is that too long? Never below `silent_s`; without a rhythm, that alone decides."""
        if silent_s <= limits.silent_s:
            return False
        return self._count < limits.intervals_min or self.phi(silent_s, limits) >= limits.phi


class Observers:
    """Who cannot reach a node at present: observer -> misses in a row. An answer to anybody ends all."""

    __slots__ = ("_misses", "answered_s")

    def __init__(self) -> None:
        self._misses: dict[str, int] = {}
        self.answered_s = -math.inf

    def probe(self, observer: str, answered: bool, now_s: float) -> None:
        """Takes one probe of the node."""
        if answered:
            self._misses.clear()
            self.answered_s = now_s
        elif observer in self._misses or len(self._misses) < _OBSERVERS_MAX:
            self._misses[observer] = self._misses.get(observer, 0) + 1

    def failing(self, misses: int) -> list[str]:
        """The observers that have missed it so often in a row, by name."""
        return sorted(name for name, count in self._misses.items() if count >= misses)
