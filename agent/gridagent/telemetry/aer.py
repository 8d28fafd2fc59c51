"""Source `aer`: PCIe errors as the kernel counts them for each device (Advanced Error Reporting).

The kernel's ABI document `sysfs-bus-pci-devices-aer` says where: an error is counted where it was reported,
which may be the root port and not the device that caused it.
"""

import re
import time
from collections.abc import Callable

from gridagent.telemetry import Reading
from gridagent.telemetry.counters import Total
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import Tree, sample

_DEVICES = "sys/bus/pci/devices"
_COUNT = re.compile(r"[0-9]{1,20}")
FILES = {
    "aer_cor_total": "aer_dev_correctable",
    "aer_nonfatal_total": "aer_dev_nonfatal",
    "aer_fatal_total": "aer_dev_fatal",
}


class Aer(Probe):
    """Device `node`: the sums. Devices `pci:ADDRESS`: those that have counted an error."""

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(tree, clock)
        self._sums = {metric: Total() for metric in FILES}

    def read(self) -> list[Reading]:
        found = []
        counts: dict[str, dict[str, float | None]] = {}
        for address in self.tree.names(_DEVICES):
            values = {
                metric: _count(self.tree.text(f"{_DEVICES}/{address}/{name}"))
                for metric, name in FILES.items()
            }
            if any(value is not None for value in values.values()):
                counts[address] = values
            if any(values.values()):
                found.append(sample(f"pci:{address}", values))
        if counts:
            sums = {
                metric: self._sums[metric].add({a: values[metric] for a, values in counts.items()})
                for metric in FILES
            }
            found.append(sample("node", sums))
        return found


def _count(text: str | None) -> float | None:
    """The file's total: its line TOTAL_..., else the sum of its lines."""
    total: float | None = None
    for line in (text or "").splitlines():
        name, _, number = line.rpartition(" ")
        if not _COUNT.fullmatch(number):
            continue
        if name.startswith("TOTAL_"):
            return int(number)
        total = (total or 0) + int(number)
    return total
