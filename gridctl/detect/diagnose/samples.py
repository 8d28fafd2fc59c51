"""What tools tell of GPUs, as samples: CSV and -q of nvidia-smi, dcgmi dmon, exporters, JSON records.

A value is found by what its column means: `NAMES` lists the spellings, compared without case, punctuation and
unit. Values stay as they were printed: which of them are numbers is for the rules to say.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from gridagent.signals.lines import unwrap
from gridagent.signals.nvidia import canonical_pci
from gridagent.signals.values import number
from gridctl.detect.diagnose.reading import key_of

_SPELLINGS = """
t: t ts t_s time timestamp time_s unix_s t_unix_s epoch
host: host hostname node nodename
index: index gpu gpu_index gpuid gpu_id device_index gpu_idx idx minor_number
pci: pci pci.bus_id gpu_bus_id pci_bus_id busid bus_id bdf pci_address
uuid: uuid gpu_uuid
device: device entity
product: name gpu_name product_name modelName model
recovery_action: gpu_recovery_action recovery_action DCGM_FI_DEV_GPU_RECOVERY_ACTION
pstate: pstate performance_state
util_pct: utilization.gpu util_pct gpu_util util_gpu utilization util gputl DCGM_FI_DEV_GPU_UTIL
util_pct: utilization_pct gpu_util_pct gpu_utilization sm_util
pcie_gen: pcie.link.gen.current pcie.link.gen.gpucurrent pcie_gen pcie_gen_current gen
pcie_gen: DCGM_FI_DEV_PCIE_LINK_GEN
pcie_gen_max: pcie.link.gen.max pcie.link.gen.gpumax pcie_gen_max gen_max DCGM_FI_DEV_PCIE_MAX_LINK_GEN
pcie_width: pcie.link.width.current pcie_width pcie_width_current width DCGM_FI_DEV_PCIE_LINK_WIDTH
pcie_width_max: pcie.link.width.max pcie_width_max width_max DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH
throttle: clocks_event_reasons.active clocks_throttle_reasons.active throttle throttle_reasons
throttle: clock_event_reasons clocks_event_reasons dvcctr
throttle: DCGM_FI_DEV_CLOCK_THROTTLE_REASONS DCGM_FI_DEV_CLOCKS_EVENT_REASONS
throttle_0x80: clocks_event_reasons.hw_power_brake_slowdown clocks_throttle_reasons.hw_power_brake_slowdown
throttle_0x80: hw_power_brake_slowdown hw_power_brake
throttle_0x40: clocks_event_reasons.hw_thermal_slowdown clocks_throttle_reasons.hw_thermal_slowdown
throttle_0x40: hw_thermal_slowdown
throttle_0x20: clocks_event_reasons.sw_thermal_slowdown clocks_throttle_reasons.sw_thermal_slowdown
throttle_0x20: sw_thermal_slowdown
ecc_sbe_total: ecc.errors.corrected.volatile.total ecc.errors.corrected.volatile.dram esvtl
ecc_sbe_total: sbe_volatile_total sbe_total ecc_sbe_total ecc_sbe sbe_volatile volatile_sbe_total
ecc_sbe_total: corrected_total ecc_corrected ecc_corrected_total ecc_corrected_volatile_total hbm_sbe_total
ecc_sbe_total: ecc.errors.corrected.aggregate.total DCGM_FI_DEV_ECC_SBE_VOL_TOTAL
ecc_dbe_total: ecc.errors.uncorrected.volatile.total ecc.errors.uncorrected.volatile.dram edvtl
ecc_dbe_total: dbe_volatile_total dbe_total ecc_dbe_total ecc_dbe volatile_dbe_total
ecc_dbe_total: DCGM_FI_DEV_ECC_DBE_VOL_TOTAL
ecc_sram_ue_total: ecc_sram_ue_total ecc.errors.uncorrected.volatile.sram sram_uncorrectable
sram_threshold: ecc.errors.uncorrected.aggregate.sram.thresholdExceeded sram_threshold_exceeded
remap_pending: remapped_rows.pending row_remap_pending remap_pending DCGM_FI_DEV_ROW_REMAP_PENDING
remap_failed: remapped_rows.failure row_remap_failure remap_failed remap_failure
remap_failed: DCGM_FI_DEV_ROW_REMAP_FAILURE
retired_sbe: retired_pages.single_bit_ecc.count retired_pages.sbe retired_sbe DCGM_FI_DEV_RETIRED_SBE
retired_dbe: retired_pages.double_bit.count retired_pages.dbe retired_dbe DCGM_FI_DEV_RETIRED_DBE
retired_pages: retired_pages
retired_pending: retired_pages.pending retired_pending DCGM_FI_DEV_RETIRED_PENDING
fabric_state: fabric.state fabric_state
fabric_status: fabric.status fabric_status
fabric_cluster: fabric.clusterUuid cluster_uuid clusteruuid
xid: xid xid_errors last_xid xider DCGM_FI_DEV_XID_ERRORS
health_query_ms: health_query_ms query_ms probe_ms
temp_c: temperature.gpu temp_c gputemp DCGM_FI_DEV_GPU_TEMP
power_w: power.draw power_w power.draw.instant DCGM_FI_DEV_POWER_USAGE
"""
NAMES = {
    key_of(name): line.partition(": ")[0]
    for line in _SPELLINGS.strip().splitlines()
    for name in line.partition(": ")[2].split()
}
#: Of a tree of sections, as nvidia-smi -q prints it: the last two names decide.
_SECTIONS = {
    "fabric/state": "fabric_state",
    "fabric/status": "fabric_status",
    "fabric/clusteruuid": "fabric_cluster",
    "health/bandwidth": "fabric_bandwidth",
    "health/routeunhealthy": "fabric_route_unhealthy",
    "health/incorrectconfiguration": "fabric_incorrect_configuration",
    "remappedrows/pending": "remap_pending",
    "remappedrows/remappingfailureoccurred": "remap_failed",
    "retiredpages/singlebitecc": "retired_sbe",
    "retiredpages/doublebitecc": "retired_dbe",
    "retiredpages/pendingpageblacklist": "retired_pending",
    "pciegeneration/max": "pcie_gen_max",
    "pciegeneration/current": "pcie_gen",
    "linkwidth/max": "pcie_width_max",
    "linkwidth/current": "pcie_width",
    "utilization/gpu": "util_pct",
    "volatile/dramcorrectable": "ecc_sbe_total",
    "volatile/dramuncorrectable": "ecc_dbe_total",
    "volatile/sramuncorrectable": "ecc_sram_ue_total",
    "aggregate/sramthresholdexceeded": "sram_threshold",
    "hwslowdown/hwthermalslowdown": "throttle_0x40",
    "hwslowdown/hwpowerbrakeslowdown": "throttle_0x80",
}
_LEAVES = {
    "gpurecoveryaction": "recovery_action",
    "performancestate": "pstate",
    "gpuuuid": "uuid",
    "productname": "product",
    "hwthermalslowdown": "throttle_0x40",
    "hwpowerbrakeslowdown": "throttle_0x80",
    "swthermalslowdown": "throttle_0x20",
}
IDENTITIES = frozenset(("t", "host", "index", "pci", "uuid", "device", "product"))
_UNIT = re.compile(r"\s*\[[^\]]{0,20}\]\s*$")
_DEVICE = re.compile(r"(?:gpu|GPU)[: ]?(\d{1,4})$")
_SLASHES = re.compile(r"(\d{4})/(\d\d)/(\d\d) (?=\d\d:)")
_Q_BEGIN = re.compile(r"GPU (?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$")
_Q_LINE = re.compile(r"(?P<indent> {2,40}|\t{1,8})(?P<name>[^:]{1,80}?)\s*(?: : (?P<value>.*)|:?\s*)$")
_PROM = re.compile(
    r"(?P<name>[A-Za-z_:][A-Za-z0-9_:]{0,100})\{(?P<labels>[^{}]{0,2000})\} "
    r"(?P<value>\S{1,40})(?: (?P<ms>\d{1,16}))?\s*$"
)
_LABEL = re.compile(r'(\w{1,60})="([^"]{0,300})"')
_QUERY = re.compile(r"--query-gpu[= ](?P<fields>[\w.,]{1,2000})")
_CELLS_MAX = 128


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Some values of one GPU at one time."""

    t_s: float | None = None
    host: str = ""
    index: int | None = None
    pci: str = ""
    uuid: str = ""
    values: dict[str, object] = {}


