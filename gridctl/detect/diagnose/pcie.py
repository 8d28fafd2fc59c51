"""PCIe errors of the kernel log: which device, how bad, and did it recover.

A message comes over several lines and from two devices: the port that received it and the device that sent
it. The device that sent it counts. A GPU's driver cannot recover, so the word Non-Fatal means nothing there.
"""

from collections.abc import Iterator

from gridagent.signals.pcie import PcieLine
from gridctl.detect.diagnose.clocks import When
from gridctl.detect.diagnose.ruling import clean
from gridctl.detect.diagnose.saying import rule
from gridctl.detect.policy.hardware import hardware
from gridctl.model.diagnosis import Diagnosis

_DEVICES_MAX = 1024
_KNOWN_MAX = 65_536
_FEW = 3
_GPU_DRIVERS = ("nvidia", "nouveau", "amdgpu")


class _Device:
    def __init__(self, pci: str) -> None:
        self.pci = pci
        self.driver = ""
        self.port = ""  #: that reported its errors
        self.lines = 0
        self.reports = {"corrected": 0, "nonfatal": 0, "fatal": 0}
        self.errors = {"corrected": 0, "nonfatal": 0, "fatal": 0}
        self.names: dict[str, int] = {}
        self.outcome = ""
        self.worst_at: When | None = None  #: of the last uncorrected error
        self.bursts = 0
        self.last: When | None = None
        self.explained = False  #: by a GPU that left the bus
        self.evidence: list[str] = []

    @property
    def uncorrected(self) -> bool:
        return self.worst_at is not None

    @property
    def gpu(self) -> bool:
        return self.driver in _GPU_DRIVERS

    @property
    def corrected(self) -> int:
        return max(self.reports["corrected"], self.errors["corrected"])


class Pcie:
    """All PCIe errors of all nodes."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._devices: dict[str, dict[str, _Device]] = {}  #: node -> address -> device
        self._known = 0  #: devices of all nodes
        self._sources: dict[tuple[str, str], str] = {}  #: port -> the device whose message it reported last
        self.gpus: set[str] = set()  #: addresses that are known to be GPUs

    def take(self, host: str, when: When, line: PcieLine, message: str, after_loss: bool) -> None:
        """One line. `after_loss`: a GPU has just left the bus, what follows is its echo."""
        device = self._device(host, self._meant(host, line))
        device.lines += 1
        if line.pci == device.pci and line.driver != "pcieport":
            device.driver = line.driver
        elif not device.driver:
            device.driver = line.driver if line.pci == device.pci else ""
        if line.says == "report" and line.source != line.pci:
            device.port = line.pci
        if line.severity:
            self._count(device, when, line)
        device.explained = device.explained or after_loss
        if line.error and (line.error in device.names or len(device.names) < 16):
            device.names[line.error] = device.names.get(line.error, 0) + 1
        if line.says in ("unrecoverable", "failed", "recovered") and device.outcome != "unrecoverable":
            device.outcome = line.says
        if len(device.evidence) < _FEW and (line.severity or line.error or line.says == device.outcome):
            device.evidence.append(clean(message))

    def failed_before(self, host: str, pci: str, when: When) -> list[str]:
        """What tells that the link of this GPU failed just before `when`. From now on that explains it."""
        told: list[str] = []
        devices = self._devices.get(host, {}).values()
        for device in devices:
            own = device.pci[:-2] == pci[:-2]
            if device.worst_at is None:
                device.explained = device.explained or own  # "can't recover", without an error of its own
            elif (own or device.driver == "pcieport") and when.within(self._window_s, device.worst_at):
                device.explained = True
                told.extend(device.evidence)
        return told

    def reboot(self, host: str) -> None:
        """What was before the boot is history."""
        self._known -= len(self._devices.pop(host, {}))

    def findings(self) -> Iterator[Diagnosis]:
        """One finding a node and rule, the devices among its events."""
        found: dict[tuple[str, str], list[_Device]] = {}
        for host, known in self._devices.items():
            for device in known.values():
                for name in self._rules(device):
                    found.setdefault((host, name), []).append(device)
        for (host, name), devices in found.items():
            worst = max(devices, key=lambda device: device.lines)
            head = worst if name.startswith("pcie.corrected") else devices[0]
            events = [_event(host, device) for device in devices]
            yield rule(
                name,
                head.evidence,
                pci=head.pci,
                count=sum(max(1, device.bursts) for device in devices),
                lines=sum(device.lines for device in devices),
                events=events,
            )

    def _rules(self, device: _Device) -> Iterator[str]:
        if device.corrected and not (device.explained and device.uncorrected):
            many = device.corrected >= hardware().limit("pcie", "corrected_many")
            yield "pcie.corrected_many" if many else "pcie.corrected"
        gpu = device.gpu or device.pci[:-2] in self.gpus
        if device.explained or not (device.uncorrected or (gpu and device.outcome == "unrecoverable")):
            return
        if device.outcome == "recovered":
            yield "pcie.recovered"
        elif gpu:
            yield "pcie.uncorrected_gpu"
        else:
            yield "pcie.uncorrected_failed" if device.outcome else "pcie.uncorrected"

    def _count(self, device: _Device, when: When, line: PcieLine) -> None:
        counters = device.reports if line.says == "report" else device.errors
        counters[line.severity] += 1
        if device.last is None or not when.within(self._window_s, device.last):
            device.bursts += 1
        device.last = when if device.last is None else device.last.joined(when)
        if line.severity != "corrected":
            if device.worst_at is not None and not when.within(self._window_s, device.worst_at):
                device.explained = False  # another one than the one that was explained
            device.worst_at = when

    def _meant(self, host: str, line: PcieLine) -> str:
        """The device that is meant: the sender of what a port reports, also for the port's outcome."""
        if line.says == "report":
            if len(self._sources) < _DEVICES_MAX:
                self._sources[(host, line.pci)] = line.source
            return line.source
        if line.says in ("failed", "recovered"):
            return self._sources.get((host, line.pci), line.pci)
        return line.pci

    def _device(self, host: str, pci: str) -> _Device:
        if host not in self._devices and len(self._devices) >= _DEVICES_MAX:
            return _Device(pci)
        devices = self._devices.setdefault(host, {})
        if pci not in devices:
            if len(devices) >= _DEVICES_MAX or self._known >= _KNOWN_MAX:
                return _Device(pci)
            self._known += 1
            devices[pci] = _Device(pci)
        return devices[pci]


def _event(host: str, device: _Device) -> dict[str, object]:
    names = sorted(device.names, key=lambda name: -device.names[name])[:4]
    event: dict[str, object] = {"pci": device.pci, "errors": names, "corrected": device.corrected}
    event |= {"port": device.port or None, "outcome": device.outcome or None}
    return event | ({"node": host} if host else {})
