"""Reads one GPU through AMD SMI. Only the child process does this: every call here may hang for ever.

A value that is not supported, not permitted or not known is None: some calls raise then, others give "N/A",
all ones, or (lanes, limits) 0. What else goes wrong is None as well, and named in `errors`.

AMD SMI has no word for a GPU that has left the bus. So the bus itself is asked first, as the kernel's driver
does before it says "device lost from bus" (amdgpu_device.c): a device that does not answer reads as all ones.
A GPU that sleeps is left alone: to ask it would wake it, or count all ones as errors.
Names and units after ROCm's reference of amdsmi (rocm.docs.amd.com/projects/amdsmi), releases 6.3 and 7.0.
"""

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gridagent.telemetry.gpu_child import Answer, Identity, Value

_Call = Callable[["GpuReader"], tuple[object, ...]]

#: How the library says "none" in its three widths; 16 bits only where no real value is as high.
_NONE = ((1 << 32) - 1, (1 << 64) - 1)
_NONE_16 = (1 << 16) - 1
#: "This GPU, driver or user has no such value": argument, support, implementation, permission, not found,
#: no data, no file (amdsmi_status_t).
_NO_SUCH_VALUE = (1, 2, 3, 10, 31, 40, 52)
#: A limit is in W in some releases and in uW in others; none lies between.
_LIMIT_W_MAX = 100_000
#: Transfers a second of a lane, by PCIe generation from 1 on (PCI Express Base Specification).
_MTPS = (2500, 5000, 8000, 16000, 32000, 64000)


def _temperature(sensor: str) -> _Call:
    def read(gpu: "GpuReader") -> tuple[object, ...]:
        return (gpu.temperature(sensor, "CURRENT"),)

    return read


def _margin(gpu: "GpuReader") -> tuple[object, ...]:
    """To the critical limit, at which it slows down (Documentation/gpu/amdgpu/thermal.rst)."""
    now_c, critical_c = gpu.temperature("HOTSPOT", "CURRENT"), gpu.temperature("HOTSPOT", "CRITICAL")
    return (critical_c - now_c if now_c is not None and critical_c else None,)


def _power(gpu: "GpuReader") -> tuple[object, ...]:
    """Which of them a GPU has depends on its series."""
    info = gpu.smi.amdsmi_get_power_info(gpu.handle)
    known = (
        _number(info[name], *_NONE, _NONE_16) for name in ("current_socket_power", "average_socket_power")
    )
    return (next((value for value in known if value is not None), None),)


def _power_limit(gpu: "GpuReader") -> tuple[object, ...]:
    limit = _number(gpu.smi.amdsmi_get_power_cap_info(gpu.handle)["power_cap"], *_NONE)
    return ((limit / 1e6 if limit > _LIMIT_W_MAX else limit) if limit else None,)


def _clock(kind: str) -> _Call:
    def read(gpu: "GpuReader") -> tuple[object, ...]:
        return (gpu.smi.amdsmi_get_clock_info(gpu.handle, gpu.smi.AmdSmiClkType[kind])["clk"],)

    return read


def _memory(gpu: "GpuReader") -> tuple[object, ...]:
    info = gpu.smi.amdsmi_get_gpu_vram_usage(gpu.handle)
    return info["vram_used"], info["vram_total"] or None


def _link(gpu: "GpuReader") -> tuple[object, ...]:
    """Where the GPU's own table of metrics counts no replays, the driver may."""
    info = gpu.smi.amdsmi_get_pcie_info(gpu.handle)
    now, most = info["pcie_metric"], info["pcie_static"]
    speeds = now["pcie_speed"], most["max_pcie_speed"]
    generations = (_MTPS.index(speed) + 1 if speed in _MTPS else None for speed in speeds)
    replays = now["pcie_replay_count"]
    if _number(replays, *_NONE) is None:
        (replays,) = gpu.ask(("pcie_replay_total",), _driver_replays)
    return *generations, now["pcie_width"] or None, most["max_pcie_width"] or None, replays


def _driver_replays(gpu: "GpuReader") -> tuple[object, ...]:
    return (gpu.smi.amdsmi_get_gpu_pci_replay_counter(gpu.handle),)


#: What is read each interval: metrics of the recording format -> how.
FAST: dict[tuple[str, ...], _Call] = {
    ("temp_c",): _temperature("HOTSPOT"),
    ("temp_margin_c",): _margin,
    ("mem_temp_c",): _temperature("VRAM"),
    ("power_w",): _power,
    ("power_limit_w",): _power_limit,
    ("sm_clock_mhz",): _clock("GFX"),
    ("mem_clock_mhz",): _clock("MEM"),
    ("util_pct",): lambda gpu: (gpu.smi.amdsmi_get_gpu_activity(gpu.handle)["gfx_activity"],),
    ("mem_used_mib", "mem_total_mib"): _memory,
}
#: Counted by firmware, or found by a look at every process of the node.
SLOW: dict[tuple[str, ...], _Call] = {
    ("ecc_sbe_total", "ecc_dbe_total"): lambda gpu: gpu.counted_errors(),
    ("retired_pages",): lambda gpu: (len(gpu.smi.amdsmi_get_gpu_bad_page_info(gpu.handle)),),
    ("pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max", "pcie_replay_total"): _link,
    ("processes",): lambda gpu: (len(gpu.smi.amdsmi_get_gpu_process_list(gpu.handle)),),
}