def metric_of(name: str) -> str | None:
    """The metric that a column's name means, whatever its unit."""
    name = name[:200]
    return NAMES.get(key_of(_UNIT.sub("", name) if "[" in name else name))


def sample_of(named: Iterable[tuple[str, object]]) -> Sample | None:
    """The sample of values with names that are metrics; None if no GPU or no value is named."""
    values: dict[str, object] = {}
    for metric, value in named:
        values.setdefault(metric, value)
    index = _index(values)
    pci = canonical_pci(str(values.get("pci") or ""))
    uuid = str(values.get("uuid") or "")[:60]
    told = {metric: value for metric, value in values.items() if metric not in IDENTITIES}
    if "product" in values:
        told["product"] = str(values["product"])[:80]
    if not told or (index is None and not pci and not uuid):
        return None
    host = values.get("host")
    return Sample(
        t_s=_time_s(values.get("t")),
        host=host[:255] if isinstance(host, str) else "",
        index=index,
        pci=pci,
        uuid=uuid,
        values=told,
    )


def record_sample(record: Mapping[str, object]) -> Sample | None:
    """The sample of a JSON record; the values may stand in an object of their own, named v or values."""
    named = [(metric, value) for name, value in record.items() if (metric := metric_of(str(name)))]
    for name in ("v", "values", "metrics"):
        if isinstance(inner := record.get(name), dict):
            named += [(metric, value) for key, value in inner.items() if (metric := metric_of(str(key)))]
    return sample_of((metric, value) for metric, value in named if not isinstance(value, dict | list))


