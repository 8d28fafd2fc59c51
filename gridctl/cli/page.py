"""What a reading command prints: a value in full, and the flat rows of its table and CSV."""

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from gridctl.cli.output import (
    STATE,
    Column,
    Format,
    as_csv,
    as_json,
    as_yaml,
    clean,
    emit,
    in_colour,
    paint,
    say,
    table,
    terminal_width,
)

T = TypeVar("T")

WATCH_S = 1.0

Output = Annotated[Format, typer.Option("-o", "--output", help="Form of the output.", show_default=True)]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Print again whenever it changes, until Ctrl-C.")]


@dataclass(frozen=True)
class Page:
    """`data` is the whole value. `columns` and `items` make table and CSV; `facts` stand above."""

    data: Any
    columns: Sequence[Column]
    items: Sequence[Any]
    facts: Sequence[tuple[str, object]] = ()
    below: Sequence["Page"] = field(default=())  #: further tables, not part of CSV
    title: str = ""  #: above the table
    upright: bool = False  #: one item, shown as one line a column
    shown: Sequence[Column] = ()  #: the table's columns, where CSV has others
    empty: str = ""  #: said on stderr where a table has no rows

    def text(self, width: int | None, colour: bool) -> str:
        """The page as a person reads it."""
        if self.upright:
            columns = self.shown or self.columns
            return _facts([(c.heading, c.text(self.items[0])) for c in columns], colour)
        rows = table(self.shown or self.columns, self.items, width=width, colour=colour)
        if rows and self.title:
            rows = f"{clean(self.title)}\n{rows}"
        texts = [_facts(self.facts, colour), rows, *(page.text(width, colour) for page in self.below)]
        return "\n".join(text for text in texts if text)


def _facts(facts: Sequence[tuple[str, object]], colour: bool) -> str:
    room = max((len(name) for name, _ in facts), default=0) + 2
    shown = [(name, clean(value)) for name, value in facts if value not in ("", None)]
    if colour:
        shown = [(name, paint(text) if name == STATE else text) for name, text in shown]
    return "".join(f"{name and name + ':':<{room}}{text}\n" for name, text in shown)


def full(value: Any) -> Any:
    """A struct as builtins with every member, defaults too: scripts find a fixed shape."""
    if isinstance(value, msgspec.Struct):
        return {name: full(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {str(key): full(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [full(item) for item in value]
    return msgspec.to_builtins(value)


def listing(items: Iterable[Any], columns: Sequence[Column], empty: str) -> Page:
    """A page of like things."""
    kept = list(items)
    return Page(data=[full(item) for item in kept], columns=columns, items=kept, empty=empty)


def present(page: Page, form: Format, *, again: bool = False) -> None:
    """Prints a page once. `again` is the form under --watch: JSON in one line, YAML as one more document."""
    if form is Format.json:
        emit(as_json(page.data, indent=None if again else 2))
    elif form is Format.yaml:
        emit(("---\n" if again else "") + as_yaml(page.data))
    elif form is Format.csv:
        emit(as_csv(page.columns, page.items))
    else:
        emit(page.text(terminal_width(), in_colour()))
        if not page.items and page.empty:
            say(page.empty)


def tell(page: Page) -> None:
    """Shows a page on stderr, to somebody who is about to decide."""
    for line in page.text(None, False).splitlines():
        say(line)


def read(fetch: Callable[[], T], page: Callable[[T], Page], form: Format, watch: bool = False) -> T:
    """Fetches and prints; under `watch` for ever, whenever what would be printed has changed."""
    value = fetch()
    if not watch:
        present(page(value), form)
        return value
    redraw = form is Format.table and sys.stdout.isatty()
    last: Any = None
    while True:
        shown = page(value)
        if shown.data != last:
            last = shown.data
            emit("\x1b[H\x1b[2J" if redraw else "")
            present(shown, form, again=True)
        time.sleep(WATCH_S)
        value = fetch()


def duration(seconds: float) -> str:
    """A length of time in the two largest units that matter."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 172800:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def age(t_unix_s: float) -> str:
    """How long ago, by this machine's clock."""
    return duration(time.time() - t_unix_s) if t_unix_s else "-"


def local(t_unix_s: float) -> str:
    """A moment in local time with its zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(t_unix_s)) if t_unix_s else "-"


def size(count: int) -> str:
    """Bytes for a person."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
