"""What a review is made of, asked of the history."""

import json
from typing import Any

from gridctl.history import History
from gridctl.history.review.facts import Moves, Open, Override, Repeat, Review, Spares, Target
from gridctl.history.review.movers import Entry, movers

_MONTH_S = 30 * 86400.0
#: Who confirms what a site has armed.
_POLICY = "policy"
_MOVING = ("swap_now", "evacuate_device", "swap_in_window")

Row = dict[str, Any]


def read(
    history: History,
    name: str,
    from_unix_s: float,
    until_unix_s: float,
    now_unix_s: float,
    targets: list[Target],
) -> Review:
    """A week's review. Raises `HistoryError`."""
    asked = _Asked(history, from_unix_s, min(until_unix_s, now_unix_s))
    return Review(
        week=name,
        from_unix_s=from_unix_s,
        until_unix_s=until_unix_s,
        unended=now_unix_s < until_unix_s,
        opened=asked.number("SELECT count(*) FROM incidents WHERE {opened_unix_s}"),
        closed=asked.number("SELECT count(*) FROM incidents WHERE {closed_unix_s}"),
        verdicts=asked.verdicts(),
        kinds=[(row["kind"], row["n"]) for row in asked.rows(_KINDS)],
        faults=asked.number("SELECT count(*) FROM faults WHERE {t_unix_s}"),
        moves=asked.moves(),
        targets=targets,
        movers=movers(asked.entries(), from_unix_s, asked.end),
        spares=asked.spares(),
        repeats=asked.repeats(),
        overrides=sorted(asked.overrides(), key=lambda one: (one.t_unix_s, one.incident)),
        left_open=[_left(row) for row in asked.rows(_OPEN)],
    )


def _left(row: Row) -> Open:
    return Open(
        incident=row["incident"],
        kind=row["kind"],
        node=row["node"] or "",
        opened_unix_s=row["opened_unix_s"],
        acked=row["acked_unix_s"] is not None,
    )


_KINDS = "SELECT kind, count(*) AS n FROM incidents WHERE {opened_unix_s} GROUP BY kind ORDER BY n DESC, kind"
_OPEN = """
    SELECT incident, kind, node, opened_unix_s, acked_unix_s FROM incidents
    WHERE opened_unix_s < {end} AND (closed_unix_s IS NULL OR closed_unix_s >= {end})
    ORDER BY opened_unix_s, incident
"""
_MOVES = """
    SELECT count(*) FILTER (outcome = 'commit')                              AS committed,
           count(*) FILTER (outcome IS DISTINCT FROM 'commit' AND ended_unix_s IS NOT NULL) AS turned_back,
           count(*) FILTER (h.who = '{policy}')                              AS by_policy,
           median(pause_ms) FILTER (outcome = 'commit')                      AS pause_ms_median,
           max(pause_ms) FILTER (outcome = 'commit')                         AS pause_ms_max,
           coalesce(sum(p.steps_lost) FILTER (outcome = 'commit'), 0)        AS steps_lost
    FROM handovers h JOIN plans p USING (plan)
    WHERE {started_unix_s}
"""
_REPEATS = """
    SELECT node, count(*) AS faults, count(*) FILTER ({t_unix_s}) AS in_week,
           list(DISTINCT kind ORDER BY kind) AS kinds
    FROM faults
    WHERE t_unix_s >= {month} AND t_unix_s < {end}
    GROUP BY node
    HAVING count(*) > 1 AND count(*) FILTER ({t_unix_s}) > 0
    ORDER BY faults DESC, node
"""
#: The last word of the assessor on an incident before anything was done about it.
_CHOSEN = """
    WITH chosen AS (
        SELECT incident, arg_max(action, seq) AS action, max(t_unix_s) AS t_unix_s
        FROM decisions WHERE type = 'choice' AND {t_unix_s} GROUP BY incident
    ), moved AS (
        SELECT incident, min(started_unix_s) AS t_unix_s, arg_min(who, started_unix_s) AS who
        FROM handovers GROUP BY incident
    )
    SELECT i.incident, i.node, i.state, i.closed_unix_s, c.action, c.t_unix_s AS chosen_unix_s,
           m.t_unix_s AS moved_unix_s, m.who
    FROM incidents i JOIN chosen c USING (incident) LEFT JOIN moved m USING (incident)
"""
_TURNED = """
    SELECT a.t_unix_s, a.incident, coalesce(a.node, r.node) AS node, a.what, a.who, a.reason
    FROM audit a LEFT JOIN runs r USING (run)
    WHERE a.what IN ('aborted', 'rolled-back', 'rollback') AND a.who <> '{policy}' AND {a.t_unix_s}
"""
_FALSE = """
    SELECT closed_unix_s AS t_unix_s, incident, node, verdict_by FROM incidents
    WHERE verdict = 'false_alarm' AND {closed_unix_s} AND decisions > 0
"""


