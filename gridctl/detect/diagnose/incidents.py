"""Collects what the kernel driver says of GPUs into incidents: first cause wins, last word advises.

Bounded: an incident keeps its cause, counts and a few lines; incidents of one device and kind are folded
into one group, so a storm costs no memory. What is from before the last boot of a node, or what the driver
itself has called resolved, is history: it makes no finding, but repeats are judged by it.
"""

from collections.abc import Callable

import msgspec

from gridagent.signals import nvlink
from gridagent.signals.nvidia import Event, GpuLost, Identity, Silenced, Xid
from gridctl.detect.diagnose.clocks import When
from gridctl.detect.diagnose.ruling import clean
from gridctl.detect.meaning import NVLINK5, Meaning, mean, with_advice
from gridctl.detect.policy import DetectPolicy
from gridctl.detect.policy.hardware import hardware
from gridctl.model.findings import SEVERITIES

MEMORY_XIDS = frozenset((48, 63, 64, 94, 95, 140, 171, 172))
#: Numbers whose text names the part that is hurt: each distinct text is an event of its own.
_BY_TEXT = frozenset((48, 74, 94, 95, 140, *NVLINK5))
_OPEN_MAX = 2048
_GROUPS_MAX = 4096
_FEW = 3
_SOME = 64
_MANY = 4096


class Incident:
    """Events of one GPU (of one process, where a program is at fault) that belong together."""

    def __init__(self, cause: Meaning, when: When, pid: int | None) -> None:
        self.cause = cause
        self.advice = cause.advice or 0  #: the driver's last word, of NVML field 230
        self.begin = self.last = when
        self.pid = pid
        self.chain: list[int] = []
        self.lines = 0
        self.texts: dict[int, set[int]] = {}  #: hashes of texts by Xid
        self.details: list[dict[str, object]] = []
        self.evidence: list[str] = []
        self.units: set[tuple[int, int]] = set()
        self.index: int | None = None
        self.silenced = False

    @property
    def count(self) -> int:
        """Distinct events: of numbers whose text names the hurt part every text, else the incident is one."""
        cause = self.cause.xid
        if cause in NVLINK5 or cause == 74:
            counted = sum(len(texts) for xid, texts in self.texts.items() if xid in NVLINK5 or xid == 74)
        else:
            counted = len(self.texts.get(cause or 0, ()))
        return max(1, counted)

    def add(self, event: Event, when: When, lines: int, message: str) -> None:
        """Counts one more line of it."""
        self.last = self.last.joined(when)
        self.lines += lines
        if len(self.evidence) < _FEW:
            self.evidence.append(clean(message))
        if isinstance(event, Silenced):
            self.silenced = True
        if not isinstance(event, Xid):
            return
        if event.xid not in self.chain and len(self.chain) < _SOME:
            self.chain.append(event.xid)
        if event.unit is not None and len(self.units) < _SOME:
            self.units.add(event.unit)
        if event.xid in _BY_TEXT:
            texts = self.texts.setdefault(event.xid, set())
            if hash(event.text) not in texts and len(texts) < _MANY:
                texts.add(hash(event.text))
                if len(self.details) < _SOME and (detail := _detail(event)):
                    self.details.append(detail)


class Group:
    """Incidents of one device and kind in the present boot."""

    def __init__(self, host: str, pci: str, first: Incident) -> None:
        self.host = host
        self.pci = pci
        self.head = first
        self.count = 0
        self.lines = 0
        self.begins: list[When] = []
        self.events: list[dict[str, object]] = []

    def fold(self, incident: Incident, *, lasting: bool) -> None:
        """Takes in a closed incident. `lasting`: said again it is the same event."""
        if _outweighs(incident.cause, self.head.cause):
            self.head = incident
        self.lines += incident.lines
        if lasting and self.count:
            return
        self.count += incident.count
        if len(self.begins) < _SOME:
            self.begins.append(incident.begin)
        if len(self.events) < _SOME:
            self.events.extend(incident.details or [self._event(incident)])

    def _event(self, incident: Incident) -> dict[str, object]:
        cause = incident.cause
        event: dict[str, object] = {"pci": self.pci or None, "xid": cause.xid, "kind": cause.kind}
        event |= {"action": cause.action, "fault": cause.fault, "lines": incident.lines}
        if self.host:
            event["node"] = self.host
        if len(incident.chain) > 1:
            event["chain"] = incident.chain
        if incident.pid is not None and cause.fault == "app":
            event["pid"] = incident.pid
        if incident.silenced:
            event["suppressed_repeats"] = True
        return event