class GpuReader:
    """One GPU of this process.

    `smi`: the module amdsmi; `root`: where /sys is looked for; `lost_s`: so long without an answer on the
    bus means that it is lost. A GPU that is reset does not answer for some seconds either.
    """

    def __init__(self, smi: Any, index: int, handle: Any, root: Path, lost_s: float) -> None:
        self.smi: Any = smi
        self.handle: Any = handle
        self._index, self._devices, self._lost_s = index, root / "sys/bus/pci/devices", lost_s
        self._identity = Identity()
        self._errors: dict[str, str] = {}
        self._counting: set[int] = set()  #: the parts of the GPU that have counted errors before
        self._mute_since_s: float | None = None

    def read(self, *, slow: bool) -> Answer:
        """Asks for everything; `slow`: also for what firmware keeps."""
        calls = {**FAST, **SLOW} if slow else FAST
        values: dict[str, Value] = {name: None for group in calls for name in group}
        self._errors = {}
        self._identify("pci", lambda: self.smi.amdsmi_get_gpu_device_bdf(self.handle).lower())
        if self._sleeps():
            return Answer(self._index, self._identity, values)
        answers = self._answers()
        if answers is False:  # nothing that the library says of it can be true, and it may take long
            now_s = time.monotonic()
            self._mute_since_s = now_s if self._mute_since_s is None else self._mute_since_s
            lost = True if now_s - self._mute_since_s >= self._lost_s else None
            return Answer(self._index, self._identity, values, lost=lost)
        self._mute_since_s = None
        if slow:
            self._identify("uuid", lambda: self.smi.amdsmi_get_gpu_device_uuid(self.handle))
            self._identify(
                "serial", lambda: self.smi.amdsmi_get_gpu_board_info(self.handle)["product_serial"]
            )
            self._identify("model", lambda: self.smi.amdsmi_get_gpu_asic_info(self.handle)["market_name"])
        for group, call in calls.items():
            none = (*_NONE, _NONE_16) if group in FAST else _NONE
            values.update(zip(group, (_number(value, *none) for value in self.ask(group, call)), strict=True))
        return Answer(
            self._index, self._identity, values, self._errors, lost=None if answers is None else False
        )

    def temperature(self, sensor: str, metric: str) -> int | None:
        """Degrees Celsius."""
        kind, which = self.smi.AmdSmiTemperatureType[sensor], self.smi.AmdSmiTemperatureMetric[metric]
        value = self.smi.amdsmi_get_temp_metric(self.handle, kind, which)
        return None if value in (*_NONE, _NONE_16) else value

    def counted_errors(self) -> tuple[object, ...]:
        """Corrected and uncorrectable errors over all parts of the GPU; None while one that counts is silent.

        The library's own sum is 0 where nothing counts; where a part is silent once it falls, to rise again.
        """
        enabled = self.smi.amdsmi_get_gpu_ecc_enabled(self.handle)
        counts = {}
        for block in self.smi.AmdSmiGpuBlock:
            if not block & enabled:
                continue
            try:
                counts[int(block)] = self.smi.amdsmi_get_gpu_ecc_count(self.handle, block)
            except self.smi.AmdSmiLibraryException as error:
                if error.get_error_code() not in _NO_SUCH_VALUE:
                    raise
        silent = self._counting - counts.keys()
        self._counting |= counts.keys()
        if silent or not counts:
            return None, None
        kinds = ("correctable_count", "uncorrectable_count")
        return tuple(sum(count[kind] for count in counts.values()) for kind in kinds)

    def _sleeps(self) -> bool:
        """Has the kernel suspended it (Documentation/ABI/testing/sysfs-devices-power)?"""
        try:
            status = (self._devices / self._identity.pci / "power/runtime_status").read_bytes()
        except OSError:
            return False
        return status.strip() == b"suspended"

    def _answers(self) -> bool | None:
        """Does the GPU answer on the bus? None where that cannot be known. First stands who made it."""
        pci = self._identity.pci
        if not pci or not self._devices.is_dir():
            return None
        try:
            with (self._devices / pci / "config").open("rb", buffering=0) as config:
                return config.read(4) != b"\xff\xff\xff\xff"
        except FileNotFoundError:
            return False
        except OSError:
            return None

    def ask(self, group: tuple[str, ...], call: _Call) -> tuple[object, ...]:
        """The values of one call."""
        try:
            return call(self)
        except self.smi.AmdSmiLibraryException as error:
            if error.get_error_code() not in _NO_SUCH_VALUE:
                self._errors[group[0]] = error.get_error_info()
        except (AttributeError, KeyError, TypeError, ctypes.ArgumentError):
            pass  # another release of amdsmi lacks that call, or calls it otherwise
        return (None,) * len(group)

    def _identify(self, name: str, ask: Callable[[], str]) -> None:
        if getattr(self._identity, name):
            return
        try:
            text = ask()
        except (self.smi.AmdSmiLibraryException, KeyError, ValueError):  # ValueError: no text, no number
            return
        if text != "N/A":
            setattr(self._identity, name, text)


def _number(value: object, *none: int) -> Value:
    return value if isinstance(value, int | float) and value not in none else None
