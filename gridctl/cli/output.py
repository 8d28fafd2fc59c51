"""Data to stdout in four forms, narration to stderr. Whatever came from outside is shown, never obeyed."""

import enum
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from gridctl.cli.exits import Exit
from gridctl.visible import visible

CELL_MIN = 6
GAP = "  "
ELLIPSIS = "…"
#: The column and the fact whose word may have a colour: elsewhere "open" or "done" may mean anything.
STATE = "state"

#: Words that are worth a colour; the word itself is always there too.
_SGR = {
    "31": {"lost", "failed", "undo-failed", "unreachable", "fail", "faulty", "open", "held", "expired"},
    "33": {
        "unknown",
        "incomplete",
        "standing",
        "aborted",
        "interrupted",
        "warn",
        "frozen",
        "cordoned",
        "quarantined",
        "running",
        "suspect",
    },
    "32": {"training", "done", "finished", "ok", "parked", "warm", "ready", "healthy"},
}


class Format(enum.StrEnum):
    """Forms of output; `csv` has the table's columns, `json` and `yaml` have everything."""

    table = "table"
    json = "json"
    yaml = "yaml"
    csv = "csv"


@dataclass(frozen=True)
class Column:
    """One column of a table and of CSV: `value` takes an item, `show` makes the table's text of the value."""

    title: str
    value: Callable[[Any], Any]
    show: Callable[[Any], str] | None = None
    wraps: bool = False  #: the last column of a table may: its text goes on below instead of being cut

    @property
    def heading(self) -> str:
        """The title as a person reads it: where `show` writes the unit, the name need not."""
        name = self.title.removesuffix("_unix_s").removesuffix("_s") if self.show else self.title
        return name.replace("_", " ")

    def text(self, item: Any) -> str:
        """What a person is shown of the item, safe for a terminal."""
        value = self.value(item)
        return clean(self.show(value) if self.show else flat(value)) or "-"


def clean(text: object) -> str:
    """Text from outside, safe for a terminal: controls, direction marks and line breaks show."""
    return visible(str(text))


def cells(text: str) -> int:
    """How many columns of a terminal the text takes."""
    return sum(map(_cell, text))


def _cell(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut(text: str, room: int) -> str:
    """The text in at most `room` columns; the ellipsis says that something is missing."""
    if cells(text) <= room:
        return text
    return _head(text, room - 1) + ELLIPSIS


def _head(text: str, room: int) -> str:
    """The longest beginning of the text that takes at most `room` columns."""
    used = 0
    for count, character in enumerate(text):
        used += _cell(character)
        if used > room:
            return text[:count]
    return text


def wrap(text: str, room: int) -> list[str]:
    """The text in lines of at most `room` columns, broken between words where that is possible."""
    lines, line = [], ""
    for word in text.split(" "):
        joined = f"{line} {word}" if line else word
        if cells(joined) <= room:
            line = joined
            continue
        if line:
            lines.append(line)
        line = word
        while cells(line) > room:
            head = _head(line, room) or line[0]
            lines.append(head)
            line = line[len(head) :]
    return [*lines, line] if line or not lines else lines


def fit(widths: Sequence[int], room: int) -> list[int]:
    """Narrows the widest columns, one by one, until all fit or none is wider than `CELL_MIN`."""
    fitted = list(widths)
    while fitted and sum(fitted) + len(GAP) * (len(fitted) - 1) > room:
        widest = max(range(len(fitted)), key=fitted.__getitem__)
        if fitted[widest] <= CELL_MIN:
            break
        fitted[widest] -= 1
    return fitted


def table(columns: Sequence[Column], items: Sequence[Any], *, width: int | None, colour: bool) -> str:
    """Aligned text. `width` is the terminal's, None where nothing limits it (a pipe, a file)."""
    if not items:
        return ""
    rows = [[column.text(item) for column in columns] for item in items]
    titles = [column.heading.upper() for column in columns]
    widths = [max(map(cells, texts)) for texts in zip(titles, *rows, strict=True)]
    if width is not None:
        widths = fit(widths, width)
    numeric = [all(isinstance(c.value(item), int | float | None) for item in items) for c in columns]
    state = next((i for i, column in enumerate(columns) if column.title == STATE), None)
    lines = [_line(titles, widths, numeric, width)]
    for row in rows:
        last = wrap(row[-1], widths[-1]) if columns[-1].wraps else [row[-1]]
        line = _line([*row[:-1], last[0]], widths, numeric, width)
        lines.append(_painted_cell(line, row, widths, state) if colour and state is not None else line)
        lines += [_line([*[""] * (len(row) - 1), more], widths, numeric, width) for more in last[1:]]
    return "\n".join(lines) + "\n"


def flat(value: Any) -> Any:
    """A value as one cell: a list is separated by blanks, a table is JSON, nothing is empty."""
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return as_json(value, indent=None).strip()
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value


def _line(texts: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], width: int | None) -> str:
    parts = []
    for text, room, right in zip(texts, widths, numeric, strict=True):
        shown = cut(text, room)
        blank = " " * (room - cells(shown))
        parts.append(blank + shown if right else shown + blank)
    line = GAP.join(parts).rstrip()
    return line if width is None else cut(line, width)


