"""What `views.sql` says of its views: columns, meanings and units, with the types that DuckDB gives."""

import re
from importlib.resources import files

import msgspec

from gridctl.history import VIEWS, History

_VIEW = re.compile(r"-- (\w+): (.+)")
_COLUMN = re.compile(r"--   (\w+) +(.+)")


class ViewColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column of a public view. `meaning` has the unit where the name does not."""

    view: str
    rows: str  #: what a row of the view is
    column: str
    type: str
    meaning: str


def schema(history: History) -> list[ViewColumn]:
    """Every column of every public view, in order."""
    told = meanings()
    found = []
    for view in VIEWS:
        rows, columns = told[view]
        for name, kind, *_ in history.query(f"DESCRIBE FROM {view}")[1]:
            found.append(
                ViewColumn(view=view, rows=rows, column=name, type=kind, meaning=columns.get(name, ""))
            )
    return found


def meanings() -> dict[str, tuple[str, dict[str, str]]]:
    """View -> what its rows are, and column -> its meaning and unit."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    columns: dict[str, str] = {}
    for line in (files(__package__) / "views.sql").read_text(encoding="utf-8").splitlines():
        if match := _VIEW.fullmatch(line):
            columns = {}
            found[match[1]] = (match[2], columns)
        elif match := _COLUMN.fullmatch(line):
            columns[match[1]] = match[2]
    return found
