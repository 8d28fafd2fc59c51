"""How the page of metrics calls what sources report, in base units, and the names that DCGM's exporter has.

Prometheus asks for base units in names (prometheus.io/docs/practices/naming), OpenMetrics for the unit as
the name's end. So `temp_c` is `gridagent_gpu_temp_celsius`, and `util_pct` is `gridagent_gpu_util_ratio`.
"""

from functools import lru_cache

import msgspec

PREFIX = "gridagent"
_TOTAL = "_total"
#: End of a source's name -> (unit on the page, factor).
_UNITS = {
    "c": ("celsius", 1.0),
    "w": ("watts", 1.0),
    "v": ("volts", 1.0),
    "s": ("seconds", 1.0),
    "us": ("seconds", 1e-6),
    "mhz": ("hertz", 1e6),
    "pct": ("ratio", 0.01),
    "mib": ("bytes", float(1 << 20)),
    "gbps": ("bytes_per_second", 1e9 / 8),
    "bytes": ("bytes", 1.0),
}

_HELP = {
    "lost": "1: the GPU is lost: its driver says so, or it does not answer on its bus.",
    "temp_c": "Temperature.",
    "temp_margin_c": "Degrees left until the GPU slows itself down.",
    "mem_temp_c": "Temperature of the memory.",
    "power_w": "Power drawn.",
    "power_limit_w": "Power limit in force.",
    "sm_clock_mhz": "Clock of the streaming multiprocessors.",
    "mem_clock_mhz": "Clock of the memory.",
    "throttle": "Why clocks are held down: NVML's clock event bits.",
    "util_pct": "Part of the time in which a kernel ran. No measure of progress: a job that hangs shows 1.",
    "mem_used_mib": "Memory in use.",
    "mem_total_mib": "Memory that there is.",
    "processes": "Processes that compute on the GPU.",
    "ecc_sbe_total": "Corrected memory errors since the driver was loaded.",
    "ecc_dbe_total": "Uncorrectable memory errors since the driver was loaded.",
    "ecc_sram_ue_total": "Uncorrectable errors of memory on the chip.",
    "ecc_sram_threshold": "1: errors of memory on the chip have reached the driver's threshold for a repair.",
    "remap_corr_total": "Memory rows remapped after corrected errors.",
    "remap_uncorr_total": "Memory rows remapped after uncorrectable errors.",
    "remap_pending": "1: a row is to be remapped at the next reset.",
    "remap_failed": "1: a row could not be remapped.",
    "retired_pages": "Memory pages that are not used any more.",
    "recovery_action": "What the driver asks for: NVML field 230, 0 is nothing.",
    "mig_mode": "1: the GPU is partitioned (MIG).",
    "mig_mode_pending": "The MIG mode after the next reset.",
    "pcie_replay_total": "PCIe transactions that were sent again.",
    "pcie_gen": "PCIe generation at present; idle devices lower it.",
    "pcie_gen_max": "PCIe generation that device and slot can do.",
    "pcie_width": "PCIe lanes at present.",
    "pcie_width_max": "PCIe lanes that device and slot have.",
    "nvlink_down": "NVLinks that ought to be up and are not.",
    "nvlink_crc_total": "CRC errors over all NVLinks.",
    "nvlink_replay_total": "Replays over all NVLinks.",
    "nvlink_recovery_total": "Recoveries over all NVLinks.",
    "state": "1: up (a port), or live (a drive).",
    "rate_gbps": "Data rate of the link.",
    "link_downed_total": "How often the link went down.",
    "symbol_err_total": "Symbol errors of the link.",
    "rcv_err_total": "Packets received with errors.",
    "xmit_discards_total": "Packets that could not be sent.",
    "xmit_wait_total": "Ticks in which data waited to be sent: congestion, no fault.",
    "rx_bytes_total": "Data received.",
    "tx_bytes_total": "Data sent.",
    "rx_pause_total": "Pause frames received: the network held this port up.",
    "tx_pause_total": "Pause frames sent: this port held the network up.",
    "ecn_marked_total": "Packets that arrived with a mark of congestion.",
    "cnp_total": "Notifications of congestion, sent and handled.",
    "aer_cor_total": "PCIe errors that the link corrected.",
    "aer_nonfatal_total": "PCIe errors that cost a transaction.",
    "aer_fatal_total": "PCIe errors that cost the link.",
    "edac_ce_total": "Corrected errors of main memory.",
    "edac_ue_total": "Uncorrectable errors of main memory.",
    "ok": "0: no mains, or an alarm at the input.",
    "in_w": "Power at the input.",
    "in_v": "Voltage at the input.",
    "inlet_c": "Temperature of the air at the inlet.",
    "margin_c": "Degrees left until the critical limit.",
    "load1": "Load average over a minute.",
    "uptime_s": "Time since boot.",
    "mem_avail_mib": "Main memory that programs can still get.",
    "swap_free_mib": "Swap space that is free.",
    "disk_free_mib": "Space that is free on the root file system.",
    "free_mib": "Space that is free on the file system.",
    "total_mib": "Size of the file system.",
    "read_only": "1: the file system takes no writes.",
    "oom_kill_total": "Processes that the kernel killed for want of memory.",
}