class _Asked:
    def __init__(self, history: History, begin: float, end: float) -> None:
        self._history = history
        self._begin = begin
        self.end = end

    def rows(self, sql: str) -> list[Row]:
        """Rows by their columns. {end}, {month}, {policy} stand for values, {COLUMN}: it is in the week."""
        values = {"end": repr(self.end), "month": repr(self.end - _MONTH_S), "policy": _POLICY}
        columns = ("t_unix_s", "a.t_unix_s", "opened_unix_s", "closed_unix_s", "started_unix_s")
        for name in columns:
            values[name] = f"({name} >= {self._begin!r} AND {name} < {self.end!r})"
        for name, text in values.items():
            sql = sql.replace("{" + name + "}", text)
        names, found = self._history.query(sql)
        return [dict(zip(names, row, strict=True)) for row in found]

    def number(self, sql: str) -> int:
        return int(next(iter(self.rows(sql)[0].values())) or 0)

    def verdicts(self) -> dict[str, int]:
        said = "coalesce(verdict, 'unmarked') AS verdict"
        sql = f"SELECT {said}, count(*) AS n FROM incidents WHERE {{closed_unix_s}} GROUP BY 1 ORDER BY 1"
        return {row["verdict"]: row["n"] for row in self.rows(sql)}

    def moves(self) -> Moves:
        (row,) = self.rows(_MOVES)
        return Moves(**{**row, "steps_lost": int(row["steps_lost"])})

    def repeats(self) -> list[Repeat]:
        return [Repeat(**row) for row in self.rows(_REPEATS)]

    def spares(self) -> Spares:
        waited = self.rows(
            "SELECT node, from_unix_s, until_unix_s, taken_by FROM spares WHERE from_unix_s < {end}"
        )
        known = self.number("SELECT count(*) FROM node_spans WHERE spare IS NOT NULL AND from_unix_s < {end}")
        moments = [self._begin, *(row["until_unix_s"] for row in waited if row["until_unix_s"] is not None)]
        counts = [_waiting(waited, t) for t in moments if self._begin <= t < self.end]
        taken = self.number(
            "SELECT count(*) FROM (SELECT unnest(list_distinct(targets)) FROM handovers"
            " WHERE outcome = 'commit' AND {started_unix_s})"
        )
        return Spares(
            nodes_at_end=_waiting(waited, self.end) if known else None,
            nodes_least=min([*counts, _waiting(waited, self.end)]) if known else None,
            taken=taken,
        )

    def overrides(self) -> list[Override]:
        found = [
            _override(
                row, f"{row['who']} turned a run back ({row['what']}): {row['reason'] or 'no reason given'}"
            )
            for row in self.rows(_TURNED)
        ]
        for row in self.rows(_FALSE):
            by = row["verdict_by"] or "somebody"
            found.append(_override(row, f"{by} says that it was a false alarm, and a decision had been made"))
        for row in self.rows(_CHOSEN):
            if row["moved_unix_s"] is None and row["action"] in _MOVING and row["closed_unix_s"] is not None:
                text = f"gridctl would have it: {row['action']}; the incident was closed without a hand-over"
                found.append(_override({**row, "t_unix_s": row["closed_unix_s"]}, text))
            elif row["moved_unix_s"] is not None and row["action"] not in _MOVING and row["who"] != _POLICY:
                text = f"gridctl would have it: {row['action']}; {row['who']} moved the ranks"
                found.append(_override({**row, "t_unix_s": row["moved_unix_s"]}, text))
        return found

    def entries(self) -> list[Entry]:
        """Findings, decisions and opened nodes up to the end, in order."""
        sql = """
            SELECT kind, data, t_unix_s FROM events
            WHERE (kind IN ('finding', 'decision') OR (kind = 'audit' AND data ->> '$.what' = 'uncordon'))
              AND t_unix_s < {end}
            ORDER BY seq
        """
        return [
            Entry(t_unix_s=row["t_unix_s"], kind=row["kind"], data=json.loads(row["data"]))
            for row in self.rows(sql)
        ]


def _waiting(waited: list[Row], t: float) -> int:
    return sum(
        row["from_unix_s"] <= t and (row["until_unix_s"] is None or t < row["until_unix_s"]) for row in waited
    )


def _override(row: Row, what: str) -> Override:
    return Override(
        t_unix_s=row["t_unix_s"], incident=row["incident"] or "", node=row["node"] or "", what=what
    )