def _painted_cell(line: str, row: Sequence[str], widths: Sequence[int], state: int) -> str:
    """The line with its state in colour, where all of that fits."""
    start = 0
    for text, room in zip(row[:state], widths[:state], strict=True):
        shown = cut(text, room)
        start += len(shown) + room - cells(shown) + len(GAP)
    end = start + len(row[state])
    return line[:start] + paint(row[state]) + line[end:] if line[start:end] == row[state] else line


def paint(word: str) -> str:
    """A word of state in its colour."""
    for sgr, words in _SGR.items():
        if word in words:
            return f"\x1b[{sgr}m{word}\x1b[0m"
    return word


def as_json(data: Any, *, indent: int | None = 2) -> str:
    """JSON in ASCII: what is in the data cannot act on a terminal."""
    import json

    return json.dumps(data, indent=indent, ensure_ascii=True) + "\n"


def as_yaml(data: Any) -> str:
    """YAML in ASCII, keys in their order."""
    import yaml

    text: str = yaml.safe_dump(
        data, sort_keys=False, allow_unicode=False, default_flow_style=False, width=110
    )
    return text


def as_csv(columns: Sequence[Column], items: Sequence[Any], *, header: bool = True) -> str:
    """The table's columns with their bare values; lists are separated by blanks."""
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    if header:
        writer.writerow([column.title for column in columns])
    writer.writerows([[_inert(clean(flat(column.value(item)))) for column in columns] for item in items])
    return out.getvalue()


def _inert(text: str) -> str:
    """The text so that a spreadsheet takes it for no formula (OWASP, CSV injection); a number stays one."""
    if not text.startswith(("=", "+", "-", "@")):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def emit(text: str) -> None:
    """Writes data to stdout, at once. A reader that went away ends the program quietly."""
    _write(sys.stdout, text)


def say(text: str) -> None:
    """Narrates on stderr; nothing that is said there is data.

    A full disk below it costs the words and nothing else: how the command ends says what was done.
    """
    try:
        _write(sys.stderr, clean(text) + "\n")
    except OSError:
        _silence(sys.stderr)


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(encodable(text, stream.encoding or "utf-8"))
        stream.flush()
    except BrokenPipeError:
        _silence(stream)
        raise SystemExit(Exit.BROKEN_PIPE) from None


def _silence(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the interpreter flushes once more


def encodable(text: str, encoding: str) -> str:
    """The text in what a terminal of this encoding can show; the rest is shown as its code."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace(ELLIPSIS, "~").encode(encoding, "backslashreplace").decode(encoding)
    return text


def open_streams() -> None:
    """A standard stream that was closed leads nowhere, before a socket or a file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def terminal_width() -> int | None:
    """Columns of the terminal behind stdout; None if there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def in_colour() -> bool:
    """Only on a terminal, and never against NO_COLOR (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
