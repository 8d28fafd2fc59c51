"""Samples that change nothing: known by comparison with the last ones, and passed over.

Nearly every sample of a sound device says what the one before said, in everything that a rule looks at. Once
a sample has been taken in full and has changed no state, an equal one cannot change any either. What no rule
looks at (temperatures, clocks) is not even decoded; loads and main memory count by the limits they have
passed, clock-event bits by those that a rule asks for. About 10 bytes of memory for each metric of a device.
"""

from bisect import bisect_left, bisect_right
from typing import Any

import msgspec

from gridagent.wire import StreamRecord
from gridctl.detect.policy import DetectPolicy

#: A driver gives some metrics with each sample and some with every tenth: two forms, at two loads.
_FORMS_MAX = 4
#: Above this a load or a set of bits is no plain number, and is compared as it is.
_PLAIN_MAX = 1 << 30

Value = int | float | str | None


class Shape:
    """What the rules of a policy look at: `line` is the type that a line of a stream is decoded into."""

    def __init__(self, policy: DetectPolicy) -> None:
        levels = [row for rows in policy.levels.values() for row in rows]
        names = {*policy.devices, "recovery_action", "util_pct", "ecc_sbe_total", "throttle"}
        names |= {"mem_avail_mib", "mem_total_mib"}
        names |= {row.metric for row in levels}
        names |= {f"{row.metric}_max" for row in levels if row.test == "below_max"}
        loads = {row.load_pct for row in levels if row.load_pct}
        loads |= {policy.thresholds.ecc_corrected_rate.load_util_pct}
        self.busy_pct = policy.thresholds.progress.busy_util_pct
        self.loads = sorted(loads | {self.busy_pct})
        self.busy = bisect_right(self.loads, self.busy_pct)  #: the least plain load that is work
        #: Of main memory its trend counts, too: see `Memory.passes`.
        self.rooms_mib = sorted(row.value for row in levels if row.metric == "mem_avail_mib")
        self.bits = 0
        for row in levels:
            if row.metric == "throttle":
                self.bits |= int(row.value) if row.test == "mask" else _PLAIN_MAX - 1
        fields = [(name, Value, msgspec.UNSET) for name in sorted(names)]
        self.metrics: Any = msgspec.defstruct("Metrics", fields, gc=False)
        self._body = msgspec.defstruct(
            "Body",
            [("device", str, ""), ("pci", str | None, None), ("v", self.metrics, None)],
            gc=False,
        )
        self.line: Any = msgspec.defstruct(
            "Line", [("boot", str), ("t_unix_s", float), ("kind", str), ("v", self._body, None)], gc=False
        )

    def of(self, record: StreamRecord) -> Any:
        """The line of a sample; None if it has another form, and is to be taken in full."""
        try:
            body: Any = msgspec.convert(record.v, self._body)
        except msgspec.ValidationError:
            return None
        return None if body.v is None else self.line(record.boot, record.t_unix_s, record.kind, body)

    def plain(self, metrics: Any) -> Value:
        """Brings a sample into the form that is compared: changes it. Returns the free memory it told."""
        load = metrics.util_pct
        if (type(load) is int or type(load) is float) and 0 <= load <= _PLAIN_MAX:
            metrics.util_pct = bisect_right(self.loads, load)
        free_mib: Value = metrics.mem_avail_mib
        if (type(free_mib) is int or type(free_mib) is float) and 0 <= free_mib <= _PLAIN_MAX:
            metrics.mem_avail_mib = bisect_left(self.rooms_mib, free_mib)
        bits = metrics.throttle
        if type(bits) is int and 0 <= bits < _PLAIN_MAX:
            metrics.throttle = bits & self.bits
        return free_mib


class Still:
    """The forms of one device's samples that change nothing at present."""

    __slots__ = ("forms", "fresh", "pci", "times_unix_s")

    def __init__(self) -> None:
        self.forms: list[Any] = []
        self.pci: str | None = None
        self.times_unix_s: list[float] = []  #: by form: when one was passed over last, 0.0 for never
        self.fresh = False  #: no sample came since `learn`

    def equals(self, body: Any) -> bool:
        """Is that, in its plain form, a sample that changes nothing?"""
        return self.fresh and body.pci == self.pci and body.v in self.forms

    def full(self) -> None:
        """A sample comes that is taken in full."""
        if not self.fresh:
            self.forms = []
        self.times_unix_s = [0.0] * len(self.forms)
        self.fresh = False

    def learn(self, pci: str | None, metrics: Any, changed: bool) -> None:
        """What that sample, now in its plain form, did."""
        self.fresh = True
        if changed:
            self.forms, self.times_unix_s = [], []
            return
        if pci != self.pci:
            self.forms = []
            self.pci = pci
        self.forms = [metrics, *self.forms[: _FORMS_MAX - 1]]
        self.times_unix_s = [0.0] * len(self.forms)


def comparable(shape: Shape, metrics: Any) -> bool:
    """Says a sample in its plain form something, and is its load, if there is one, a plain number?"""
    load = metrics.util_pct
    if load is not None and load is not msgspec.UNSET and load not in range(len(shape.loads) + 1):
        return False
    return any(
        type(value) in (int, float) and abs(value) < _PLAIN_MAX
        for value in (getattr(metrics, name) for name in metrics.__struct_fields__)
    )