class History:
    """What is remembered of one GPU over boots."""

    def __init__(self) -> None:
        self.lost_boots: set[int] = set()
        self.lost_count = 0
        self.memory_boots: set[int] = set()
        self.unit_jobs: dict[tuple[int, int], dict[int, When]] = {}
        self.unit_counts: dict[tuple[int, int], int] = {}
        self.fault_jobs: dict[int, When] = {}
        self.link_failures: dict[int, int] = {}
        self.uuid = ""

    def note(self, incident: Incident, boot: int) -> None:
        """Takes notice of a closed incident."""
        cause = incident.cause
        if cause.kind == "gpu_lost":
            self.lost_count += boot not in self.lost_boots
            _put(self.lost_boots, boot)
        if MEMORY_XIDS.intersection(incident.chain):
            _put(self.memory_boots, boot)
        if cause.xid == 13 and len(incident.units) <= hardware().limit("repeat", "units_max"):
            self._note_units(incident)
        if cause.xid == 31 and incident.pid is not None:
            _last(self.fault_jobs, incident.pid, incident.begin)
        if cause.xid == 74:
            for link in {detail.get("link") for detail in incident.details}:
                if isinstance(link, int) and len(self.link_failures) < _SOME:
                    self.link_failures[link] = self.link_failures.get(link, 0) + 1

    def _note_units(self, incident: Incident) -> None:
        for unit in incident.units:
            if unit in self.unit_counts or len(self.unit_counts) < _SOME:
                self.unit_counts[unit] = self.unit_counts.get(unit, 0) + 1
                if incident.pid is not None:
                    _last(self.unit_jobs.setdefault(unit, {}), incident.pid, incident.begin)


