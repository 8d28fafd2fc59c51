"""Devices that are still listed and say nothing: what cannot be read is unknown, never healthy."""

from collections.abc import Iterator, Mapping

from gridagent.signals.values import number
from gridctl.detect.device import Cleared
from gridctl.detect.policy import Blindness
from gridctl.model.findings import Finding


class Blind:
    """The GPUs of one node: which of them give no value, though the agent asks them."""

    def __init__(self, node: str, limits: Blindness) -> None:
        self._node = node
        self._limits = limits
        self._mute: dict[str, int] = {}  #: device -> samples without any value, in a row; 0: it speaks
        self._spoke: set[str] = set()
        self._all = False
        self._single: set[str] = set()
        self.changed = True  #: did the last sample change anything here?

    def feed(self, t_unix_s: float, device: str, values: Mapping[str, object]) -> Iterator[Finding | Cleared]:
        """Takes one sample of a GPU."""
        self.changed = bool(self._mute.get(device, 1) or self._all or device in self._single)
        if any(number(value) is not None for value in values.values()):
            yield from self._speaks(device)
            return
        if not values:
            return  # it says only that the device is there
        self.changed = True
        self._mute[device] = count = self._mute.get(device, 0) + 1
        if self._all:
            return
        silent = [count >= self._limits.node_samples for count in self._mute.values()]
        if len(silent) > 1 and all(silent):
            self._all = True
            why = f"none of {len(silent)} GPUs gave a value in {self._limits.node_samples} samples: unknown"
            yield self._finding(t_unix_s, "node", why, "blind.node")
        elif count >= self._limits.device_samples and device not in self._single:
            self._single.add(device)
            since = "" if device in self._spoke else ", nor any before since its agent began"
            why = f"gave no value in {count} samples{since}: unknown"
            yield self._finding(t_unix_s, device, why, "blind.device")

    def _speaks(self, device: str) -> Iterator[Cleared]:
        self._mute[device] = 0
        self._spoke.add(device)
        if device in self._single:
            self._single.discard(device)
            yield Cleared("missing_data", device)
        if self._all:
            self._all = False
            yield Cleared("missing_data", "node")

    def _finding(self, t_unix_s: float, device: str, why: str, rule: str) -> Finding:
        return Finding(
            t_unix_s=t_unix_s,
            node=self._node,
            device=device,
            kind="missing_data",
            severity="warning",
            action="manual_review",
            why=[why],
            rule=rule,
            layer="device",
            fault="monitor",
        )
