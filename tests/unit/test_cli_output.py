"""Output: what came from outside cannot act on a terminal, tables fit it, scripts find every member."""

import csv
import io
import json
import unicodedata

import msgspec
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gridctl.cli.output import (
    CELL_MIN,
    GAP,
    Column,
    as_csv,
    as_json,
    as_yaml,
    cells,
    clean,
    cut,
    encodable,
    fit,
    table,
    wrap,
)
from gridctl.cli.page import Page, duration, full, listing, size

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n\u202egnp.exe[/red]\x9b31m{}%s"
COLUMNS = (Column("name", lambda item: item[0]), Column("n", lambda item: item[1]))


def acts_on_a_terminal(text: str) -> set[str]:
    return {c for c in text if c not in " \n" and unicodedata.category(c)[0] in "CZ"}


@given(TEXT)
def test_clean_text_has_nothing_that_acts(text: str) -> None:
    assert acts_on_a_terminal(clean(text)) == set()
    assert "\n" not in clean(text)


def test_clean_shows_what_was_there() -> None:
    assert clean(HOSTILE) == r"\x1b]0;owned\x07\x1b[2J\x0d\x0a\u202egnp.exe[/red]\x9b31m{}%s"
    assert clean("rück naïve 節點") == "rück naïve 節點"


@given(st.lists(st.tuples(TEXT, st.integers()), min_size=1, max_size=5), st.booleans())
def test_every_form_is_inert_and_the_data_survives(items: list[tuple[str, int]], colour: bool) -> None:
    data = [{"name": name, "n": n} for name, n in items]
    assert json.loads(as_json(data)) == data
    assert yaml.safe_load(as_yaml(data)) == data
    rows = list(csv.reader(io.StringIO(as_csv(COLUMNS, items))))
    shown = [[name.removeprefix("'"), n] for name, n in rows]  # a guard: see below
    assert shown == [["name", "n"], *([clean(name).removeprefix("'"), str(n)] for name, n in items)]
    for text in (as_json(data), as_yaml(data), as_csv(COLUMNS, items)):
        assert acts_on_a_terminal(text) == set()


@given(TEXT, st.integers(1, 50))
def test_cut_text_fits(text: str, room: int) -> None:
    short = cut(text, room)
    assert cells(short) <= room
    assert short == text or short.endswith("…")


def fit_slowly(widths: list[int], room: int) -> list[int]:
    """The slow twin: lowers one common ceiling; the leftmost of the widest give way first."""
    for ceiling in range(max(widths, default=0), CELL_MIN - 1, -1):
        capped = [min(width, max(ceiling, CELL_MIN)) for width in widths]
        spare = room - sum(capped) - len(GAP) * (len(widths) - 1)
        if spare >= 0:
            for i in reversed(range(len(widths))):
                if widths[i] > capped[i] and spare:
                    capped[i] += 1
                    spare -= 1
            return capped
    return [min(width, CELL_MIN) for width in widths]


@given(st.lists(st.integers(1, 60), max_size=6), st.integers(0, 200))
def test_fit_agrees_with_its_slow_twin(widths: list[int], room: int) -> None:
    assert fit(widths, room) == fit_slowly(widths, room)


@given(st.lists(st.tuples(TEXT, st.integers()), max_size=5), st.integers(1, 120))
def test_a_table_is_never_wider_than_the_terminal(items: list[tuple[str, int]], width: int) -> None:
    text = table(COLUMNS, items, width=width, colour=False)
    assert all(cells(line) <= width for line in text.splitlines())
    assert len(text.split("\n")) == (len(items) + 2 if items else 1)


@given(TEXT, st.integers(2, 60))
def test_wrapped_text_fits_and_nothing_is_lost(text: str, room: int) -> None:
    lines = wrap(clean(text), room)
    assert all(cells(line) <= room for line in lines)
    assert "".join(lines).replace(" ", "") == clean(text).replace(" ", "")
    assert lines


