"""What a site allows, from `policy.toml`. Every default is the careful one that still lets a person act."""

import msgspec


class XidOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's own word on one Xid, `[xid.N]`. What it leaves out stays as delivered."""

    reason: str  #: whose experience that is: it stands in the place of the row's source
    severity: str | None = None
    action: str | None = None
    preempt: bool | None = None  #: must a running job be moved off now?
    when: str | None = None


class Caps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many hand-overs, by whomever, before gridctl starts no further one by itself.

    The fleet's limit is a share of it, but never below `fleet_hour_min` (a share alone forbids everything in
    a small fleet) and never above `fleet_hour_max` (nor bounds anything in a large one).
    """

    node_day: int = 1
    rack_hour: int = 2
    nvlink_domain_hour: int = 2
    job_hour: int = 2
    fleet_hour_share: float = 0.1
    fleet_hour_min: int = 4
    fleet_hour_max: int = 32

    def __post_init__(self) -> None:
        counts = (self.node_day, self.rack_hour, self.nvlink_domain_hour, self.job_hour, self.fleet_hour_min)
        if min(counts) < 0 or not 0 <= self.fleet_hour_share <= 1:
            raise ValueError("caps must be 0 or more, and fleet_hour_share from 0 to 1")
        if self.fleet_hour_max < self.fleet_hour_min:
            raise ValueError("caps: fleet_hour_max is below fleet_hour_min")


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long telemetry is kept how fine, `[history]`: every second, then every minute, then every hour."""

    store: str = ""  #: where: a folder or the URL of object storage; empty: beside the journal
    seconds_h: float = 48.0
    minutes_d: float = 90.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds_h <= self.minutes_d * 24:
            raise ValueError("history: seconds_h must be above 0, and no longer than minutes_d")


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the fleet's operators promise, `[slo]`: each target is the share that must be good."""

    recover_s: float = 600.0  #: from what an incident began with until its ranks have moved
    recover_target: float = 0.95
    pause_ms: float = 1000.0  #: for how long a job stands still for a hand-over
    pause_target: float = 0.99
    swap_target: float = 0.99  #: of all swaps that were begun: done
    preemption_target: float = 0.9  #: of all preemptions that people have judged: a true fault

    def __post_init__(self) -> None:
        targets = (self.recover_target, self.pause_target, self.swap_target, self.preemption_target)
        if not all(0 < target < 1 for target in targets) or min(self.recover_s, self.pause_ms) <= 0:
            raise ValueError("slo: targets are between 0 and 1, and limits above 0")


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rules for hand-overs. A misspelt name in the file is an error, not a silent default."""

    require_same_rack: bool = False
    require_same_driver: bool = True
    require_attestation: bool = False
    auto: bool = False  #: act without a person; off until a site arms it
    watch_steps: int = 5  #: steps after the swap that are held against the band
    band_steps: int = 20  #: steps before the swap that make the band
    price_usd_per_gpu_h: float = 0.0  #: 0: no costs in money are shown
    plan_expiry_s: float = 300.0
    clock_skew_max_s: float = 5.0
    xid: dict[int, XidOverride] = {}
    window_h: float = 24.0  #: hours until what may wait is done: the alternative to acting now
    recovery_h: float = 0.0  #: hours that a job needs after a crash; 0: the published median
    caps: Caps = Caps()
    history: Kept = Kept()
    slo: Slo = Slo()

    def __post_init__(self) -> None:
        if not 0 <= self.window_h <= 24 * 30 or not 0 <= self.recovery_h <= 24 * 30:
            raise ValueError("window_h and recovery_h are hours, from 0 to 720")
