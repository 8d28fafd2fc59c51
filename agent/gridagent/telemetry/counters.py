"""The arithmetic of counters that start again, at a reset or at the end of their range. Pure."""

from collections.abc import Mapping

#: No CPU package or memory takes more: a higher result is a counter that was reset.
WATTS_MAX = 2000.0


class Total:
    """A sum over counters of which each may be reset or vanish. It never falls."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._sum = 0.0

    def add(self, values: Mapping[str, float | None]) -> float | None:
        """Takes a reading of all counters. None (unknown) if none of them ever had a value.

        A counter counts from its first value on, which is its number since boot; one that vanishes
        keeps what it had, and when it is back what it has more, or all of it after a reset.
        """
        for key, value in values.items():
            if value is not None:
                self._sum += rise(self._last.get(key, 0), value)
                self._last[key] = value
        return self._sum if self._last else None


def rise(before: float, after: float) -> float:
    """How far a counter rose between two readings. One that fell was reset, and has risen from 0."""
    return after - before if after >= before else after


def watts(before_uj: float, after_uj: float, range_uj: float | None, elapsed_s: float) -> float | None:
    """Mean power between two readings of an energy counter that starts again from 0 after `range_uj`.

    None where it cannot be known: the counter may have gone round more than once, or was reset.
    """
    if elapsed_s <= 0 or min(before_uj, after_uj) < 0:
        return None
    rose_uj = after_uj - before_uj
    if range_uj is None or range_uj <= 0 or max(before_uj, after_uj) > range_uj:
        if rose_uj < 0:
            return None
    elif elapsed_s * WATTS_MAX * 1e6 >= range_uj:
        return None
    elif rose_uj < 0:
        rose_uj += range_uj
    power_w = rose_uj / 1e6 / elapsed_s
    return power_w if power_w <= WATTS_MAX else None
