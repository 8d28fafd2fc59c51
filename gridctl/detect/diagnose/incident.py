"""One incident of a GPU, incidents of one kind as a group, and what is remembered of a GPU over boots.

Bounded: an incident keeps its cause, counts and a few lines; incidents of one device and kind are folded into
one group, so a storm costs no memory.
"""

import msgspec

from gridagent.signals import nvlink
from gridagent.signals.nvidia import Event, Silenced, Xid
from gridctl.detect.diagnose.clocks import When
from gridctl.detect.diagnose.ruling import clean
from gridctl.detect.diagnose.saying import address
from gridctl.detect.meaning import NVLINK5, Meaning
from gridctl.detect.policy.hardware import hardware
from gridctl.model.findings import SEVERITIES

MEMORY_XIDS = frozenset((48, 63, 64, 94, 95, 140, 171, 172))
#: Numbers whose text names the part that is hurt: each distinct text is an event of its own.
_BY_TEXT = frozenset((48, 74, 94, 95, 140, *NVLINK5))
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
        if outweighs(incident.cause, self.head.cause):
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
        event: dict[str, object] = {"pci": address(self.pci), "xid": cause.xid, "kind": cause.kind}
        if self.pci.startswith("#"):
            event["index"] = int(self.pci[1:])
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
        self.losses = 0
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
            self.losses += 1
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


def raise_cause(incident: Incident, told: Meaning) -> None:
    """One more event of the incident: a worse one becomes its cause, another may make it decisive."""
    cause = incident.cause
    if outweighs(told, cause):
        incident.cause = told
    elif told.preempt and not cause.preempt:
        incident.cause = _decisive(cause, told)
    elif cause.xid is None and told.xid is not None and cause.kind == told.kind:
        incident.cause = told


def _decisive(cause: Meaning, told: Meaning) -> Meaning:
    rule = f"{cause.rule}+{told.rule}"
    return msgspec.structs.replace(cause, action=told.action, preempt=True, when=told.when, rule=rule)


def outweighs(told: Meaning, cause: Meaning) -> bool:
    """Is it so much worse that the cause cannot be its cause? Equals follow the first."""
    if cause.advice is not None and told.advice is None:
        return True  # advice alone is nobody's cause
    severities = SEVERITIES.index(told.severity), SEVERITIES.index(cause.severity)
    if severities[0] == severities[1] and cause.severity == "info":
        return cause.action == "none" and told.action != "none"
    return severities[0] > severities[1]


def _detail(event: Xid) -> dict[str, object] | None:
    """What the text of an NVLink error tells, as an event of its own."""
    detail: dict[str, object] = {"xid": event.xid, "pci": address(event.pci)}
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
