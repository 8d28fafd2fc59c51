"""What a site allows, from `policy.toml`. Every default is the careful one that still lets a person act."""

import msgspec


class XidOverride(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's own word on one Xid, `[xid.N]`. What it leaves out stays as delivered."""

    reason: str  #: whose experience that is: it stands in the place of the row's source
    severity: str | None = None
    action: str | None = None
    preempt: bool | None = None  #: must a running job be moved off now?
    when: str | None = None


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
