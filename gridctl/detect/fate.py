"""Who shares a fate: the same on several nodes of one job, rack or NVLink domain has one cause."""

from collections import deque
from collections.abc import Iterator, Mapping

from gridctl.detect.policy import SharedFate
from gridctl.model.findings import WatchedNode

_RECENT_MAX = 256
_KINDS_MAX = 4096


def rail(device: str) -> str:
    """The adapter of a port: those of the same name on all nodes hang on one switch. "" for other devices."""
    return device.removeprefix("nic:").partition("/")[0] if device.startswith("nic:") else ""


class Fate:
    """Remembers which kinds were seen lately on which nodes of a group."""

    def __init__(self, limits: SharedFate, jobs: Mapping[str, set[str]]) -> None:
        self._limits = limits
        self._jobs = jobs
        self._recent: dict[tuple[str, str], deque[tuple[float, str]]] = {}

    def groups(self, facts: WatchedNode, device: str = "node") -> Iterator[str]:
        """What a node, or a port of it, shares with others, in words."""
        if port := rail(device):
            yield f"rail {port}"
        for job in sorted(self._jobs.get(facts.name, ())):
            yield f"job {job}"
        for what in ("nvlink_domain", "rack", "cooling_zone"):
            if value := getattr(facts, what):
                yield f"{what} {value}"

    def add(self, t_unix_s: float, facts: WatchedNode, kind: str, device: str = "node") -> None:
        """Something of this kind was seen on a node."""
        for group in self.groups(facts, device):
            recent = self._recent.pop((kind, group), None) or deque(maxlen=_RECENT_MAX)
            self._recent[(kind, group)] = recent  # the newest stands last
            recent.append((t_unix_s, facts.name))
        while len(self._recent) > _KINDS_MAX:
            del self._recent[next(iter(self._recent))]

    def sharers(
        self, t_unix_s: float, facts: WatchedNode, kind: str, device: str = "node"
    ) -> tuple[str, list[str]]:
        """The group with most nodes that have had the same within the window, and these nodes by name."""
        best: tuple[str, list[str]] = ("", [facts.name])
        for group in self.groups(facts, device):
            recent = self._recent.get((kind, group), ())
            near = sorted({name for at, name in recent if abs(t_unix_s - at) <= self._limits.window_s})
            if len(near) > len(best[1]):
                best = (group, near)
        return best

    def shared(self, t_unix_s: float, facts: WatchedNode, kind: str, device: str = "node") -> str:
        """Why this is no matter of the node alone; "" if it may be one."""
        group, nodes = self.sharers(t_unix_s, facts, kind, device)
        if len(nodes) < self._limits.nodes:
            return ""
        return f"the same on {len(nodes)} nodes of {group} within {self._limits.window_s:.0f} s"
