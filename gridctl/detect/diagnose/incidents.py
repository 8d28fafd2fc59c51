"""Collects what the kernel driver says of GPUs into incidents: first cause wins, last word advises.

What is from before the last boot of a node, or what the driver itself has called resolved, is history: it
makes no finding, but repeats are judged by it.
"""

from collections.abc import Callable, Iterator

from gridagent.signals.nvidia import Event, GpuLost, Identity, Xid
from gridctl.detect.diagnose.clocks import When
from gridctl.detect.diagnose.incident import Group, History, Incident, raise_cause
from gridctl.detect.meaning import Meaning, mean, with_advice
from gridctl.detect.policy import DetectPolicy
from gridctl.detect.policy.hardware import hardware

_NODES_MAX = 4096
_OPEN_MAX = 2048
_GROUPS_MAX = 2048
#: Incidents, groups and histories of all nodes.
_ALL_MAX = 131_072
_FEW = 3
_SOME = 64
_XIDS_MAX = 4096


class _Node:
    """Incidents of one node. Keys begin with the GPU: its address, "#index" or UUID."""

    def __init__(self) -> None:
        self.boot = 0
        self.open: dict[tuple[str, int | None], Incident] = {}  #: by GPU and process
        self.groups: dict[tuple[str, str, str], Group] = {}  #: by GPU, kind and action
        self.histories: dict[str, History] = {}

    def history(self, pci: str, room: bool) -> History:
        """What is remembered of a GPU; without room for another one nothing is."""
        if pci not in self.histories and (len(self.histories) >= _GROUPS_MAX or not room):
            return History()
        return self.histories.setdefault(pci, History())

    def size(self) -> int:
        """How much is remembered."""
        return len(self.open) + len(self.groups) + len(self.histories)