class Incidents:
    """All incidents of all nodes of the materials."""

    def __init__(self, policy: DetectPolicy) -> None:
        self._policy = policy
        self._window_s = policy.thresholds.chain.window_s
        self._lasting = frozenset(hardware().words("incident", "lasting_kinds"))
        self._open: dict[tuple[str, str, int | None], Incident] = {}
        self.groups: dict[tuple[str, str, str, str], Group] = {}
        self.histories: dict[tuple[str, str], History] = {}
        self.boots: dict[str, int] = {}
        self.said: dict[int, list[tuple[str, When]]] = {}  #: Xid -> GPUs and times
        self.historic = 0  #: incidents of earlier boots, or resolved
        self.historic_evidence: list[str] = []

    def feed(
        self, host: str, when: When, event: Event, message: str, lines: int = 1, cause: Meaning | None = None
    ) -> None:
        """Takes an event. `cause` replaces what it means by itself."""
        if isinstance(event, Identity):
            self._history(host, event.pci).uuid = event.uuid
            return
        told = cause or mean(self._policy, event)
        if told is None:
            return
        if isinstance(event, Xid):
            self._say(event, when)
        if told.advice is not None:
            self._advise(host, event, told, when, message, lines)
            return
        pid = event.pid if isinstance(event, Xid) and told.fault == "app" else None
        incident = self._incident(host, event.pci, told, when, pid)
        incident.add(event, when, lines, message)

    def reboot(self, host: str) -> None:
        """The node has booted: what was said before is history."""
        self._close(lambda key: key[0] == host)
        for key in [key for key in self.groups if key[0] == host]:
            self._retire(key)
        self.boots[host] = self.boots.get(host, 0) + 1

    def close(self) -> None:
        """The end: nothing more will come."""
        self._close(lambda key: True)

    def lost_lately(self, host: str, pci: str, when: When) -> bool:
        """Has this GPU (any of the node, if `pci` is "") left the bus just before?"""
        return any(
            incident.cause.kind == "gpu_lost" and when.within(self._window_s, incident.last)
            for key, incident in self._open.items()
            if key[0] == host and (not pci or key[1][:-2] == pci[:-2])
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
        cases = [(key, incident.cause) for key, incident in self._open.items()]
        cases += [((key[0], key[1], None), group.head.cause) for key, group in self.groups.items()]
        return any(key[:2] == (host, pci) and cause.fault != "app" for key, cause in cases)

    def _say(self, event: Xid, when: When) -> None:
        times = self.said.setdefault(event.xid, []) if len(self.said) < _MANY else []
        if len(times) < _SOME and (not times or times[-1] != (event.pci, when)):
            times.append((event.pci, when))

    def _incident(self, host: str, pci: str, told: Meaning, when: When, pid: int | None) -> Incident:
        hardware_key = (host, pci, None)
        open_one = self._open.get(hardware_key)
        if open_one is not None and self._goes_on(open_one, told, when):
            _raise(open_one, told)
            return open_one
        key = (host, pci, pid) if told.fault == "app" else hardware_key
        open_one = self._open.get(key)
        if open_one is not None and self._goes_on(open_one, told, when):
            _raise(open_one, told)
            return open_one
        if open_one is not None:
            self._fold(key)
        if len(self._open) >= _OPEN_MAX:
            self._fold(next(iter(self._open)))
        self._open[key] = Incident(told, when, pid)
        return self._open[key]

    def _goes_on(self, incident: Incident, told: Meaning, when: When) -> bool:
        if when.within(self._window_s, incident.last):
            return True
        return told.kind == incident.cause.kind and told.kind in self._lasting

    def _advise(self, host: str, event: Event, told: Meaning, when: When, message: str, lines: int) -> None:
        """The driver's own word. That nothing is needed any more resolves what was before."""
        if told.advice == 0:
            self._close(lambda key: key[:2] == (host, event.pci))
            for key in [key for key in self.groups if key[:2] == (host, event.pci)]:
                if "replace" not in self.groups[key].head.cause.action:
                    self._retire(key)
            return
        incident = self._advised(host, event.pci, when) or self._incident(host, event.pci, told, when, None)
        incident.advice = told.advice or 0
        if incident.cause.advice is not None:
            incident.cause = told
        incident.add(event, when, lines, message)

    def _advised(self, host: str, pci: str, when: When) -> Incident | None:
        """The incident that an advice belongs to: of the hardware, else of the program that failed last."""
        near = [
            incident
            for key, incident in self._open.items()
            if key[:2] == (host, pci)
            and when.within(self._window_s, incident.last)
            and incident.cause.action != "none"
        ]
        return max(near, key=lambda incident: incident.cause.weight, default=None)

    def _close(self, chosen: Callable[[tuple[str, str, int | None]], bool]) -> None:
        for key in [key for key in self._open if chosen(key)]:
            self._fold(key)

    def _fold(self, key: tuple[str, str, int | None]) -> None:
        incident = self._open.pop(key)
        host, pci, _ = key
        self._history(host, pci).note(incident, self.boots.get(host, 0))
        if incident.cause.advice is None:
            incident.cause = with_advice(self._policy, incident.cause, incident.advice)
        cause = incident.cause
        group_key = (host, pci, cause.kind, cause.action)
        group = self.groups.get(group_key)
        if group is None:
            if len(self.groups) >= _GROUPS_MAX:
                return
            group = self.groups[group_key] = Group(host, pci, incident)
        group.fold(incident, lasting=cause.kind in self._lasting)

    def _retire(self, key: tuple[str, str, str, str]) -> None:
        group = self.groups.pop(key)
        self.historic += group.count
        if len(self.historic_evidence) < _FEW:
            self.historic_evidence.extend(group.head.evidence[:1])

    def _history(self, host: str, pci: str) -> History:
        if (host, pci) not in self.histories and len(self.histories) >= _GROUPS_MAX:
            return History()
        return self.histories.setdefault((host, pci), History())


def _raise(incident: Incident, told: Meaning) -> None:
    """One more event of the incident: a worse one becomes its cause, another may make it decisive."""
    cause = incident.cause
    if _outweighs(told, cause):
        incident.cause = told
    elif told.preempt and not cause.preempt:
        incident.cause = _decisive(cause, told)
    elif cause.xid is None and told.xid is not None and cause.kind == told.kind:
        incident.cause = told


def _decisive(cause: Meaning, told: Meaning) -> Meaning:
    rule = f"{cause.rule}+{told.rule}"
    return msgspec.structs.replace(cause, action=told.action, preempt=True, when=told.when, rule=rule)


def _outweighs(told: Meaning, cause: Meaning) -> bool:
    """Is it so much worse that the cause cannot be its cause? Equals follow the first."""
    if cause.advice is not None and told.advice is None:
        return True  # advice alone is nobody's cause
    severities = SEVERITIES.index(told.severity), SEVERITIES.index(cause.severity)
    if severities[0] == severities[1] and cause.severity == "info":
        return cause.action == "none" and told.action != "none"
    return severities[0] > severities[1]


def _detail(event: Xid) -> dict[str, object] | None:
    """What the text of an NVLink error tells, as an event of its own."""
    detail: dict[str, object] = {"xid": event.xid, "pci": event.pci or None}
    if event.xid == 74 and (told := nvlink.registers(event.text)):
        return detail | {"link": told.link, "registers": [f"{value:#x}" for value in told.registers]}
    if event.xid in NVLINK5 and (fault := nvlink.link_fault(event.text)):
        return detail | {"unit": fault.unit, "fatal": fault.fatal, "link": fault.link}
    return None


def _put(boots: set[int], boot: int) -> None:
    if len(boots) < _SOME:
        boots.add(boot)


def _last(jobs: dict[int, When], pid: int, when: When) -> None:
    if len(jobs) < _SOME or pid in jobs:
        jobs[pid] = when


def is_lost(event: Event) -> bool:
    """Does the event say that a GPU has left the bus?"""
    return isinstance(event, GpuLost) or (isinstance(event, Xid) and event.xid == 79)
