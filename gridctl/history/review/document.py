"""A review as sections of plain blocks, which Markdown and HTML are written from. Pure."""

import datetime

from gridctl.history.report.document import Block, Clock, Document, Items, Section, Table, Text
from gridctl.history.review.facts import Review

_ROWS_MAX = 20


def document(review: Review, zone: datetime.tzinfo | None) -> Document:
    """Equal reviews give equal documents, in one time zone."""
    clock = Clock(zone)
    sections = [
        Section("In short", [Items([(line, "") for line in _summary(review, clock)])]),
        Section("Service levels and error budget", _targets(review)),
        Section("Incidents that were opened, by kind", _kinds(review)),
        Section("Still open", _open(review, clock)),
        Section("Risk movers", _movers(review)),
        Section("Spares", _spares(review)),
        Section("Nodes with repeated faults", _repeats(review)),
        Section("Where people decided otherwise", _overrides(review, clock)),
    ]
    return Document(f"Review of week {review.week}", sections)


def _summary(review: Review, clock: Clock) -> list[str]:
    moves = review.moves
    pause = (
        ""
        if moves.pause_ms_median is None
        else (f"; pauses: median {moves.pause_ms_median:.0f} ms, longest {moves.pause_ms_max:.0f} ms")
    )
    said = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in review.verdicts.items())
    lines = [
        f"from {clock.one(review.from_unix_s)} to {clock.one(review.until_unix_s)}",
        f"incidents: {review.opened} opened, {review.closed} closed" + (f" ({said})" if said else ""),
        f"faults of nodes: {review.faults}",
        f"hand-overs: {moves.committed} committed, {moves.turned_back} turned back or not reached,"
        f" {moves.by_policy} begun without a person{pause}; steps lost: {moves.steps_lost}",
    ]
    return ["the week is not over: figures are up to now", *lines] if review.unended else lines


def _table(heads: list[str], rows: list[list[str]], none: str) -> list[Block]:
    if not rows:
        return [Text(none)]
    more: list[Block] = [Text(f"... and {len(rows) - _ROWS_MAX} more")] if len(rows) > _ROWS_MAX else []
    return [Table(heads, rows[:_ROWS_MAX]), *more]


def _targets(review: Review) -> list[Block]:
    rows = [[one.name, one.target, one.was, one.budget_left] for one in review.targets]
    return _table(["objective", "target", "was", "budget left"], rows, "no figures of this week are kept")


def _kinds(review: Review) -> list[Block]:
    return _table(["kind", "incidents"], [[kind, str(n)] for kind, n in review.kinds], "none")


def _open(review: Review, clock: Clock) -> list[Block]:
    rows = [
        [one.incident, one.kind, one.node, clock.one(one.opened_unix_s), "yes" if one.acked else "no"]
        for one in review.left_open
    ]
    return _table(["incident", "kind", "node", "since", "acknowledged"], rows, "none")


def _movers(review: Review) -> list[Block]:
    rows = [[one.node, str(one.before), str(one.after), "; ".join(one.why[:3])] for one in review.movers]
    return _table(["node", "index before", "index now", "because of"], rows, "no index has changed")


def _spares(review: Review) -> list[Block]:
    spares = review.spares
    if spares.nodes_at_end is None:
        known = "how many waited is not known: the history has no facts of nodes from that time"
        return [Text(f"{known}. Taken within the week: {spares.taken}")]
    return [
        Text(
            f"nodes with a spare: {spares.nodes_at_end} at the end, {spares.nodes_least} at the fewest;"
            f" taken within the week: {spares.taken}"
        )
    ]


def _repeats(review: Review) -> list[Block]:
    rows = [[one.node, str(one.in_week), str(one.faults), ", ".join(one.kinds)] for one in review.repeats]
    return _table(["node", "faults in the week", "in 30 days", "kinds"], rows, "none")


def _overrides(review: Review, clock: Clock) -> list[Block]:
    rows = [[clock.one(one.t_unix_s), one.incident, one.node, one.what] for one in review.overrides]
    return _table(["when", "incident", "node", "what"], rows, "never, as far as the journal says")
