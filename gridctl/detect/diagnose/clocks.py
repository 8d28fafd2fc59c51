"""When something was logged, on whatever clock the log has, and how long after something else."""

from collections.abc import Iterable

import msgspec

from gridagent.signals.lines import KernelLine

_YEAR_S = 366 * 86400.0


class When(msgspec.Struct, frozen=True):
    """Seconds on each clock that the line tells; none of them where it has no time."""

    unix_s: float | None = None
    uptime_s: float | None = None
    year_s: float | None = None  #: since New Year, of a year that the log does not tell

    @classmethod
    def of(cls, line: KernelLine, t_unix_s: float | None = None) -> "When":
        """The time of a log line, or the one that the record around it gives."""
        return cls(line.t_unix_s if t_unix_s is None else t_unix_s, line.uptime_s, line.year_s)

    def after_s(self, earlier: "When") -> float | None:
        """Seconds since `earlier`; 0 if out of order, as logs are a little; None without a common clock."""
        if self.unix_s is not None and earlier.unix_s is not None:
            return max(0.0, self.unix_s - earlier.unix_s)
        if self.uptime_s is not None and earlier.uptime_s is not None:
            return max(0.0, self.uptime_s - earlier.uptime_s)
        if self.year_s is not None and earlier.year_s is not None:
            gap_s = self.year_s - earlier.year_s
            return max(0.0, gap_s + _YEAR_S if gap_s < -_YEAR_S / 2 else gap_s)
        return None

    def within(self, seconds: float, earlier: "When") -> bool:
        """Is this at most so long after `earlier`? Without a common clock only the order counts: yes."""
        gap_s = self.after_s(earlier)
        return gap_s is None or gap_s <= seconds

    def joined(self, later: "When") -> "When":
        """This, with every clock that `later` tells set to its time."""
        return When(
            self.unix_s if later.unix_s is None else later.unix_s,
            self.uptime_s if later.uptime_s is None else later.uptime_s,
            self.year_s if later.year_s is None else later.year_s,
        )


def clusters(times: Iterable[When], gap_s: float) -> int:
    """How many groups of times there are, with gaps of more than `gap_s` between them; at least 1."""
    count, last = 1, None
    for time in sorted(
        times, key=lambda when: (when.unix_s or 0.0, when.year_s or 0.0, when.uptime_s or 0.0)
    ):
        count += last is not None and not time.within(gap_s, last)
        last = time
    return count
