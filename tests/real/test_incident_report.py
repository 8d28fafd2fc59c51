"""A postmortem out of a journal's files."""

import contextlib
import copy
import json
import random
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
from incident_story import HOSTILE, INCIDENT, NOW, STORY, UNCORDON, write

from gridagent.journal import Journal
from gridctl.errors import Refused
from gridctl.history import History
from gridctl.history.report import markdown, page
from gridctl.history.report.compare import compare
from gridctl.history.report.derive import report
from gridctl.history.report.document import document
from gridctl.history.report.excerpt import excerpt
from gridctl.history.report.facts import Report
from gridctl.history.report.plots import NOT_KEPT
from gridctl.history.report.source import Source, read

ZONE = ZoneInfo("Europe/Zurich")
GOLDEN = Path(__file__).parent / "data" / "incident-report.md"
VOID = {"meta", "br", "img", "link", "input"}


@pytest.fixture
def source(tmp_path: Path) -> Source:
    write(tmp_path)
    return read(History(tmp_path), INCIDENT)


def measured(source: Source) -> Source:
    """The same with telemetry."""
    samples = [
        {"device": f"gpu:{gpu}", "metric": metric, "t": NOW - 300 + t, "value": value + gpu + t / 100}
        for gpu in range(8)
        for metric, value in (("temp_c", 50.0), ("ecc_dbe_total", 0.0))
        for t in range(0, 600, 10)
    ]
    progress = [
        {"rank": rank, "t": NOW - 100.0 + t, "loss": 3.0 - t / 100, "step_s": 0.1 + rank / 100}
        for rank in range(3)
        for t in range(200)
        if not 110 < t < 140
    ]
    progress.append({"rank": 3, "t": NOW, "loss": None, "step_s": float("nan")})
    boundary = [{"step": step, "loss": 2.0 - step / 100, "step_s": 0.1} for step in range(55, 65)]
    return msgspec.structs.replace(source, samples=samples, progress=progress, boundary=boundary, blind={})


def written(source: Source) -> tuple[str, str]:
    made = document(report(source), ZONE)
    return markdown.write(made), page.write(made)


def test_the_whole_report_of_a_made_up_incident(source: Source) -> None:
    """After a change that is meant: write the text to the file, and read it."""
    assert written(source)[0] == GOLDEN.read_text(encoding="utf-8")


def test_the_same_journal_gives_the_same_bytes(source: Source, tmp_path: Path) -> None:
    write(tmp_path / "again")
    other = read(History(tmp_path / "again"), INCIDENT)
    assert written(measured(source)) == written(measured(other))
    assert msgspec.json.encode(report(source)) == msgspec.json.encode(report(other))
    with Journal(tmp_path / "again") as log:
        log.append("note", "ctl", {"text": "of something else"})
    assert written(read(History(tmp_path / "again"), INCIDENT)) == written(source)


