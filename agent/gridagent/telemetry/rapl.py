"""Source `rapl`: power of CPU packages and their memory, from energy counters in /sys/class/powercap.

The counters go round within minutes to an hour, so power is known only between two readings that are near
enough (`counters.watts`).
"""

import re
import time
from collections.abc import Callable

from gridagent.telemetry import Reading
from gridagent.telemetry.counters import watts
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import Tree, sample

_CLASS = "sys/class/powercap"
#: The prefix of the zones that are read through registers; `intel-rapl-mmio` shows the same again. AMD's too.
_ZONE = re.compile(r"intel-rapl:\d+(:\d+)?")
_PACKAGE = re.compile(r"package-(\d+)(?:-die-(\d+))?")


class Rapl(Probe):
    """Devices `cpu:PACKAGE` (`power_w`, `dram_power_w`), and `node` (`platform_power_w`, on some boards)."""

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(tree, clock)
        self._last: dict[str, tuple[float, float]] = {}  #: zone -> when, and the counter in microjoules

    def read(self) -> list[Reading]:
        devices: dict[str, dict[str, float | None]] = {}
        packages: dict[str, str] = {}  #: zone -> device
        for zone in self.tree.names(_CLASS, "intel-rapl:"):  # a package comes before its parts
            if not _ZONE.fullmatch(zone):
                continue
            name = self.tree.text(f"{_CLASS}/{zone}/name") or ""
            if match := _PACKAGE.fullmatch(name):
                packages[zone] = f"cpu:{match[1]}" + (f"/{match[2]}" if match[2] else "")
                devices.setdefault(packages[zone], {})["power_w"] = self._watts(zone)
            elif name == "dram" and (device := packages.get(zone.rpartition(":")[0])):
                devices[device]["dram_power_w"] = self._watts(zone)
            elif name == "psys":
                devices.setdefault("node", {})["platform_power_w"] = self._watts(zone)
        return [sample(device, values) for device, values in devices.items()]

    def _watts(self, zone: str) -> float | None:
        range_uj = self.tree.number(f"{_CLASS}/{zone}/max_energy_range_uj")
        energy_uj, now_s = self.tree.number(f"{_CLASS}/{zone}/energy_uj"), self.clock()
        before = self._last.pop(zone, None)
        if energy_uj is None:
            return None
        self._last[zone] = (now_s, energy_uj)
        return None if before is None else watts(before[1], energy_uj, range_uj, now_s - before[0])
