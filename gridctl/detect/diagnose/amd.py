"""What the AMD kernel driver says of GPUs: the worst of it decides, a reset that succeeds heals nothing."""

from collections.abc import Iterator

from gridagent.signals.amd import AmdEvent
from gridctl.detect.diagnose.ruling import clean
from gridctl.detect.diagnose.saying import rule
from gridctl.detect.meaning import AMD_RULES
from gridctl.model.diagnosis import Diagnosis

_DEVICES_MAX = 1024
_KNOWN_MAX = 65_536
_FEW = 4


class _Device:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.lines = 0
        self.evidence: list[str] = []


class Amd:
    """All AMD GPUs of all nodes."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[str, _Device]] = {}  #: node -> address -> GPU
        self._known = 0  #: GPUs of all nodes
        self._last: dict[str, str] = {}  #: node -> the GPU that was named last

    def take(self, host: str, event: AmdEvent, message: str) -> None:
        """One line. Lines that name no GPU go with the one that was named last."""
        pci = event.pci or self._last.get(host, "")
        if event.pci and len(self._last) < _DEVICES_MAX:
            self._last[host] = event.pci
        if host not in self._devices and len(self._devices) >= _DEVICES_MAX:
            return
        devices = self._devices.setdefault(host, {})
        if pci not in devices and (len(devices) >= _DEVICES_MAX or self._known >= _KNOWN_MAX):
            return
        if event.pci and "" in devices:  # a hung ring is told before the GPU that it is of
            self._known -= pci in devices
            devices[pci] = devices.pop("")
        if pci not in devices:
            self._known += 1
            devices[pci] = _Device()
        device = devices[pci]
        device.counts[event.says] = device.counts.get(event.says, 0) + event.count
        device.lines += 1
        if len(device.evidence) < _FEW:
            device.evidence.append(clean(message))

    def reboot(self, host: str) -> None:
        """What was before the boot is history."""
        self._known -= len(self._devices.pop(host, {}))

    def findings(self) -> Iterator[Diagnosis]:
        """One finding a node and rule, the GPUs among its events."""
        found: dict[tuple[str, str], list[tuple[str, _Device]]] = {}
        for host, known in self._devices.items():
            for pci, device in known.items():
                name = next((name for says, name in AMD_RULES.items() if device.counts.get(says)), None)
                if name is not None:
                    found.setdefault((host, name), []).append((pci, device))
        for (host, name), devices in found.items():
            events: list[dict[str, object]] = [
                {"pci": pci or None, **({"node": host} if host else {}), **device.counts}
                for pci, device in devices
            ]
            yield rule(
                name,
                devices[0][1].evidence,
                pci=devices[0][0],
                count=len(devices),
                lines=sum(device.lines for _, device in devices),
                events=events,
            )