@given(st.lists(st.tuples(st.integers(0, 10**9), TEXT), min_size=1, max_size=4), st.integers(30, 120))
def test_the_last_column_may_go_on_below(items: list[tuple[int, str]], width: int) -> None:
    columns = (Column("n", lambda item: item[0]), Column("text", lambda item: item[1], wraps=True))
    text = table(columns, items, width=width, colour=False)
    assert all(cells(line) <= width for line in text.splitlines())
    shown = "".join(text.split())
    assert shown == "".join(["N", "TEXT", *(f"{n}{clean(what) or '-'}" for n, what in items)]).replace(
        " ", ""
    )


def test_a_terminal_of_another_encoding_gets_what_it_can_show() -> None:
    assert encodable("cut…", "utf-8") == "cut…"
    assert encodable("cut…", "ascii") == "cut~"
    assert encodable("節點 ü", "latin-1") == "\\u7bc0\\u9ede ü"


def test_a_table_aligns_numbers_to_the_right_and_counts_wide_characters() -> None:
    text = table(COLUMNS, [("節點", 7), ("node-b", 12345)], width=None, colour=False)
    assert text == "NAME        N\n節點        7\nnode-b  12345\n"


def test_colour_is_a_word_s_and_never_the_only_sign() -> None:
    items = [("open", "lost"), ("done", "training")]
    columns = (COLUMNS[0], Column("state", lambda item: item[1]))
    plain = table(columns, items, width=40, colour=False)
    painted = table(columns, items, width=40, colour=True)
    assert painted.count("\x1b[0m") == 2, "a name is no state, whatever it is called"
    assert "\x1b[31mlost\x1b[0m" in painted
    assert "\x1b[32mtraining\x1b[0m" in painted
    assert painted.replace("\x1b[31m", "").replace("\x1b[32m", "").replace("\x1b[0m", "") == plain


class Thing(msgspec.Struct, omit_defaults=True):
    """A struct that a wire would send without its defaults."""

    name: str
    inner: list["Thing"] = []
    note: str = ""


def test_scripts_find_every_member_also_defaults() -> None:
    page = listing([Thing("a", [Thing("b")])], (), "nothing")
    inner = {"name": "b", "inner": [], "note": ""}
    assert page.data == [{"name": "a", "inner": [inner], "note": ""}]
    assert full({"x": (1, 2.5, None)}) == {"x": [1, 2.5, None]}


def test_a_page_shows_facts_then_tables() -> None:
    below = Page(data=None, columns=COLUMNS, items=[("z", 1)], title="More")
    page = Page(
        data=None, columns=COLUMNS, items=[("a", 1)], facts=[("id", "x\n"), ("gone", "")], below=[below]
    )
    assert page.text(None, False) == "id:   x\\x0a\n\nNAME  N\na     1\n\nMore\nNAME  N\nz     1\n"


def test_durations_and_sizes_are_readable() -> None:
    assert [duration(s) for s in (-1, 0.25, 59.6, 119, 120, 7199, 7200, 172800)] == [
        "0.0 s",
        "0.2 s",
        "60 s",
        "119 s",
        "2 m 00 s",
        "119 m 59 s",
        "2 h 00 m",
        "2 d 00 h",
    ]
    assert [size(n) for n in (0, 999, 1000, 62_500_000, 10**16)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "62.5 MB",
        "10000.0 TB",
    ]


def test_no_cell_of_csv_is_a_formula() -> None:
    hostile = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "--", "-", "- -1"]
    sound = ["-1.5", "+3", "-1e9", "-inf", "n-1", "", "1=1", "'=x"]
    rows = csv.reader(io.StringIO(as_csv(COLUMNS, [(text, -1) for text in (*hostile, *sound)], header=False)))
    assert [row[0] for row in rows] == [f"'{text}" for text in hostile] + sound


@given(TEXT, st.integers() | st.floats(allow_nan=False))
def test_a_csv_cell_is_guarded_only_where_it_must_be(text: str, number: float) -> None:
    ((cell, n),) = csv.reader(io.StringIO(as_csv(COLUMNS, [(text, number)], header=False)))
    assert cell.removeprefix("'" if cell != clean(text) else "") == clean(text)
    assert n == str(number)
