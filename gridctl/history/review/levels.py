"""Service levels of a time, as `gridctl ask slo` answers."""

from pathlib import Path

from gridctl.history import History
from gridctl.history.ask import Asked, compose, questions
from gridctl.history.review.facts import Target
from gridctl.model.policy import Policy

_LIMITS = {"recover": "{:g} s", "pause": "{:g} ms"}


def levels(
    history: History, policy: Policy, site: Path, from_unix_s: float, until_unix_s: float
) -> list[Target]:
    """What was promised, what came of it, what is left of each error budget. Raises `HistoryError`."""
    asked = Asked(since_unix_s=from_unix_s, until_unix_s=until_unix_s)
    names, rows = history.query(compose(history, questions(site)["slo"], asked, policy))
    found = (dict(zip(names, row, strict=True)) for row in rows)
    return [
        Target(
            name=row["objective"],
            target=f"{row['target']:.1%}" + _within(row["objective"], row["limit"]),
            was=f"{row['good']} of {row['events']}" if row["events"] else "nothing that counts",
            budget_left="not known" if row["budget_left"] is None else f"{row['budget_left']:.0%}",
        )
        for row in found
    ]


def _within(objective: str, limit: float | None) -> str:
    return "" if limit is None else f" within {_LIMITS.get(objective, '{:g}').format(limit)}"
