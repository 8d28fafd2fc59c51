"""Who did what: acts of people and programs, confirmations, and every hand-over of a rank's state."""

import json
from typing import Any

import msgspec

from gridctl.history.reader import History


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; empty: all."""

    actor: str = ""
    node: str = ""
    incident: str = ""
    what: str = ""
    since_unix_s: float | None = None
    until_unix_s: float | None = None


#: A hand-over is one act: who confirmed it, where the state came from and went to, and what it was.
_ACTS = """
    SELECT seq, t_unix_s, what, coalesce(who, actor) AS who, node, NULL::VARCHAR[] AS to_nodes, incident, run,
           state, coalesce(text, reason, value) AS text, NULL::JSON AS digests, NULL::BIGINT AS state_bytes
    FROM audit
    UNION ALL BY NAME
    SELECT g.seq, g.t_unix_s, 'confirm' AS what, g.who, p.node, g.incident, g.run, NULL AS state,
           'plan ' || g.plan || ': ' || g.reason AS text
    FROM gates g LEFT JOIN plans p USING (plan)
    UNION ALL BY NAME
    SELECT coalesce(h.t_boundary_unix_s, h.started_unix_s) AS t_unix_s, 'handover' AS what,
           coalesce(g.who, h.who) AS who, h.node, h.targets AS to_nodes, h.incident, h.run,
           coalesce(h.outcome, h.state) AS state,
           concat('ranks ', array_to_string(h.ranks_moved, ' '), ' of ', h.job, ' to ',
                  array_to_string(h.targets, ' '),
                  coalesce(' (' || array_to_string(p.notes, '; ') || ')', ''))
               AS text,
           h.digests, h.state_bytes
    FROM handovers h LEFT JOIN gates g ON g.run = h.run LEFT JOIN plans p ON p.plan = h.plan
"""


def acts(history: History, wish: Wish) -> list[dict[str, Any]]:
    """The acts, the oldest first. Raises `HistoryError`."""
    names, rows = history.query(f"SELECT * FROM ({_ACTS}) ORDER BY t_unix_s, seq NULLS LAST")
    found = (dict(zip(names, row, strict=True)) for row in rows)
    return [
        {**act, "digests": json.loads(act["digests"]) if act["digests"] else None}
        for act in found
        if _wished(act, wish)
    ]


def _wished(act: dict[str, Any], wish: Wish) -> bool:
    nodes = {act["node"], *(act["to_nodes"] or [])}
    return (
        wish.actor in ("", act["who"])
        and (not wish.node or wish.node in nodes)
        and wish.incident in ("", act["incident"])
        and wish.what in ("", act["what"])
        and (wish.since_unix_s is None or act["t_unix_s"] >= wish.since_unix_s)
        and (wish.until_unix_s is None or act["t_unix_s"] < wish.until_unix_s)
    )
