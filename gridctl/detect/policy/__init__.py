"""The policy as data: what an Xid, a recovery action or a device's value means, and the thresholds.

The tables stand beside this file, with the source of every row. An Xid that has no row is reported as
`unknown_xid` and moves nobody.
"""

import pkgutil
import tomllib
from typing import Any, TypeVar

import msgspec

from gridctl.errors import ConfigError
from gridctl.model.findings import SEVERITIES
from gridctl.model.policy import XidOverride

PREEMPT = ("yes", "no", "if-fatal")
TESTS = ("at_least", "at_most", "mask", "below_max", "rises", "rate")
WHEN = ("none", "now", "after_job", "after_restart", "window", "before_admission")


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all tables say of a row: how bad, what to do, and by whose word."""

    severity: str
    action: str
    preempt: str  #: "yes" is a decisive signal; "if-fatal" is one if the driver's line says Fatal
    when: str
    source: str

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES or self.preempt not in PREEMPT or self.when not in WHEN:
            raise ValueError(f"unknown word in {self}")


class XidRow(PolicyRow, frozen=True, kw_only=True):
    """What one Xid number means."""

    xid: int
    kind: str
    meaning: str
    fault: str


class RecoveryRow(PolicyRow, frozen=True, kw_only=True):
    """What one value of NVML field 230 (also told by Xid 154) means."""

    value: int
    name: str


class DeviceRow(PolicyRow, frozen=True, kw_only=True):
    """What a metric of a device means when it is set ("level") or goes up ("rise")."""

    metric: str
    change: str
    kind: str
    meaning: str
    fault: str


class LevelRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that says something only if it stays: in `count` of the last `of` samples.

    `test`: "at_least", "at_most" and "mask" compare with `value`, "below_max" with the metric of the same
    name and "_max"; "rate" compares what a counter gains a second with `value`; "rises" wants `count`
    increases within `window_s`. With `load_pct` only samples of a device that is used so much count.
    """

    rule: str
    device: str  #: the kind of device: what stands before the colon of its name
    metric: str
    test: str
    value: float
    load_pct: float
    count: int
    of: int
    window_s: float
    kind: str
    layer: str
    meaning: str
    fault: str
    severity: str
    action: str
    when: str
    source: str

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES or self.when not in WHEN or self.test not in TESTS:
            raise ValueError(f"unknown word in {self}")
        if not 1 <= self.count <= self.of <= 32:
            raise ValueError(f"count and of do not fit in {self}")


class SourceRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a source says of its own reading; the rows of one end stand from the mildest to the gravest.

    `record`: "log" (`says` begins the line, `ends` ends it) or "note" (both are states). `from`: the source,
    or "*". It counts once it was said `count` times within `window_s`; without `ends` it is over at once.
    """

    rule: str
    record: str
    from_: str = msgspec.field(name="from")
    says: str
    ends: str
    count: int
    window_s: float
    kind: str
    layer: str
    meaning: str
    fault: str
    severity: str
    action: str
    when: str
    source: str

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES or self.when not in WHEN or self.record not in ("log", "note"):
            raise ValueError(f"unknown word in {self}")
        if not self.says or not 1 <= self.count <= 32:
            raise ValueError(f"says or count does not fit in {self}")


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a node counts as blind, and when as failed."""

    silent_s: float
    phi: float
    intervals_min: int
    spread_min_share: float
    observers: int
    misses: int