class Table:
    """Values parted by commas, semicolons or tabs, under a heading or the fields of the command before."""

    def __init__(self) -> None:
        self._metrics: list[str | None] = []
        self._parted_by = ","

    def begin(self, command: str) -> None:
        """A command was given: its query names the columns, if it asks for no heading."""
        self._metrics = []
        query = _QUERY.search(command[:4000])
        if query is not None and "noheader" in command:
            self._metrics = [metric_of(field) for field in query["fields"].split(",")]

    def feed(self, line: str) -> Sample | None:
        """The sample of a row; None for a heading, and for what is no row of this table."""
        cells = _cells(line, self._parted_by)
        if len(cells) != len(self._metrics) or metric_of(cells[0]):
            parted_by = max(",;\t", key=line.count)
            if metrics := _heading(_cells(line, parted_by)):
                self._metrics, self._parted_by = metrics, parted_by
            return None
        return sample_of((metric, cell) for metric, cell in zip(self._metrics, cells, strict=True) if metric)


def _heading(cells: list[str]) -> list[str | None]:
    """The metrics of a heading's cells, a device's name and a value at the least; [] for all other lines."""
    metrics: list[str | None] = []
    others = len(cells) - 2
    for cell in cells:
        metrics.append(metric_of(cell))
        others -= metrics[-1] is None
        if others < 0:
            return []  # most lines with a comma: seen by their first cells
    known = {metric for metric in metrics if metric}
    return metrics if known & IDENTITIES and known - IDENTITIES else []


def _cells(line: str, parted_by: str) -> list[str]:
    return [cell.strip().strip('"') for cell in line.split(parted_by, _CELLS_MAX)]


class Columns:
    """Columns of blanks, as dcgmi dmon prints them: "#Entity NAME NAME", units, then "GPU 0 value value"."""

    def __init__(self) -> None:
        self._metrics: list[str | None] = []

    def feed(self, line: str) -> Sample | None:
        """The sample of a row, or None."""
        words = line.split(None, _CELLS_MAX)
        if words and words[0] == "#Entity":
            self._metrics = [metric_of(word) for word in words[1:]]
        elif len(words) == len(self._metrics) + 2 and self._metrics and words[0] == "GPU":
            named: list[tuple[str, object]] = [("index", words[1])]
            named += [(metric, word) for metric, word in zip(self._metrics, words[2:], strict=True) if metric]
            return sample_of(named)
        return None


class Sections:
    """Indented sections below "GPU address", as nvidia-smi -q prints them."""

    def __init__(self) -> None:
        self._named: list[tuple[str, object]] = []
        self._path: list[tuple[int, str]] = []

    def feed(self, line: str) -> tuple[bool, Sample | None]:
        """Was the line one of a section, and the sample that has just ended."""
        begin = _Q_BEGIN.match(line) if line.startswith("GPU ") else None
        if begin is not None:
            ended = self.end()
            self._named = [("pci", begin["pci"])]
            return True, ended
        if not self._named:
            return False, None
        match = _Q_LINE.match(line)
        if match is None:
            return False, self.end() if line.strip() else None
        depth, name = len(match["indent"]), key_of(match["name"])
        while self._path and self._path[-1][0] >= depth:
            self._path.pop()
        if match["value"] is not None:
            above = [key for _, key in self._path[-2:]]
            metric = next((m for key in reversed(above) if (m := _SECTIONS.get(f"{key}/{name}"))), None)
            if metric := metric or _LEAVES.get(name):
                self._named.append((metric, match["value"].strip()))
        if len(self._path) < 16:
            self._path.append((depth, name))
        return True, None

    def end(self) -> Sample | None:
        """The sample of the section that ends here."""
        named, self._named, self._path = self._named, [], []
        return sample_of(named) if named else None


def exported(line: str) -> Sample | None:
    """The sample in a line of an exporter's text format, or None."""
    match = _PROM.match(line)
    counted = match is not None and match["name"] == "DCGM_EXP_XID_ERRORS_COUNT"
    metric = "xid" if counted else metric_of(match["name"]) if match else None
    if match is None or metric is None or metric in IDENTITIES:
        return None
    named: list[tuple[str, object]] = []
    reading: object = match["value"]
    for name, value in _LABEL.findall(match["labels"]):
        known = metric_of(name)
        if counted and known == "xid":
            reading = value if number(match["value"]) else 0
        if known in IDENTITIES and not (known == "index" and not value.isdigit()):
            named.append((known, value))
    if match["ms"]:
        named.append(("t", int(match["ms"]) / 1000))
    return sample_of([*named, (metric, reading)])


def _index(values: Mapping[str, object]) -> int | None:
    for name in ("index", "device"):
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000:
            return value
        if isinstance(value, str):
            text = value.strip()
            match = _DEVICE.match(text)
            digits = match[1] if match else text
            if digits.isdecimal() and len(digits) <= 4 and (match or name == "index"):
                return int(digits)
    return None


def _time_s(value: object) -> float | None:
    if isinstance(value, str):
        text = _SLASHES.sub(r"\1-\2-\3 ", value.strip()[:40])
        if (t_unix_s := unwrap(f"{text} .").t_unix_s) is not None:
            return t_unix_s
    t_s = number(value)
    return t_s / 1000 if t_s is not None and t_s > 1e11 else t_s
