"""What a review says. Times are seconds since 1970 UTC."""

import msgspec


class Mover(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose risk index is another one at the end of the week."""

    node: str
    before: int  #: 0 to 100, when the week began
    after: int
    why: list[str]  #: the parts of the index that changed it, the weightiest first


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """A person decided otherwise than gridctl."""

    t_unix_s: float
    incident: str
    node: str
    what: str


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """A node that had more than one fault within 30 days before the week's end."""

    node: str
    faults: int
    in_week: int
    kinds: list[str]


class Spares(msgspec.Struct, frozen=True, kw_only=True):
    """Processes that waited for a rank; None where the history has no facts of nodes."""

    nodes_at_end: int | None
    nodes_least: int | None  #: at any time within the week
    taken: int


class Moves(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-overs that began within the week."""

    committed: int
    turned_back: int
    by_policy: int
    pause_ms_median: float | None
    pause_ms_max: float | None
    steps_lost: int


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """An incident that is open at the end of the week."""

    incident: str
    kind: str
    node: str
    opened_unix_s: float
    acked: bool


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A service level: what was promised, what came of it, and how much of the error budget is left."""

    name: str
    target: str
    was: str
    budget_left: str


class Review(msgspec.Struct, frozen=True, kw_only=True):
    """A week, from Monday 00:00 UTC to the next."""

    week: str  #: 2026-W48
    from_unix_s: float
    until_unix_s: float
    unended: bool  #: the week is not over yet
    opened: int  #: incidents
    closed: int
    verdicts: dict[str, int]  #: what people said of those that were closed; "unmarked": nothing
    kinds: list[tuple[str, int]]  #: of incidents that were opened, the most frequent first
    faults: int
    moves: Moves
    targets: list[Target]
    movers: list[Mover]
    spares: Spares
    repeats: list[Repeat]
    overrides: list[Override]
    left_open: list[Open]
