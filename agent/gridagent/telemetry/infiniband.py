"""Source `infiniband`: ports of InfiniBand and RoCE adapters, from /sys/class/infiniband.

The state is read at every turn. A counter costs a command to the adapter's firmware, so counters are read
at most every `COUNTERS_S`; a sample between has the state only.
"""

import time
from collections.abc import Callable

from gridagent.telemetry import Reading
from gridagent.telemetry.polled import Probe
from gridagent.telemetry.tree import Tree, sample

COUNTERS_S = 10.0
_CLASS = "sys/class/infiniband"
#: Metric -> file in `counters`, and what one count is worth: data counts in words of four bytes.
PORT: dict[str, tuple[str, int]] = {
    "link_downed_total": ("link_downed", 1),
    "link_error_recovery_total": ("link_error_recovery", 1),
    "symbol_err_total": ("symbol_error", 1),
    "rcv_err_total": ("port_rcv_errors", 1),
    "xmit_discards_total": ("port_xmit_discards", 1),
    "xmit_wait_total": ("port_xmit_wait", 1),
    "local_integrity_total": ("local_link_integrity_errors", 1),
    "excessive_buffer_overrun_total": ("excessive_buffer_overrun_errors", 1),
    "rx_bytes_total": ("port_rcv_data", 4),
    "tx_bytes_total": ("port_xmit_data", 4),
}
#: Metric -> files in `hw_counters` as drivers name them (mlx5, bnxt_re, irdma); those there are added up.
HARDWARE: dict[str, tuple[str, ...]] = {
    "ecn_marked_total": ("np_ecn_marked_roce_packets", "rx_ecn_marked_pkts", "RxECNMrkd"),
    "cnp_total": ("np_cnp_sent", "rp_cnp_handled", "tx_cnp_pkts", "rx_cnp_pkts", "cnpSent", "cnpHandled"),
    "out_of_sequence_total": ("out_of_sequence", "oos_drop_count"),
    "out_of_buffer_total": ("out_of_buffer", "rx_out_of_buffer"),
    "packet_seq_err_total": ("packet_seq_err", "seq_err_naks_rcvd"),
    "local_ack_timeout_total": ("local_ack_timeout_err", "to_retransmits"),
    "rnr_nak_retry_total": ("rnr_nak_retry_err", "rnr_naks_rcvd"),
    "req_cqe_error_total": ("req_cqe_error",),
    "req_cqe_flush_error_total": ("req_cqe_flush_error",),
    "resp_cqe_error_total": ("resp_cqe_error",),
    "resp_cqe_flush_error_total": ("resp_cqe_flush_error",),
}
#: The kernel's number of a port state -> up; 0 says that nothing changes, which is no state.
_UP = {"1": 0, "2": 0, "3": 0, "4": 1, "5": 1}


class InfiniBand(Probe):
    """Devices `nic:ADAPTER/PORT`."""

    INTERVAL_S = 1.0

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(tree, clock)
        self._next_s: dict[str, float] = {}  #: port -> when its counters may be read again

    def read(self) -> list[Reading]:
        found = []
        for adapter in self.tree.names(_CLASS):
            for port in self.tree.names(f"{_CLASS}/{adapter}/ports"):
                found.append(self._port(adapter, port))
        return found

    def _port(self, adapter: str, port: str) -> Reading:
        folder = f"{_CLASS}/{adapter}/ports/{port}"
        state = (self.tree.text(f"{folder}/state") or "").partition(":")[0]
        values: dict[str, float | None] = {"state": _UP.get(state)}
        if self.clock() >= self._next_s.get(folder, 0.0):
            values["rate_gbps"] = _rate(self.tree.text(f"{folder}/rate"))
            for metric, (name, worth) in PORT.items():
                values[metric] = self.tree.count(f"{folder}/counters/{name}", worth)
            values.update(self._hardware(adapter, folder))
            self._next_s[folder] = self.clock() + COUNTERS_S
        return sample(f"nic:{adapter}/{port}", values)

    def _hardware(self, adapter: str, folder: str) -> dict[str, float | None]:
        """Some drivers keep these counters with the port, some with the adapter."""
        values: dict[str, float | None] = {}
        own, shared = f"{folder}/hw_counters", f"{_CLASS}/{adapter}/hw_counters"
        place = own if self.tree.has(own) else shared
        there = set(self.tree.names(place))
        for metric, names in HARDWARE.items():
            counts = [self.tree.count(f"{place}/{name}") for name in names if name in there]
            known = [count for count in counts if count is not None]
            values[metric] = sum(known) if known and len(known) == len(counts) else None
        return values


def _rate(text: str | None) -> float | None:
    """Gb/s of "400 Gb/sec (4X NDR)"."""
    try:
        return float((text or "").split(" ", 1)[0][:20])
    except ValueError:
        return None
