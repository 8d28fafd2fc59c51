"""NVSwitch errors (SXid): headlines count, lines that only dump registers do not."""

from collections.abc import Iterator

from gridagent.signals.nvlink import SwitchError
from gridctl.detect.diagnose.clocks import When, clusters
from gridctl.detect.diagnose.ruling import clean
from gridctl.detect.diagnose.saying import rule
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis

_EVENTS_MAX = 1024
_ALL_EVENTS_MAX = 65_536
_FEW = 3


class _Found:
    """Distinct errors of one rule on one node."""

    def __init__(self, first: SwitchError) -> None:
        self.first = first
        self.lines = 0
        self.times: list[When] = []
        self.events: dict[tuple[str, int, int | None], dict[str, object]] = {}
        self.evidence: list[str] = []


class Switches:
    """All NVSwitch errors of all nodes."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._found: dict[str, dict[str, _Found]] = {}  #: node -> rule -> what was found
        self._events = 0  #: of all nodes
        self._headlines: set[tuple[str, str, int]] = set()

    def take(self, host: str, when: When, error: SwitchError, message: str) -> None:
        """One line of the switch driver."""
        key = (host, error.pci, error.sxid)
        dump = not error.text.lower().startswith(("fatal", "non-fatal", "nonfatal"))
        name = self._rule(error)
        if name is None or (dump and key in self._headlines):
            return
        if not dump and len(self._headlines) < _EVENTS_MAX:
            self._headlines.add(key)
        if host not in self._found and len(self._found) >= _EVENTS_MAX:
            return
        found = self._found.setdefault(host, {}).setdefault(name, _Found(error))
        found.lines += 1
        if len(found.times) < _EVENTS_MAX:
            found.times.append(when)
        if len(found.evidence) < _FEW:
            found.evidence.append(clean(message))
        event: dict[str, object] = {"sxid": error.sxid, "pci": error.pci or None, "switch": error.switch}
        event |= {"link": error.link} | ({"node": host} if host else {})
        if len(found.events) < _EVENTS_MAX and self._events < _ALL_EVENTS_MAX:
            self._events += (error.pci, error.sxid, error.link) not in found.events
            found.events.setdefault((error.pci, error.sxid, error.link), event)

    def reboot(self, host: str) -> None:
        """What was before the boot is history."""
        self._events -= sum(len(found.events) for found in self._found.pop(host, {}).values())

    def findings(self, suspect: str) -> Iterator[Diagnosis]:
        """`suspect`: address of a GPU that no tool reaches, or "": it is what a fatal error has hit."""
        for name, found in [item for rules in self._found.values() for item in rules.items()]:
            fatal = hardware().rules[name].preempt == "yes"
            count = clusters(found.times, self._window_s) if fatal else len(found.events)
            pci = (suspect if fatal else "") or found.first.pci
            evidence = found.evidence
            if fatal and suspect:
                evidence = [*evidence, f"no tool reaches the GPU {suspect}"]
            yield rule(
                name,
                evidence,
                pci=pci,
                sxid=found.first.sxid,
                count=count,
                lines=found.lines,
                events=list(found.events.values()),
            )

    @staticmethod
    def _rule(error: SwitchError) -> str | None:
        row = hardware().switches.get(error.sxid)
        if row is not None and (row.whatever_word == "yes" or not error.fatal):
            return row.rule if error.fatal is not None or row.whatever_word == "yes" else None
        if error.fatal is None:
            return None
        return "sxid.fatal" if error.fatal else "sxid.nonfatal"
