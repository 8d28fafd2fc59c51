"""What a report of an incident says, as data: `-f json` prints this. Times are seconds since 1970 UTC."""

import msgspec

from gridctl.model.runs import Incident, Moment, Run


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was seen, with the lines it rests on as they came."""

    t_unix_s: float
    seq: int
    device: str
    kind: str
    severity: str
    action: str
    layer: str
    rule: str
    lines: list[str]


class Suppressed(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was seen and not acted on; the last of `lines` says for what reason."""

    t_unix_s: float
    seq: int
    device: str
    kind: str
    rule: str
    lines: list[str]


class Archive(msgspec.Struct, frozen=True, kw_only=True):
    """A collection of evidence."""

    t_unix_s: float
    node: str
    state: str  #: asked, collected or failed
    who: str
    file: str
    sha256: str
    text: str


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What detection decided."""

    t_unix_s: float
    seq: int
    decision: str
    kind: str
    rules: list[str]
    why: list[str]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative with what it was expected to cost."""

    action: str
    gpu_h: float
    usd: float | None
    rejected: str  #: why it was not taken; "": it was
    parts: list[str]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What ought to have been done, as it was weighed at that moment."""

    t_unix_s: float
    seq: int
    action: str
    wanted: str
    automatic: bool
    uncertain: bool
    p_24h: float
    basis: str
    why: list[str]
    options: list[Option]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """Who answered for a run."""

    t_unix_s: float
    who: str
    how: str
    reason: str
    plan: str
    run: str


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and what became of it."""

    id: str
    t_unix_s: float
    who: str
    what: str
    run: str  #: "": it was never applied
    pause_s: float
    comparison: list[str]
    accepted: list[str]  #: what its maker warned of
    notes: list[str]


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """The moment at which ranks changed their process."""

    run: str
    outcome: str
    boundary_step: int
    epoch: int
    pause_s: float  #: from the first rank that waits to the first that goes on
    from_unix_s: float
    to_unix_s: float
    state_bytes: int
    parts_ms: dict[str, float]
    digests: dict[str, dict[str, str]]  #: rank -> part of its state -> SHA-256
    step_s_before: float | None
    step_s_after: float | None
    ranks: int  #: that waited


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of a hand-over: when the first and the last process told of it."""

    run: str
    phase: str
    first_unix_s: float
    last_unix_s: float
    told: int


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How long it took; None where it did not come to that."""

    detect_s: float | None = None  #: from the first line to its record
    decide_s: float | None = None  #: from there to the first decision
    act_s: float | None = None  #: from there to the begin of the first run
    resolve_s: float | None = None  #: from the first line to the end of the last run that was done
    pause_s: float | None = None  #: all hand-overs of it
    stood_s: float | None = None  #: a job that stood: from the first line until it went on


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks that waited took; `usd` where a price is known."""

    gpu_h: float  #: of the pause; where the job stood, of all that time
    how: str
    usd: float | None
    usd_per_gpu_h: float | None


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A step beside the boundary: means over the ranks that told of it."""

    step: int
    side: str  #: before or after
    loss: float | None
    step_s: float | None


class Earlier(msgspec.Struct, frozen=True, kw_only=True):
    """Another incident of the same node, before this one."""

    incident: str
    kind: str
    opened_unix_s: float


class FollowUp(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the journal says is not done."""

    what: str
    command: str = ""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a plot: (seconds since 1970, value), in order."""

    name: str
    points: list[tuple[float, float]]


class Plot(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured around the event. `missing`: why there is nothing, which says nothing of the node."""

    title: str
    unit: str
    series: list[Series] = []
    left_out: int = 0  #: lines beyond those that a plot can show
    missing: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the node was at that time; "" is not known."""

    rack: str = ""
    node_class: str = ""
    driver: str = ""
    gpu_model: str = ""
    serial: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. `first_seq`, `last_seq` and `last_hash` name the records that it was made from."""

    report: int = 1  #: version of this form
    incident: Incident
    node: Facts
    summary: list[str]
    times: Times
    cost: Cost | None
    evidence: list[Evidence]
    archives: list[Archive]
    suppressed: list[Suppressed]
    decisions: list[Decision]
    choices: list[Choice]
    plans: list[Planned]
    gates: list[Gate]
    runs: list[Run]
    phases: list[Phase]
    cuts: list[Cut]
    losses: list[Loss]
    earlier: list[Earlier]
    follow_ups: list[FollowUp]
    timeline: list[Moment]
    marks: list[tuple[float, str]]  #: moments that a plot shows
    plots: list[Plot]
    unread: int  #: records of it that say something else than written
    first_seq: int
    last_seq: int
    last_hash: str