class Named(msgspec.Struct, frozen=True):
    """A metric as the page names it. `kind`: gauge, counter or unknown; `unit`: "" or the name's end."""

    name: str
    kind: str
    unit: str
    text: str
    factor: float = 1.0


@lru_cache(maxsize=4096)
def neutral(device_kind: str, metric: str) -> Named:
    """The vendor-neutral name of a source's metric."""
    stem = metric.removesuffix(_TOTAL)
    counted = stem != metric
    head, _, end = stem.rpartition("_")
    unit, factor = _UNITS.get(end, ("", 1.0)) if head else ("", 1.0)
    name = f"{PREFIX}_{device_kind}_{f'{head}_{unit}' if unit else stem}"
    text = _HELP.get(metric, "As the node's sources reported it last.")
    return Named(
        f"{name}{_TOTAL}" if counted else name, "counter" if counted else "gauge", unit, text, factor
    )


#: Metric of a GPU -> DCGM's name and unit; the value stays as it is. Names after DCGM's list of fields
#: (github.com/NVIDIA/DCGM, dcgm_fields.h). What DCGM counts has no "_total" there, which counters of
#: OpenMetrics must have: such a family is of type unknown. DCGM_FI_DEV_XID_ERRORS is left out: a gauge of
#: the last number hides repeats and never clears (github.com/NVIDIA/dcgm-exporter issue 500).
DCGM = {
    "sm_clock_mhz": ("DCGM_FI_DEV_SM_CLOCK", "MHz"),
    "mem_clock_mhz": ("DCGM_FI_DEV_MEM_CLOCK", "MHz"),
    "temp_c": ("DCGM_FI_DEV_GPU_TEMP", "C"),
    "mem_temp_c": ("DCGM_FI_DEV_MEMORY_TEMP", "C"),
    "power_w": ("DCGM_FI_DEV_POWER_USAGE", "W"),
    "power_limit_w": ("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "W"),
    "throttle": ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "bits"),
    "util_pct": ("DCGM_FI_DEV_GPU_UTIL", "%"),
    "mem_used_mib": ("DCGM_FI_DEV_FB_USED", "MiB"),
    "mem_total_mib": ("DCGM_FI_DEV_FB_TOTAL", "MiB"),
    "ecc_sbe_total": ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "errors"),
    "ecc_dbe_total": ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "errors"),
    "remap_corr_total": ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "rows"),
    "remap_uncorr_total": ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "rows"),
    "remap_pending": ("DCGM_FI_DEV_ROW_REMAP_PENDING", "0 or 1"),
    "remap_failed": ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "0 or 1"),
    "recovery_action": ("DCGM_FI_DEV_GET_GPU_RECOVERY_ACTION", "NVML's value"),
    "mig_mode": ("DCGM_FI_DEV_MIG_MODE", "0 or 1"),
    "pcie_replay_total": ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "replays"),
    "pcie_gen": ("DCGM_FI_DEV_PCIE_LINK_GEN", "generation"),
    "pcie_gen_max": ("DCGM_FI_DEV_PCIE_MAX_LINK_GEN", "generation"),
    "pcie_width": ("DCGM_FI_DEV_PCIE_LINK_WIDTH", "lanes"),
    "pcie_width_max": ("DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH", "lanes"),
    "nvlink_replay_total": ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "replays"),
    "nvlink_recovery_total": ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "recoveries"),
}


@lru_cache(maxsize=1024)
def dcgm(metric: str) -> Named | None:
    """The name under which dashboards for DCGM's exporter look for a metric of a GPU."""
    if metric not in DCGM:
        return None
    name, unit = DCGM[metric]
    kind = "unknown" if metric.endswith(_TOTAL) else "gauge"
    return Named(name, kind, "", f"{_HELP[metric].rstrip('.')}, under DCGM's name ({unit}).")
