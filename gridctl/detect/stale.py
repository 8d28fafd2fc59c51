"""Kernel lines that are told again: true before a reboot or before a repair, and acted on then.

Whoever reads a log from its beginning tells old lines anew; a node stayed drained for ever because of that
(github.com/Azure/azurehpc pull 648). A line's own time says how old it is: the youngest line of each kind
of stamp shows what "now" is.
"""

from gridagent.signals.lines import unwrap

#: A line that is so much older than what it is measured by belongs to the time before.
SLACK_S = 60.0
#: Firmware and kernel take up to this long until an agent of the new boot says its first word.
BOOT_MAX_S = 1800.0


class Stale:
    """The stamps of one node's kernel lines. 100 bytes a node."""

    __slots__ = ("_boot_s", "_now", "_since_s")

    def __init__(self) -> None:
        self._now: dict[str, float] = {}  #: kind of stamp -> the present stamp minus the time it is told
        self._boot_s = float("-inf")
        self._since_s = float("-inf")

    def booted(self, t_s: float) -> None:
        """The node has a new boot, first heard of at this time: time since boot begins anew."""
        self._boot_s = self._since_s = t_s
        self._now.pop("uptime_s", None)

    def repaired(self, t_s: float) -> None:
        """What was before this time is settled."""
        self._since_s = t_s

    def before(self, t_s: float, line: str) -> str:
        """Why a line that is told now was true before; "" for one of the present, or without a stamp."""
        record = unwrap(line)
        for kind in ("uptime_s", "t_unix_s", "year_s"):
            stamp = getattr(record, kind)
            if stamp is None:
                continue
            if kind == "uptime_s" and stamp > t_s - self._boot_s + BOOT_MAX_S:
                return f"its stamp, {stamp:.0f} s since boot, is of an earlier boot"
            ahead_s = stamp - t_s
            known_s = self._now.get(kind)
            if (
                known_s is None or ahead_s > known_s - SLACK_S
            ):  # clocks drift apart slowly, in either direction
                self._now[kind] = known_s = ahead_s
            if t_s - (known_s - ahead_s) < self._since_s - SLACK_S - self._boot_slack():
                return f"it is {known_s - ahead_s:.0f} s old, from before the last reboot or repair"
        return ""

    def _boot_slack(self) -> float:
        return BOOT_MAX_S if self._since_s == self._boot_s else 0.0
