"""Reads one GPU through NVML. Only the child process does this: every call here may hang for ever.

A value that is not supported, not permitted or not known is None. What the driver ought to know and does not
tell ("Unknown Error", "GPU requires reset") is None as well, and named in `errors`. A lost GPU has no values.
"""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from gridagent.signals.nvidia import canonical_pci
from gridagent.telemetry.gpu_child import Answer, Identity, Value

_Call = Callable[[Any, Any], tuple[Value, ...]]

MIB = 1 << 20
#: NVML_NVLINK_MAX_LINKS; how many a GPU has is what the driver answers to.
_LINKS_MAX = 36
_ALL_ONES = ((1 << 32) - 1, (1 << 64) - 1)  # NVML_VALUE_NOT_AVAILABLE in its two widths
#: Names of the members of nvmlValue_t by nvmlValueType_t.
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
#: "This GPU, driver or user has no such value": argument, support, permission, not found, function, no data,
#: version, deprecated, not ready.
_NO_SUCH_VALUE = (2, 3, 4, 6, 13, 21, 25, 26, 27)
_LOST = 15  # NVML_ERROR_GPU_IS_LOST


def _field(nvml: Any, handle: Any, field: int | tuple[int, int]) -> Value:
    value = nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    return getattr(value.value, _MEMBERS[value.valueType]) if value.valueType < len(_MEMBERS) else None


def _watts(milliwatts: int) -> Value:
    return None if milliwatts in _ALL_ONES else milliwatts / 1000


def _power(nvml: Any, handle: Any) -> tuple[Value, ...]:
    return (_watts(nvml.nvmlDeviceGetPowerUsage(handle)),)


def _power_limit(nvml: Any, handle: Any) -> tuple[Value, ...]:
    return (_watts(nvml.nvmlDeviceGetEnforcedPowerLimit(handle)),)


def _throttle(nvml: Any, handle: Any) -> tuple[Value, ...]:
    try:
        return (nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),)
    except nvml.NVMLError_FunctionNotFound:  # its name before driver 535
        return (nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),)


def _memory(nvml: Any, handle: Any) -> tuple[Value, ...]:
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError_FunctionNotFound:  # driver before 510: what is reserved counts as used
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return tuple(None if size in _ALL_ONES else size // MIB for size in (info.used, info.total))


def _sram(nvml: Any, handle: Any) -> tuple[Value, ...]:
    """Uncorrectable errors since boot, and whether the driver's threshold for a repair is reached."""
    try:
        status = nvml.c_nvmlEccSramErrorStatus_v1_t()
        nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))  # it would hand over a copy
    except nvml.NVMLError_FunctionNotFound:  # driver before 535: no threshold
        uncorrected, volatile = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        place = nvml.NVML_MEMORY_LOCATION_SRAM
        return (nvml.nvmlDeviceGetMemoryErrorCounter(handle, uncorrected, volatile, place), None)
    return (status.volatileUncParity + status.volatileUncSecDed, status.bThresholdExceeded)


def _mig(nvml: Any, handle: Any) -> tuple[Value, ...]:
    return tuple(nvml.nvmlDeviceGetMigMode(handle))


def _retired(nvml: Any, handle: Any) -> tuple[Value, ...]:
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return (sum(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes),)


def _ecc(kind: str) -> _Call:
    def read(nvml: Any, handle: Any) -> tuple[Value, ...]:
        return (nvml.nvmlDeviceGetTotalEccErrors(handle, getattr(nvml, kind), nvml.NVML_VOLATILE_ECC),)

    return read


def _plain(function: str, *arguments: int) -> _Call:
    return lambda nvml, handle: (getattr(nvml, function)(handle, *arguments),)


#: What is read each interval: metrics of the recording format -> how. Numbers are NVML's own.
FAST: dict[tuple[str, ...], _Call] = {
    ("temp_c",): _plain("nvmlDeviceGetTemperature", 0),
    ("temp_margin_c",): _plain("nvmlDeviceGetMarginTemperature"),
    ("mem_temp_c",): lambda nvml, handle: (_field(nvml, handle, 82),),
    ("power_w",): _power,
    ("power_limit_w",): _power_limit,
    ("sm_clock_mhz",): _plain("nvmlDeviceGetClockInfo", 1),
    ("mem_clock_mhz",): _plain("nvmlDeviceGetClockInfo", 2),
    ("throttle",): _throttle,
    ("util_pct",): lambda nvml, handle: (nvml.nvmlDeviceGetUtilizationRates(handle).gpu,),
    ("mem_used_mib", "mem_total_mib"): _memory,
    ("ecc_sbe_total",): _ecc("NVML_MEMORY_ERROR_TYPE_CORRECTED"),
    ("ecc_dbe_total",): _ecc("NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
    ("ecc_sram_ue_total", "ecc_sram_threshold"): _sram,
    ("pcie_replay_total",): _plain("nvmlDeviceGetPcieReplayCounter"),
    ("pcie_gen",): _plain("nvmlDeviceGetCurrPcieLinkGeneration"),
    ("pcie_gen_max",): _plain("nvmlDeviceGetMaxPcieLinkGeneration"),
    ("pcie_width",): _plain("nvmlDeviceGetCurrPcieLinkWidth"),
    ("pcie_width_max",): _plain("nvmlDeviceGetMaxPcieLinkWidth"),
    ("recovery_action",): lambda nvml, handle: (_field(nvml, handle, 230),),
    ("processes",): lambda nvml, handle: (len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),),
    ("mig_mode", "mig_mode_pending"): _mig,
}
#: Kept by firmware: asking for them often disturbs it.
SLOW: dict[tuple[str, ...], _Call] = {
    ("remap_corr_total", "remap_uncorr_total", "remap_pending", "remap_failed"): (
        lambda nvml, handle: tuple(nvml.nvmlDeviceGetRemappedRows(handle))
    ),
    ("retired_pages",): _retired,
}
LINKS = ("nvlink_down", "nvlink_crc_total", "nvlink_replay_total", "nvlink_recovery_total")
#: The fields of the counters above, over all links of a GPU (NVLink 1 to 4).
_LINK_FIELDS = {
    "nvlink_crc_total": (38, 45),
    "nvlink_replay_total": (52,),
    "nvlink_recovery_total": (59,),
}
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_RECOVERY_EVENTS = 215  # of one link, NVLink 5