class Incidents:
    """All incidents of all nodes of the materials."""

    def __init__(self, policy: DetectPolicy) -> None:
        self._policy = policy
        self._window_s = policy.thresholds.chain.window_s
        self._again_s = hardware().limit("incident", "lost_again_s")
        self._lasting = frozenset(hardware().words("incident", "lasting_kinds"))
        self._nodes: dict[str, _Node] = {}
        self._size = 0  #: of all nodes
        self.said: dict[int, list[tuple[str, When]]] = {}  #: Xid -> GPUs and times
        self.historic = 0  #: incidents of earlier boots, or resolved
        self.historic_evidence: list[str] = []

    def feed(
        self, host: str, when: When, event: Event, message: str, lines: int = 1, cause: Meaning | None = None
    ) -> None:
        """Takes an event. `cause` replaces what it means by itself."""
        node = self._node(host)
        if node is None:
            return
        before = node.size()
        self._take(node, host, when, event, message, lines, cause)
        self._size += node.size() - before

    def _take(
        self,
        node: _Node,
        host: str,
        when: When,
        event: Event,
        message: str,
        lines: int,
        cause: Meaning | None,
    ) -> None:
        if isinstance(event, Identity):
            node.history(event.pci, self._room).uuid = event.uuid
            return
        told = cause or mean(self._policy, event)
        if told is None:
            return
        if isinstance(event, Xid):
            self._say(event, when)
        if told.advice is not None:
            self._advise(node, host, event, told, when, message, lines)
            return
        pid = event.pid if isinstance(event, Xid) and told.fault == "app" else None
        incident = self._incident(node, host, event.pci, told, when, pid)
        incident.add(event, when, lines, message)

    def reboot(self, host: str) -> None:
        """The node has booted: what was said before is history."""
        node = self._node(host)
        if node is not None:
            before = node.size()
            self._close(node, host, lambda pci: True)
            for key in list(node.groups):
                self._retire(node, key)
            node.boot += 1
            self._size += node.size() - before

    def close(self) -> None:
        """The end: nothing more will come."""
        for host, node in self._nodes.items():
            self._close(node, host, lambda pci: True)

    def groups(self) -> Iterator[Group]:
        """What holds in the present boots, of all nodes."""
        for node in self._nodes.values():
            yield from node.groups.values()

    def histories(self, host: str) -> dict[str, History]:
        """What is remembered of a node's GPUs."""
        return self._nodes[host].histories if host in self._nodes else {}

    def lost_lately(self, host: str, pci: str, when: When) -> bool:
        """Has this GPU (any of the node, if `pci` is "") left the bus just before?"""
        node = self._nodes.get(host)
        return node is not None and any(
            incident.cause.kind == "gpu_lost" and when.within(self._window_s, incident.last)
            for key, incident in node.open.items()
            if not pci or key[0][:-2] == pci[:-2]
        )

    def was_said(self, pci: str, xid: int, when: When, window_s: float) -> bool:
        """Has the log told of this Xid near `when`, on this GPU or on one without a known address?"""
        return any(
            (not pci or not device or pci == device)
            and (when.after_s(t) is None or (when.within(window_s, t) and t.within(window_s, when)))
            for device, t in self.said.get(xid, ())
        )

    def befallen(self, host: str, pci: str) -> bool:
        """Is anything known of this GPU that is no program's fault?"""
        node = self._nodes.get(host) or _Node()
        cases = [incident.cause for key, incident in node.open.items() if key[0] == pci]
        cases += [group.head.cause for key, group in node.groups.items() if key[0] == pci]
        return any(cause.fault != "app" for cause in cases)

    @property
    def _room(self) -> bool:
        return self._size < _ALL_MAX

    def _node(self, host: str) -> _Node | None:
        if host not in self._nodes and len(self._nodes) >= _NODES_MAX:
            return None
        return self._nodes.setdefault(host, _Node())

    def _say(self, event: Xid, when: When) -> None:
        times = self.said.setdefault(event.xid, []) if len(self.said) < _XIDS_MAX else []
        if len(times) < _SOME and (not times or times[-1] != (event.pci, when)):
            times.append((event.pci, when))

    def _incident(
        self, node: _Node, host: str, pci: str, told: Meaning, when: When, pid: int | None
    ) -> Incident:
        """The incident that goes on with this, else a new one."""
        key = (pci, pid if told.fault == "app" else None)
        for candidate in dict.fromkeys(((pci, None), key)):
            open_one = node.open.get(candidate)
            if open_one is not None and self._goes_on(open_one, told, when):
                raise_cause(open_one, told)
                return open_one
        if key in node.open:
            self._fold(node, host, key)
        if len(node.open) >= _OPEN_MAX or (node.open and not self._room):
            self._fold(node, host, next(iter(node.open)))
        node.open[key] = Incident(told, when, pid)
        return node.open[key]

    def _goes_on(self, incident: Incident, told: Meaning, when: When) -> bool:
        if when.within(self._window_s, incident.last):
            return True
        if told.kind == "gpu_lost":  # what leaves the bus again has been back in between
            return told.kind == incident.cause.kind and when.within(self._again_s, incident.last)
        return told.kind == incident.cause.kind and told.kind in self._lasting

    def _advise(
        self, node: _Node, host: str, event: Event, told: Meaning, when: When, message: str, lines: int
    ) -> None:
        """The driver's own word. That nothing is needed any more resolves what was before."""
        if told.advice == 0:
            self._close(node, host, lambda pci: pci == event.pci)
            for key in [key for key in node.groups if key[0] == event.pci]:
                if "replace" not in node.groups[key].head.cause.action:
                    self._retire(node, key)
            return
        incident = self._advised(node, event.pci, when)
        if incident is None:
            incident = self._incident(node, host, event.pci, told, when, None)
        incident.advice = told.advice or 0
        if incident.cause.advice is not None:
            incident.cause = told
        incident.add(event, when, lines, message)

    def _advised(self, node: _Node, pci: str, when: When) -> Incident | None:
        """The incident that an advice belongs to: of the hardware, else of the program that failed last."""
        near = [
            incident
            for key, incident in node.open.items()
            if key[0] == pci
            and (when.within(self._window_s, incident.last) or incident.cause.kind in self._lasting)
            and incident.cause.action != "none"
        ]
        return max(near, key=lambda incident: incident.cause.weight, default=None)

    def _close(self, node: _Node, host: str, chosen: Callable[[str], bool]) -> None:
        for key in [key for key in node.open if chosen(key[0])]:
            self._fold(node, host, key)

    def _fold(self, node: _Node, host: str, key: tuple[str, int | None]) -> None:
        """Closes an incident."""
        incident = node.open.pop(key)
        node.history(key[0], self._room).note(incident, node.boot)
        if incident.cause.advice is None:
            incident.cause = with_advice(self._policy, incident.cause, incident.advice)
        cause = incident.cause
        group_key = (key[0], cause.kind, cause.action)
        group = node.groups.get(group_key)
        if group is None:
            if len(node.groups) >= _GROUPS_MAX or (node.groups and not self._room):
                return
            group = node.groups[group_key] = Group(host, key[0], incident)
        group.fold(incident, lasting=cause.kind in self._lasting)

    def _retire(self, node: _Node, key: tuple[str, str, str]) -> None:
        group = node.groups.pop(key)
        self.historic += group.count
        if len(self.historic_evidence) < _FEW:
            self.historic_evidence.extend(group.head.evidence[:1])


def is_lost(event: Event) -> bool:
    """Does the event say that a GPU has left the bus?"""
    return isinstance(event, GpuLost) or (isinstance(event, Xid) and event.xid == 79)
