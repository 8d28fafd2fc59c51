"""Limits on how many nodes may be given up in how short a time. It only ever holds back new evictions."""

from collections import deque

from gridctl.detect.policy import BreakerLimits
from gridctl.model.findings import WatchedNode

_KEPT_MAX = 4096


class Breaker:
    """An absolute and a relative limit for the fleet, and one for each rack and NVLink domain.

    What is held back is asked for again with every later record of the node. While more nodes wait than
    the fleet's limit allows in all, none of them goes: so many at once have one cause, and a person decides.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._made: deque[tuple[float, WatchedNode]] = deque(maxlen=_KEPT_MAX)
        self._waiting: set[str] = set()

    def forget(self, node: str) -> None:
        """The node waits no longer: it was released, or nothing is wrong with it any more."""
        self._waiting.discard(node)

    def refuses(self, t_unix_s: float, facts: WatchedNode, nodes: int) -> tuple[str, str] | None:
        """The rule and the reason to hold back an eviction; None: go, and it counts from now on."""
        limits = self._limits
        hour = {n.name for at, n in self._made if abs(t_unix_s - at) <= limits.fleet_window_s}
        cap = max(limits.fleet_nodes, int(limits.fleet_share * nodes))
        others = len(self._waiting - {facts.name})
        if facts.name not in hour and (len(hour) >= cap or others >= cap):
            self._waiting.add(facts.name)
            within = f"{len(hour)} evictions within {limits.fleet_window_s:.0f} s"
            why = f"{within} and {others} nodes waiting (limit {cap})"
            return "cap.fleet", why
        for what in ("nvlink_domain", "rack"):
            group = getattr(facts, what)
            near = {
                n.name
                for at, n in self._made
                if getattr(n, what) == group and abs(t_unix_s - at) <= limits.group_window_s
            } - {facts.name}
            if group and len(near) >= limits.group_nodes:
                self._waiting.add(facts.name)
                return f"cap.{what}", f"{', '.join(sorted(near))} of {what} {group} went just before"
        self._waiting.discard(facts.name)
        self._made.append((t_unix_s, facts))
        return None
