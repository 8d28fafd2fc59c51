"""Source `ethernet`: network interfaces with hardware of their own, from /sys/class/net.

State and drops of the link are read at every turn, the rest every `SLOW_S`: a link's speed and its pause
frames are questions to the adapter's firmware, and the statistics of many ports are many files.
"""

import time
from collections.abc import Callable

from gridagent.telemetry import Reading
from gridagent.telemetry.ethtool import Ask, ask_kernel, pauses, statistics
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import Tree, sample

SLOW_S = 10.0

_CLASS = "sys/class/net"
_ETHERNET = 1  #: ARPHRD_ETHER
_STATES = {"up": 1, "down": 0, "lowerlayerdown": 0, "notpresent": 0, "dormant": 0, "testing": 0}
LINK: dict[str, str] = {
    "link_downed_total": "carrier_down_count",
    "carrier_changes_total": "carrier_changes",
}
COUNTERS: dict[str, str] = {
    "rcv_err_total": "statistics/rx_errors",
    "rx_crc_err_total": "statistics/rx_crc_errors",
    "rx_dropped_total": "statistics/rx_dropped",
    "xmit_err_total": "statistics/tx_errors",
    "xmit_discards_total": "statistics/tx_dropped",
    "rx_bytes_total": "statistics/rx_bytes",
    "tx_bytes_total": "statistics/tx_bytes",
}


class Ethernet(Probe):
    """Devices `nic:INTERFACE`. Bridges, tunnels and a host's virtual functions are none."""

    INTERVAL_S = 1.0

    def __init__(
        self, tree: Tree, clock: Callable[[], float] = time.monotonic, ask: Ask = ask_kernel
    ) -> None:
        super().__init__(tree, clock)
        self._own = Tree("/", tree.source)
        self._ask = ask
        self._next_s: dict[str, float] = {}  #: interface -> when the rest is read again

    def read(self) -> list[Reading]:
        found = []
        for name in self.tree.names(_CLASS):
            folder = f"{_CLASS}/{name}"
            hardware = self.tree.has(f"{folder}/device") and not self.tree.has(f"{folder}/device/physfn")
            if hardware and self.tree.number(f"{folder}/type") in (_ETHERNET, None):
                found.append(sample(f"nic:{name}", self._values(name, folder)))
        return found

    def _values(self, name: str, folder: str) -> dict[str, float | None]:
        state: float | None = _STATES.get(self.tree.text(f"{folder}/operstate") or "")
        if state is None:  # some drivers leave it unknown
            state = self.tree.number(f"{folder}/carrier")
        values: dict[str, float | None] = {"state": state}
        values.update({metric: self.tree.count(f"{folder}/{file}") for metric, file in LINK.items()})
        if self.clock() >= self._next_s.get(folder, 0.0):
            speed = self.tree.number(f"{folder}/speed")
            values["rate_gbps"] = speed / 1000 if speed is not None and speed > 0 else None
            values.update({metric: self.tree.count(f"{folder}/{file}") for metric, file in COUNTERS.items()})
            if self._is_own(folder):
                values.update(pauses(statistics(name, self._ask)))
            self._next_s[folder] = self.clock() + SLOW_S
        return values

    def _is_own(self, folder: str) -> bool:
        """Is it an interface of this process's network, too, and not only one of the tree that is read?"""
        address = self.tree.text(f"{folder}/address")
        return bool(address) and self._own.text(f"{folder}/address") == address
