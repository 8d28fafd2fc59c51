"""Source `hwmon`: temperatures, fans and power supplies, from /sys/class/hwmon.

Chips that another source reads better are left out. Many chips are a firmware's, so they are read slowly.
"""

import re
import time
from collections.abc import Callable

from gridagent.telemetry import Reading
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import Tree, sample

_CLASS = "sys/class/hwmon"
_ELSEWHERE = {"nvme"}
_INLET = re.compile(r"\b(inlet|ambient)\b", re.IGNORECASE)
_TEMPERATURE = re.compile(r"temp\d+_input")
_FAN = re.compile(r"fan\d+_input")
_LABEL = re.compile(r"(in|power)\d+_label")
#: Drivers of power supplies; others are known by a mains voltage at their input.
_PSU_DRIVER = re.compile(r"psu|crps|cffps|pfe[13]\d{3}|dps\d{3}|ipsps|fsp3y|fsp-3y", re.IGNORECASE)
MAINS_V_MIN = 80.0
#: What no sensor of a machine room measures is a driver's way to say "no value".
CELSIUS_MIN, CELSIUS_MAX = -50.0, 200.0
_ALARMS = ("lcrit_alarm", "crit_alarm", "min_alarm", "alarm")


class Hwmon(Probe):
    """Devices `hwmon:CHIP@PARENT` (the hottest sensor), `psu:N`, and `node` (air inlet, chassis power)."""

    INTERVAL_S = 10.0

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(tree, clock)
        self._supplies: dict[str, int] = {}  #: place of a power supply -> its number, for good

    def read(self) -> list[Reading]:
        found: list[Reading] = []
        node: dict[str, float | None] = {}
        supplies: dict[str, dict[str, float | None]] = {}
        for number in self.tree.names(_CLASS, "hwmon"):
            folder = f"{_CLASS}/{number}"
            chip = self.tree.text(f"{folder}/name")
            if chip is None and self.tree.has(f"{folder}/device/name"):  # as older drivers have it
                folder, chip = f"{folder}/device", self.tree.text(f"{folder}/device/name")
            if not chip or chip in _ELSEWHERE:
                continue
            files = self.tree.names(folder)
            parent = self.tree.target(f"{_CLASS}/{number}/device") or number
            found += self._heat(f"hwmon:{chip[:40]}@{parent}", folder, files, node)
            if (supply := self._supply(parent, chip, folder, files)) is not None:
                supplies[parent] = supply
            if chip == "power_meter":  # ACPI's name for what the whole machine takes
                node["in_w"] = self.tree.number(f"{folder}/power1_average", 1e-6)
        for place, values in sorted(supplies.items()):
            index = self._supplies.setdefault(place, len(self._supplies))
            found.append(sample(f"psu:{index}", values, place=place))
        if node:
            found.append(sample("node", node))
        return found

    def _heat(
        self, device: str, folder: str, files: list[str], node: dict[str, float | None]
    ) -> list[Reading]:
        hottest: tuple[float, str] | None = None
        margins: list[float] = []
        sensors = [name.removesuffix("_input") for name in files if _TEMPERATURE.fullmatch(name)]
        for sensor in sensors:
            label = self.tree.text(f"{folder}/{sensor}_label") if f"{sensor}_label" in files else None
            temp_c = self._celsius(f"{folder}/{sensor}_input")
            if f"{sensor}_fault" in files and self.tree.number(f"{folder}/{sensor}_fault"):
                temp_c = None
            if label and _INLET.search(label):
                node["inlet_c"] = max(_known(temp_c, node.get("inlet_c")), default=None)
            if temp_c is None:
                continue
            hottest = max(hottest or (temp_c, ""), (temp_c, (label or sensor)[:40]))
            if f"{sensor}_crit" in files and (limit_c := self._celsius(f"{folder}/{sensor}_crit")):
                margins.append(limit_c - temp_c)
        values: dict[str, float | None] = {}
        if sensors:
            values = {"temp_c": hottest[0] if hottest else None, "margin_c": min(margins, default=None)}
        speeds = [self.tree.number(f"{folder}/{name}") for name in files if _FAN.fullmatch(name)]
        if speeds:
            values["fan_min_rpm"] = min(_known(*speeds), default=None)
        if power := next((name for name in ("power1_input", "power1_average") if name in files), None):
            values["power_w"] = self.tree.number(f"{folder}/{power}", 1e-6)  # further ones may be parts of it
        return [sample(device, values, sensor=hottest[1] if hottest else "")] if values else []

    def _celsius(self, name: str) -> float | None:
        value = self.tree.number(name)
        return value / 1000 if value is not None and CELSIUS_MIN <= value / 1000 <= CELSIUS_MAX else None

    def _supply(self, place: str, chip: str, folder: str, files: list[str]) -> dict[str, float | None] | None:
        """Values of a power supply's input, None if the chip is none: regulators have inputs too."""
        labels = {
            (self.tree.text(f"{folder}/{name}") or "").lower(): name.removesuffix("_label")
            for name in files
            if _LABEL.fullmatch(name)
        }
        power, voltage = labels.get("pin") or labels.get("pin1"), labels.get("vin") or labels.get("vin1")
        in_v = self.tree.number(f"{folder}/{voltage}_input", 1e-3) if voltage else None
        known = place in self._supplies or _PSU_DRIVER.search(chip)
        if not known and (in_v is None or in_v < MAINS_V_MIN):
            return None
        in_w = self.tree.number(f"{folder}/{power}_input", 1e-6) if power else None
        alarms = [
            self.tree.number(f"{folder}/{voltage}_{alarm}")
            for alarm in _ALARMS
            if voltage and f"{voltage}_{alarm}" in files
        ]
        ok: float | None = None
        if any(alarms) or (in_v is not None and in_v < MAINS_V_MIN):
            ok = 0
        elif in_v is not None:
            ok = 1
        return {"in_w": in_w, "in_v": in_v, "ok": ok}


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]
