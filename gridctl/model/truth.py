"""What really happened in a recording: the truth file beside it, `NAME.truth.json`."""

import msgspec


class Fault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault. `t` is its begin, `decisive_t` when a perfect watchdog could have known of it."""

    t: float
    node: str
    device: str
    kind: str
    fault: str
    preempt_job: bool
    decisive_t: float
    also: list[str] = []  #: other kinds that are right, too
    nodes: list[str] = []  #: one fault of many nodes
    pci: str = ""
    preempt_from: float | None = None  #: the earliest defensible preemption
    any_kind: bool = False  #: any preemption counts as having found it
    group_cap: bool = False
    until_t: float | None = None  #: when it was repaired; nothing: it lasts
    signal: str = ""  #: "streamed" (a line tells of it) or "polled" (values, silence)
    cause: str = ""  #: the class of the simulator that made it
    note: str = ""

    def members(self) -> list[str]:
        """The nodes that it concerns."""
        return self.nodes or [self.node]


class Counts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is to be expected of a recording as a whole; nothing: not said."""

    incidents: int | None = None
    evictions: int | None = None
    incidents_max: int | None = None
    evictions_max: int | None = None


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Something that must move nobody: which class, where and when."""

    t: float
    node: str
    cause: str


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a truth file. Members that are not known here are ignored."""

    faults: list[Fault] = []
    must_not_preempt: list[str] = []
    counts: Counts = Counts()
    noise: list[Noise] = []