class Page(HTMLParser):
    """Checks that every tag is closed in its turn, and keeps what refers to anything."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on"), f"{tag} {name}"
            if name in ("src", "href", "xlink:href", "data", "action", "srcset", "style"):
                self.references.append((tag, str(value)))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("kept", [False, True])
def test_the_page_is_well_formed_and_needs_nothing_from_outside(source: Source, kept: bool) -> None:
    text = written(measured(source) if kept else source)[1]
    found = Page(text)
    assert found.references == [("a", "https://tickets.example/1?a=b&c=d")], "only what a person linked"
    assert not found.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "font"}
    style = text[text.index("<style>") : text.index("</style>")]
    assert not re.search(r"url\(|@import|@font-face|https?:", style)
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    assert "default-src 'none'" in text
    assert text.count('<svg viewBox="0 0 760') == (4 if kept else 0)
    assert text.count(NOT_KEPT) == (0 if kept else 5)


def test_a_plot_has_lines_marks_and_gaps_and_says_what_it_leaves_out(source: Source) -> None:
    made = report(measured(source))
    loss, step_s, temperature, errors = made.plots
    assert [line.name for line in loss.series] == ["rank 0", "rank 1", "rank 2"], "no value, no line"
    assert (len(temperature.series), temperature.left_out) == (8, 0)
    assert (len(errors.series), step_s.missing) == (8, "")
    assert [name for _, name in made.marks] == ["opened", "hand-over", "closed"]
    drawn = page.write(document(made, ZONE))
    first = drawn[drawn.index('<path class="s0" d="M') :].split("</path>")[0]
    assert first.count("M") == 2, "where nothing was measured the line is broken"
    assert "hand-over</text>" in drawn
    assert [(its.step, its.side) for its in made.losses][4:6] == [(59, "before"), (60, "after")]


def test_hostile_text_acts_nowhere(source: Source) -> None:
    text, shown = written(source)
    for made in (text, shown):
        assert not set(made) & set("\x1b\r\u202e")
    assert "<script" not in shown
    assert "<img" not in shown
    assert "javascript:alert(1)" in Page(shown).text
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<(?!https://)", outside), "no markup of HTML outside of code"
    assert len(re.findall(r"^# ", outside, re.MULTILINE)) == 1
    rows = [line for line in outside.splitlines() if line.startswith("| 20")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) in (5, 6, 7, 8) for row in rows)


def test_what_is_open_is_said_until_it_is_done(source: Source, tmp_path: Path) -> None:
    open_ones = [found.what for found in report(source).follow_ups]
    assert open_ones == [
        "n2 is cordoned since run r-55ee66ff, and nobody has confirmed its repair",
        "nobody has said yet what it was",
    ]
    verdict = {**STORY[3][2], "state": "closed", "who": "ann", "reason": "it was", "verdict": "true_fault"}
    write(tmp_path / "later", (90000.0, "audit", UNCORDON), (90001.0, "incident", verdict))
    later = report(read(History(tmp_path / "later"), INCIDENT))
    assert later.follow_ups == []
    assert later.incident.verdict == "true_fault"
    assert later.incident.closed_unix_s == NOW + 21.7


def test_an_open_one_without_evidence_or_run(tmp_path: Path) -> None:
    write(tmp_path)
    cut = [entry for entry in STORY if entry[1] not in ("audit", "run", "step", "gate", "note")]
    opened = [entry for entry in cut if entry[2].get("state") != "closed"]
    folder = tmp_path / "open"
    with Journal(folder, lambda: NOW) as log:
        for _, kind, data in opened:
            log.append(kind, "ctl", data)
    made = report(read(History(folder), INCIDENT))
    assert [found.what for found in made.follow_ups][:3] == [
        "n2 was to be left, and no run has done that",
        "the incident is open",
        "no evidence was taken; evacuate_and_reset_gpu takes away the GPU's error counters since its last"
        " reset, and the driver's state",
    ]
    assert made.cost is None
    assert made.times.resolve_s is None


def test_records_that_say_something_else_are_counted_and_left_out(tmp_path: Path) -> None:
    junk: list[tuple[float, str, dict[str, Any]]] = [
        (70.0, kind, {"incident": INCIDENT, "type": kind, "plan": 7, "run": [1], "why": 3, "state": None})
        for kind in (
            "finding",
            "decision",
            "plan",
            "run",
            "step",
            "gate",
            "lease",
            "note",
            "audit",
            "incident",
        )
    ]
    write(tmp_path, *junk)
    made = report(read(History(tmp_path), INCIDENT))
    assert made.unread
    assert made.runs
    assert made.evidence
    for text in written(read(History(tmp_path), INCIDENT)):
        assert f"{made.unread} records say something else" in text


JUNK: list[Any] = [
    None,
    7,
    -1.5,
    1e300,
    True,
    "",
    HOSTILE,
    [],
    [1, None],
    ["a", {"x": 1}],
    {},
    {"a": {"b": 1}},
]


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything that is in it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*above, key)
        yield from places(inner, (*above, key))


@pytest.mark.parametrize("seed", range(25))
def test_a_journal_that_somebody_else_wrote_breaks_no_report(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    story = copy.deepcopy(STORY)
    for _, _, data in chance.sample(story[3:], 6):
        *above, last = chance.choice([place for place in places(data) if place != ("incident",)])
        inner: Any = data
        for key in above:
            inner = inner[key]
        inner[last] = copy.deepcopy(chance.choice(JUNK))
    now = NOW
    with Journal(tmp_path, lambda: now) as log:
        for after_s, kind, data in story:
            now = NOW + after_s
            log.append(kind, "ctl", data)
    history = History(tmp_path)
    with contextlib.suppress(Refused):  # the record that opens it is none any more
        source = read(history, INCIDENT)
        Page(written(measured(source))[1])
        compare(report(source), report(source))
        assert list(excerpt(history, source, []).records)


def test_an_unknown_incident_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("i-zz", HOSTILE, "' OR 1=1 --", ""):
        with pytest.raises(Refused, match="knows no incident") as no:
            read(History(tmp_path), name)
        assert no.value.code == "unknown-incident"


def test_two_side_by_side(source: Source, tmp_path: Path) -> None:
    one = report(source)
    other = report(read(History(tmp_path), "i-part"))
    rows = {row.what: (row.a, row.b) for row in compare(one, other)}
    assert rows["kind"] == ("ecc_dbe", "ecc_dbe")
    assert rows["node class"] == ("H200x8", "H200x8")
    assert rows["pause_s"] == (0.1255, None)
    assert rows["signals of its own"] == ("ecc_dbe", "")
    assert rows["cost_usd"] == (pytest.approx(3 * 0.1255 / 3600 * 2.5), None)


def test_json_has_everything_and_reads_back(source: Source) -> None:
    made = report(measured(source))
    again = msgspec.json.decode(msgspec.json.encode(made), type=Report)
    assert again == made
    assert json.loads(msgspec.json.encode(made))["cuts"][0]["digests"]["1"]["parameters"] == "a" * 64
    assert made.earlier[0].incident == "i-before"
    assert made.incident.merged == ["i-part"]