class Blindness(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a device that is listed and gives no value counts as unknown."""

    node_samples: int
    device_samples: int


class Late(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a kernel line is told too late to act on it alone."""

    decisive_max_s: float


class Boot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a reboot excuses."""

    grace_s: float


class SharedFate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the same on several nodes has one cause."""

    nodes: int
    window_s: float
    silent_share: float
    return_s: float


class Progress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a job that trains does not get on."""

    hang_min_s: float
    phi: float
    steps_min: int
    spread_min_share: float
    nan_steps: int
    busy_util_pct: float


class BreakerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many evictions there may be."""

    fleet_nodes: int
    fleet_share: float
    fleet_window_s: float
    group_nodes: int
    group_window_s: float


class Chain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an Xid counts as the consequence of another one."""

    window_s: float
    burst_gap_s: float


class TwoLayers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When findings of two layers belong together."""

    window_s: float


class CorrectedRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When corrected memory errors come too often."""

    watch_per_s: float
    critical_per_s: float
    load_util_pct: float
    samples: int
    of: int
    clear_samples: int


class Straggler(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a rank lags behind the others of its job."""

    z: float
    share: float
    min_s: float
    samples: int
    of: int
    start_steps: int
    ranks_min: int
    share_max: float
    special_step: float


class LossSpike(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a loss has left its band."""

    z: float
    share: float
    samples: int
    of: int
    band: int
    band_min: int


class SharedCause(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When findings of several devices or nodes have a cause that lies in none of them."""

    nodes: int
    gpu_share: float
    alone_s: float
    driver_window_s: float
    driver_chance: float
    rail_nodes: int


class MemoryTrend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When main memory is about to run out."""

    samples: int
    every_s: float
    left_s: float
    share: float


class Thresholds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of thresholds.toml."""

    heartbeat: Heartbeat
    chain: Chain
    two_layers: TwoLayers
    ecc_corrected_rate: CorrectedRate
    blind: Blindness
    late: Late
    boot: Boot
    shared_fate: SharedFate
    breaker: BreakerLimits
    progress: Progress
    straggler: Straggler
    loss_spike: LossSpike
    shared_cause: SharedCause
    memory_trend: MemoryTrend


class DetectPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `xids` by number, `recovery` by value, `devices` by metric."""

    xids: dict[int, XidRow]
    recovery: dict[int, RecoveryRow]
    devices: dict[str, DeviceRow]
    thresholds: Thresholds
    levels: dict[str, list[LevelRow]] = {}  #: by kind of device
    sources: list[SourceRow] = []
    overrides: dict[int, XidOverride] = {}  #: what the site has said; `xids` has it already


_R = TypeVar("_R", bound=msgspec.Struct)

_UNKNOWN = XidRow(
    xid=-1,
    kind="unknown_xid",
    meaning="a number without a known meaning",
    fault="unknown",
    severity="warning",
    action="manual_review",
    preempt="no",
    when="none",
    source="an unknown number is reported and moves nobody",
)


def xid_row(policy: DetectPolicy, xid: int) -> XidRow:
    """The row of an Xid, or the one for unknown numbers."""
    return policy.xids.get(xid) or msgspec.structs.replace(_UNKNOWN, xid=xid)


def said(override: XidOverride, when: str) -> dict[str, str]:
    """The fields of a row that a site replaces. Who takes `preempt` back, or adds it, moves `when` along."""
    words = {"severity": override.severity, "action": override.action, "when": override.when}
    fields = {name: word for name, word in words.items() if word is not None}
    if override.preempt is not None:
        fields["preempt"] = "yes" if override.preempt else "no"
        if override.preempt:
            fields.setdefault("when", "now")
        elif when == "now":
            fields.setdefault("when", "after_job")
    return fields


def site_source(override: XidOverride) -> str:
    """Whose word an override is."""
    return f"policy.toml: {override.reason}"


def parse_table(text: str, row: type[_R], name: str) -> list[_R]:
    """Rows of a tab-separated table with a heading. Raises `ConfigError` with the line's number."""
    heading, *lines = text.splitlines()
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            cells: dict[str, Any] = dict(zip(heading.split("\t"), line.split("\t"), strict=True))
            rows.append(msgspec.convert(cells, row, strict=False))
        except (ValueError, msgspec.ValidationError) as error:
            raise ConfigError(f"{name}, line {number}: {error}") from None
    return rows


def builtin() -> DetectPolicy:
    """The policy that is delivered with gridctl."""
    return DetectPolicy(
        xids={row.xid: row for row in parse_table(delivered("xid.tsv"), XidRow, "xid.tsv")},
        recovery={
            row.value: row for row in parse_table(delivered("recovery.tsv"), RecoveryRow, "recovery.tsv")
        },
        devices={row.metric: row for row in parse_table(delivered("device.tsv"), DeviceRow, "device.tsv")},
        thresholds=msgspec.convert(tomllib.loads(delivered("thresholds.toml")), Thresholds),
        sources=parse_table(delivered("sources.tsv"), SourceRow, "sources.tsv"),
        levels=_levels(parse_table(delivered("levels.tsv"), LevelRow, "levels.tsv")),
    )


def _levels(rows: list[LevelRow]) -> dict[str, list[LevelRow]]:
    levels: dict[str, list[LevelRow]] = {}
    for row in rows:
        levels.setdefault(row.device, []).append(row)
    return levels


def delivered(name: str) -> str:
    """A file that stands beside this one."""
    content = pkgutil.get_data(__name__, name)
    assert content is not None, f"{name} is a part of this package"
    return content.decode()
