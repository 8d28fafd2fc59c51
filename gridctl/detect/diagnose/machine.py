"""The machine around the GPUs, from the kernel log: memory modules, heat, slots, drives, hung queries."""

import re
from collections.abc import Iterator

from gridagent.signals.host import HostEvent
from gridctl.detect.diagnose.clocks import When
from gridctl.detect.diagnose.ruling import clean
from gridctl.detect.diagnose.saying import rule
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis

_UNITS_MAX = 1024
_KNOWN_MAX = 65_536
_FEW = 3
#: Namespaces and partitions are of the drive whose name they begin with.
_PARTITION = re.compile(r"^(nvme\d+)n\d+(?:p\d+)?$")
#: Programs that only ask the driver: they hang where it hangs. The kernel cuts names at 15 characters.
QUERIES = (
    "nvidia-smi",
    "nv-hostengine",
    "nvidia-persiste",
    "nv-fabricmanage",
    "dcgmi",
    "dcgm-exporter",
    "nvsm",
)


class _Unit:
    """What was said of one module, processor, drive or program."""

    def __init__(self) -> None:
        self.count = 0
        self.most = 0
        self.lines = 0
        self.overflow = False
        self.evidence: list[str] = []

    def take(self, event: HostEvent, message: str) -> None:
        self.count += event.count
        self.most = max(self.most, event.count)
        self.lines += 1
        self.overflow |= event.mark == "OVERFLOW"
        if len(self.evidence) < _FEW:
            self.evidence.append(clean(message))


class _Heat:
    """Processors that are too hot: printed for every core, it is one event until all is well or quiet."""

    def __init__(self) -> None:
        self.lines = 0
        self.episodes = 0
        self.total = 0  #: the processor's own count of events
        self.hot: set[tuple[str, str]] = set()  #: core or package, and the processor
        self.last: When | None = None
        self.evidence: list[str] = []

    def take(self, event: HostEvent, when: When, message: str, window_s: float) -> None:
        if event.says == "hot":
            quiet = self.last is not None and not when.within(window_s, self.last)
            if not self.hot or quiet:
                self.episodes += 1
            if len(self.hot) < _UNITS_MAX:
                self.hot.add((event.mark, event.unit))
            self.total = max(self.total, event.count)
        else:
            self.hot.discard((event.mark, event.unit))
        self.lines += 1
        self.last = when if self.last is None else self.last.joined(when)
        if len(self.evidence) < _FEW:
            self.evidence.append(clean(message))


class Machine:
    """All nodes' machines."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._units: dict[str, dict[tuple[str, str], _Unit]] = {}  #: node -> what and of which unit
        self._known = 0  #: units of all nodes
        self._heat: dict[str, _Heat] = {}

    def take(self, host: str, when: When, event: HostEvent, message: str) -> None:
        """One line of the kernel."""
        if event.says in ("hot", "cool"):
            if host in self._heat or (event.says == "hot" and len(self._heat) < _UNITS_MAX):
                self._heat.setdefault(host, _Heat()).take(event, when, message, self._window_s)
            return
        says = event.says
        if says == "hung" and event.unit not in QUERIES:
            return  # whatever else hangs may wait for anything
        if says == "oom" and event.mark:
            says = "oom_cgroup"
        unit = _PARTITION.sub(r"\1", event.unit) if says.startswith("drive_") else event.unit
        if host not in self._units and len(self._units) >= _UNITS_MAX:
            return
        units = self._units.setdefault(host, {})
        if (says, unit) not in units:
            if len(units) >= _UNITS_MAX or self._known >= _KNOWN_MAX:
                return
            self._known += 1
            units[says, unit] = _Unit()
        units[says, unit].take(event, message)

    def reboot(self, host: str) -> None:
        """What was before the boot is history; worn memory and drives stay worn."""
        units = self._units.get(host, {})
        for key in [key for key in units if key[0] in ("hung", "reset_required")]:
            del units[key]
            self._known -= 1

    def hung(self, host: str) -> list[str]:
        """What tells that queries of this node's driver hang."""
        units = [self.units(host, says) for says in ("hung", "reset_required")]
        return [line for unit in units for found in unit.values() for line in found.evidence[:1]]

    def hosts(self) -> list[str]:
        """The nodes of which anything was said."""
        return list(self._units)

    def units(self, host: str, says: str) -> dict[str, _Unit]:
        """What was said of each unit of a node."""
        return {key[1]: unit for key, unit in self._units.get(host, {}).items() if key[0] == says}

    def findings(self) -> Iterator[Diagnosis]:
        """One finding a node and rule, the units among its events."""
        for host, heat in self._heat.items():
            if heat.episodes:
                told: dict[str, object] = {"total_events": heat.total, "cleared": not heat.hot}
                yield rule(
                    "cpu.hot",
                    heat.evidence,
                    count=heat.episodes,
                    lines=heat.lines,
                    events=[_placed(host, told)],
                )
        found: dict[tuple[str, str], list[tuple[str, _Unit]]] = {}
        for host, units in self._units.items():
            for (says, name), unit in units.items():
                known = says == "drive_error" and ("drive_lost", name) in units
                if (rule_name := _rule(says, unit)) and not known:
                    found.setdefault((host, rule_name), []).append((name, unit))
        for (host, rule_name), named in found.items():
            yield _finding(host, rule_name, named)


def _rule(says: str, unit: _Unit) -> str | None:
    limits = hardware()
    if says == "ce":
        many = unit.overflow or unit.count >= limits.limit("memory", "corrected_many")
        return "edac.corrected_many" if many else "edac.corrected"
    if says == "drive_error":
        return "drive.errors" if unit.lines >= limits.limit("drive", "errors_many") else "drive.error"
    return {
        "ue": "edac.uncorrected",
        "slot_power": "nic.slot_power",
        "oom": "oom.host",
        "oom_cgroup": "oom.cgroup",
        "drive_lost": "drive.lost",
        "hung": "query.hung",
        "reset_required": "driver.reset_required",
        "fabric_out_of_sync": "fabric.out_of_sync",
        "gap": "log.gap",
    }.get(says)


def _finding(host: str, name: str, units: list[tuple[str, _Unit]]) -> Diagnosis:
    what = {"nic.slot_power": "watts"}.get(name, "count")
    events = []
    for unit_name, unit in units:
        told: dict[str, object] = {"unit": unit_name, "lines": unit.lines}
        told[what] = unit.most if what == "watts" else unit.count
        if unit.overflow:
            told["overflow"] = True
        events.append(_placed(host, told))
    pci = units[0][0] if name == "nic.slot_power" else None
    single = name in ("query.hung", "driver.reset_required", "fabric.out_of_sync")
    return rule(
        name,
        [line for _, unit in units for line in unit.evidence],
        pci=pci,
        count=1 if single else len(units),
        lines=sum(unit.lines for _, unit in units),
        events=events,
    )


def _placed(host: str, event: dict[str, object]) -> dict[str, object]:
    return event | ({"node": host} if host else {})
