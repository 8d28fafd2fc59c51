"""Source `nvme`: health of NVMe controllers as far as /sys has it. Wear would need commands to the drive.

A temperature is such a command too (the kernel sends it), hence the pace.
"""

from gridagent.telemetry import Reading
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import sample

_CLASS = "sys/class/nvme"


class Nvme(Probe):
    """Devices `nvme:CONTROLLER`, named by the kernel's name, with model and serial beside the values."""

    INTERVAL_S = 10.0
    INTERVAL_MIN_S = 10.0

    def read(self) -> list[Reading]:
        return [self._controller(name) for name in self.tree.names(_CLASS, "nvme")]

    def _controller(self, name: str) -> Reading:
        folder = f"{_CLASS}/{name}"
        state = self.tree.text(f"{folder}/state")
        values: dict[str, float | None] = {"state": None if not state else float(state == "live")}
        chip = self._chip(folder)
        temp_c, limit_c = (
            self.tree.number(f"{chip}/{file}", 1e-3) if chip else None
            for file in ("temp1_input", "temp1_crit")
        )
        values["temp_c"] = temp_c
        values["margin_c"] = None if temp_c is None or limit_c is None else limit_c - temp_c
        values["temp_alarm"] = self.tree.number(f"{chip}/temp1_alarm") if chip else None
        for metric, file in (("pcie_width", "current_link_width"), ("pcie_width_max", "max_link_width")):
            values[metric] = self.tree.number(f"{folder}/device/{file}")
        about = {key: (self.tree.text(f"{folder}/{key}") or "")[:80] for key in ("model", "serial")}
        return sample(f"nvme:{name}", values, **about)

    def _chip(self, folder: str) -> str | None:
        """The folder of the controller's sensor; kernels before 5.13 hang it below the PCI device."""
        for place in (folder, f"{folder}/hwmon", f"{folder}/device/hwmon"):
            for name in self.tree.names(place, "hwmon"):
                if self.tree.has(f"{place}/{name}/temp1_input"):
                    return f"{place}/{name}"
        return None
