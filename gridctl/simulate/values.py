"""What the devices of a sound node report, at work and idle. Metrics as in docs and recordings."""

import random
from typing import Any

from gridctl.model.findings import WatchedNode

Values = dict[str, Any]

_IDLE = {
    "power_w": 78,
    "sm_clock_mhz": 345,
    "throttle": 1,
    "util_pct": 0,
    "mem_used_mib": 4,
    "pcie_gen": 1,
}


class Sound:
    """One node's usual values: of its own, and never quite the same twice."""

    def __init__(self, node: WatchedNode, chance: random.Random) -> None:
        self.gpus = [_gpu(chance) for _ in range(node.gpus)]
        self._nic = _nic(chance)
        self._node = _host(chance)
        self._per_s = chance.randint(1, 9) * 10**9

    def gpu(self, number: int, noise: int, idle: bool) -> Values:
        """`noise`: 16 random bits."""
        v = self.gpus[number].copy()
        if idle:
            v["temp_c"] = 31 + (noise & 1)
            v["mem_temp_c"] = 36 + (noise & 1)
            v.update(_IDLE)
            return v
        v["temp_c"] += noise & 3
        v["mem_temp_c"] += noise >> 2 & 3
        v["power_w"] += noise >> 4 & 31
        v["util_pct"] += noise >> 9 & 3
        return v

    def other(self, device: str, t_s: float, noise: int) -> Values:
        """The node itself, its power supply, or its port."""
        if device == "node":
            return self.node(noise)
        return self.psu(noise) if device.startswith("psu") else self.nic(t_s)

    def nic(self, t_s: float) -> Values:
        v = self._nic.copy()
        v["rx_bytes_total"] = v["tx_bytes_total"] = self._per_s * int(t_s)
        v["ecn_marked_total"] += int(t_s) // 7
        return v

    def psu(self, noise: int) -> Values:
        return {"in_w": 1750 + (noise & 63), "ok": 1}

    def node(self, noise: int) -> Values:
        v = self._node.copy()
        v["load1"] = 18.0 + (noise & 7)
        v["mem_avail_mib"] = self.free_mib(noise)
        return v

    def free_mib(self, noise: int) -> int:
        """Main memory that is available."""
        free_mib: int = self._node["mem_avail_mib"]
        return free_mib - (noise & 1023)


def _gpu(chance: random.Random) -> Values:
    temp_c = chance.randint(55, 66)
    return {
        "temp_c": temp_c,
        "mem_temp_c": temp_c + chance.randint(7, 12),
        "power_w": chance.randint(620, 665),
        "power_limit_w": 700,
        "sm_clock_mhz": 1905,
        "throttle": 4 if chance.random() < 0.3 else 0,
        "util_pct": chance.randint(94, 97),
        "mem_used_mib": 64_000 + chance.randint(0, 2000),
        "ecc_sbe_total": chance.randint(0, 3),
        "ecc_dbe_total": 0,
        "ecc_sram_ue_total": 0,
        "remap_corr_total": int(chance.random() < 0.02),
        "remap_uncorr_total": 0,
        "remap_pending": 0,
        "remap_failed": 0,
        "retired_pages": None,
        "pcie_replay_total": chance.choice((0, 0, 0, 12)),
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "nvlink_crc_total": chance.randint(0, 30),
        "nvlink_replay_total": chance.randint(0, 5),
        "nvlink_recovery_total": 0,
        "nvlink_down": 0,
        "recovery_action": 0,
    }


def _nic(chance: random.Random) -> Values:
    return {
        "state": 1,
        "link_downed_total": chance.choice((0, 0, 0, 1, 4, 10)),
        "symbol_err_total": chance.randint(0, 2000),
        "rcv_err_total": 0,
        "xmit_discards_total": chance.randint(0, 30),
        "local_integrity_total": 0,
        "ecn_marked_total": chance.randint(0, 5000),
        "cnp_total": chance.randint(0, 3000),
        "tx_pause_total": 0,
        "rx_pause_total": 0,
        "out_of_sequence_total": 0,
    }


def _host(chance: random.Random) -> Values:
    return {
        "inlet_c": round(chance.uniform(20.0, 25.0), 1),
        "edac_ce_total": chance.choice((0, 0, 3, 6)),
        "edac_ue_total": 0,
        "load1": 20.0,
        "mem_avail_mib": 1_455_000,
        "disk_free_mib": 5_200_000,
        "aer_cor_total": chance.choice((0, 0, 7)),
        "aer_nonfatal_total": 0,
        "aer_fatal_total": 0,
    }