class GpuReader:
    """One GPU of this process. `nvml` is the module pynvml; the GPU is first touched by `read`."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._index = index
        self._errors: dict[str, str] = {}
        self._was_up: set[int] = set()
        self.handle: Any = None  #: NVML's handle, once there is one
        self.identity = Identity()

    def read(self, *, slow: bool) -> Answer:
        """Asks for everything; `slow`: also for what firmware keeps."""
        calls = {**FAST, **SLOW} if slow else FAST
        names = [name for group in calls for name in group] + (list(LINKS) if slow else [])
        values: dict[str, Value] = dict.fromkeys(names)
        self._errors = {}
        try:
            if self.handle is None:
                self.handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
            if slow or not self.identity.pci:
                self._identify()
            for group, call in calls.items():
                values.update(zip(group, self._ask(group, call), strict=True))
            if slow:
                values.update(self._links())
        except self._nvml.NVMLError as error:
            lost = error.value == _LOST
            errors = {} if lost else {"handle": str(error)}
            return Answer(self._index, self.identity, dict.fromkeys(names), errors, lost)
        return Answer(self._index, self.identity, values, self._errors)

    def _ask(self, group: tuple[str, ...], call: _Call) -> tuple[Value, ...]:
        """The values of one call. Raises NVML's error only where the GPU is lost."""
        try:
            return tuple(None if value in _ALL_ONES else value for value in call(self._nvml, self.handle))
        except self._nvml.NVMLError as error:
            if error.value == _LOST:
                raise
            if error.value not in _NO_SUCH_VALUE:
                self._errors[group[0]] = str(error)
        except (AttributeError, TypeError, ctypes.ArgumentError):
            pass  # an older nvidia-ml-py lacks that call, or calls it otherwise
        return (None,) * len(group)

    def _identify(self) -> None:
        nvml, known = self._nvml, self.identity
        asked: dict[str, Callable[[], str]] = {
            "pci": lambda: canonical_pci(_text(nvml.nvmlDeviceGetPciInfo(self.handle).busId)),
            "uuid": lambda: _text(nvml.nvmlDeviceGetUUID(self.handle)),
            "serial": lambda: _text(nvml.nvmlDeviceGetSerial(self.handle)),
            "model": lambda: _text(nvml.nvmlDeviceGetName(self.handle)),
        }
        for name, ask in asked.items():
            if getattr(known, name):
                continue
            try:
                setattr(known, name, ask())
            except UnicodeDecodeError:
                self._errors[name] = "no text"
            except nvml.NVMLError as error:
                if error.value == _LOST:
                    raise

    def _links(self) -> Iterator[tuple[str, Value]]:
        """`nvlink_down` counts links that were up before, or that ought to be: where one link leads to a
        switch all do, but between GPUs without a switch some are not wired, and "down" says nothing."""
        up: dict[int, bool] = {}
        for link in range(_LINKS_MAX):
            (state,) = self._ask(("nvlink_down",), _plain("nvmlDeviceGetNvLinkState", link))
            if state is None:
                break
            up[link] = bool(state)
        active = [link for link, state in up.items() if state]
        switched = any(self._leads_to_switch(link) for link in active[:1])
        self._was_up.update(up if switched else active)
        yield "nvlink_down", len(self._was_up - set(active)) if up and self._was_up else None
        for metric, fields in _LINK_FIELDS.items():
            parts = [self._ask((metric,), _field_call(field))[0] for field in fields]
            known = [part for part in parts if part is not None]
            if metric == "nvlink_recovery_total" and not known:
                each = [self._ask((metric,), _field_call((_RECOVERY_EVENTS, link)))[0] for link in active]
                known = [part for part in each if part is not None]
            yield metric, sum(known) if known else None

    def _leads_to_switch(self, link: int) -> bool:
        (kind,) = self._ask(("nvlink_down",), _plain("nvmlDeviceGetNvLinkRemoteDeviceType", link))
        return kind == _SWITCH


def _field_call(field: int | tuple[int, int]) -> _Call:
    return lambda nvml, handle: (_field(nvml, handle, field),)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
