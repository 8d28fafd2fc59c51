"""Weeks as people count them: ISO 8601, in UTC."""

import datetime
import re

WEEK_S = 7 * 86400.0


def week(text: str, now_unix_s: float) -> tuple[str, float, float]:
    """The name, begin and end of "2026-W48", of "last" or of "this" week. Raises `ValueError`."""
    if text in ("this", "last"):
        at_unix_s = now_unix_s - (WEEK_S if text == "last" else 0.0)
        year, number, _ = datetime.datetime.fromtimestamp(at_unix_s, datetime.UTC).isocalendar()
    elif match := re.fullmatch(r"(\d{4})-?W(\d{1,2})", text):
        year, number = int(match[1]), int(match[2])
    else:
        raise ValueError(f"{text!r} is no week: 2026-W48, last or this")
    begin = datetime.datetime.fromisocalendar(year, number, 1).replace(tzinfo=datetime.UTC)
    return f"{year}-W{number:02d}", begin.timestamp(), begin.timestamp() + WEEK_S
