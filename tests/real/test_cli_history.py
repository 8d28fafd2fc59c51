"""`gridctl sql` and `gridctl ask` as processes over a journal; no controller runs."""

import csv
import io
import json
from pathlib import Path

import pytest
import yaml
from command_line import data, gridctl

from gridagent.journal import Journal
from gridctl.cli.exits import Exit

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nok\u202e [/red] %s {}"
QUESTIONS = ["covariance", "false-preemptions", "lemons", "lost-gpu-hours", "mtbf", "mttr"]
QUESTIONS += ["recovered-cost", "slo", "spare-use", "swaps"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    with Journal(root / "journal") as log:
        about = {"incident": "i1", "kind": "ecc", "node": "n1", "job": "lm"}
        log.append("incident", "c", {**about, "state": "open", "title": HOSTILE})
        its = {"type": "decision", "decision": "swap_now", "action": "reset", "device": "gpu:0"}
        log.append("decision", "c", {**about, **its})
        log.append("incident", "c", {**about, "state": "closed", "title": HOSTILE})
    return root


def test_four_forms_say_the_same(home: Path) -> None:
    query = (
        "SELECT incident, title, 1 / 3 AS x, NULL AS nothing, [1, 2] AS list, 2 AS incident FROM incidents"
    )
    shown = gridctl(home, "sql", query).stdout
    (row,) = data(home, "sql", query)
    assert row["title"] == HOSTILE
    assert (row["incident"], row["incident_2"], row["nothing"], row["list"]) == ("i1", 2, None, [1, 2])
    assert yaml.safe_load(gridctl(home, "sql", query, "-o", "yaml").stdout) == [row]
    ((one),) = list(csv.DictReader(io.StringIO(gridctl(home, "sql", query, "-o", "csv").stdout)))
    assert one["list"] == "1 2"
    for text in (shown, one["title"], gridctl(home, "sql", query, "-o", "json").stdout):
        assert not set(text) & set("\x1b\x07\r\u202e"), "what is in the journal is shown, never obeyed"


def test_values_that_json_has_not(home: Path) -> None:
    query = (
        "SELECT 'nan'::DOUBLE AS nan, '-inf'::DOUBLE AS inf, 'a'::BLOB AS blob, DATE '2026-01-01' AS day, "
        "1.5::DECIMAL(5, 2) AS money, MAP {1: 'x'} AS map, 170141183460469231731687303715884105727 AS huge"
    )
    (row,) = json.loads(gridctl(home, "sql", query, "-o", "json").stdout, parse_constant=pytest.fail)
    assert row["huge"] == 2**127 - 1
    assert {k: v for k, v in row.items() if k != "huge"} == {
        "nan": "nan",
        "inf": "-inf",
        "blob": "61",
        "day": "2026-01-01",
        "money": "1.50",
        "map": {"1": "x"},
    }


def test_a_select_comes_from_stdin_and_its_output_is_bounded(home: Path) -> None:
    found = gridctl(home, "sql", "-o", "csv", types="SELECT range AS n FROM range(5000)")
    assert (found.stdout.count("\n"), "there are more" in found.stderr) == (1001, True)
    assert gridctl(home, "sql", "FROM range(5000)", "--limit", "0", "-o", "csv").stdout.count("\n") == 5001
    exact = gridctl(home, "sql", "FROM range(3)", "--limit", "3")
    assert (exact.stdout.count("\n"), exact.stderr) == (4, "")
    empty = gridctl(home, "sql", "FROM incidents WHERE false")
    assert (empty.stdout, empty.stderr) == ("", "no rows\n")


@pytest.mark.parametrize(
    "query",
    [
        "DROP VIEW events",
        "COPY events TO '{home}/out'",
        "SELECT * FROM read_text('{home}/journal/00000001.jsonl')",
        "SELECT 1; SELECT 2",
        "INSTALL httpfs",
        "FROM enable_logging(storage = 'file', storage_config = {{'path': '{home}/out'}})",
        "SELECT \x1b[31m",
        "",
    ],
)
def test_sql_reads_the_views_and_nothing_else(home: Path, query: str) -> None:
    before = (home / "journal/00000001.jsonl").read_bytes()
    refused = gridctl(home, "sql", "-", types=query.format(home=home), expect=Exit.ERROR)
    assert refused.stdout == ""
    assert refused.stderr.startswith("gridctl: ")
    assert "\x1b" not in refused.stderr
    assert not (home / "out").exists()
    assert (home / "journal/00000001.jsonl").read_bytes() == before


def test_a_wrong_select_shows_where(home: Path) -> None:
    refused = gridctl(home, "sql", "SELECT node, nosuch FROM nodes", expect=Exit.ERROR)
    assert 'Referenced column "nosuch" not found' in refused.stderr
    assert "LINE 1: SELECT node, nosuch FROM nodes" in refused.stderr.splitlines()


def test_the_schema_is_told(home: Path) -> None:
    every = data(home, "sql", "--schema")
    assert {"view": "incidents", "column": "duration_s", "meaning": "from opened to closed"}.items() <= next(
        c for c in every if c["column"] == "duration_s"
    ).items()
    assert {c["view"] for c in data(home, "sql", "--schema", "spares")} == {"spares"}
    gridctl(home, "sql", "--schema", "nosuch", expect=Exit.USAGE)


def test_questions_are_listed_and_answered(home: Path) -> None:
    assert [q["name"] for q in data(home, "ask")] == QUESTIONS
    found = data(home, "ask", "mtbf", "--since", "7d", "--where", "node <> 'n9'", "--by", "node")
    assert (found["where"], found["source"]) == ("node <> 'n9'", "delivered")
    assert (found["question"], found["by"], [row["scope"] for row in found["rows"]]) == (
        "mtbf",
        "node",
        ["n1"],
    )
    assert found["rows"][0]["faults"] == 1
    assert found["unknown"]
    shown = gridctl(home, "ask", "mtbf").stdout
    assert "not known:" in shown
    assert "look at the interval" in shown
    (row,) = csv.DictReader(io.StringIO(gridctl(home, "ask", "mttr", "-o", "csv").stdout))
    assert (row["scope"], row["closed"]) == ("fleet", "1")
    assert gridctl(home, "ask", "mttr", "--until", "2000-01-01").stderr == "nothing to count\n"


def test_what_explain_prints_can_be_asked(home: Path) -> None:
    told = gridctl(home, "ask", "mttr", "--where", "node = 'n1'", "--explain").stdout
    assert told.startswith("-- Mean time to repair\n-- meaning: ")
    (row,) = json.loads(gridctl(home, "sql", "-o", "json", types=told).stdout)
    assert (row["scope"], row["incidents"]) == ("fleet", 1)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nosuch",),
        ("mtbf", "--since", "sometime"),
        ("mtbf", "--since", "2026-02-01", "--until", "2026-01-01"),
        ("mtbf", "--where", "1) UNION SELECT (1"),
    ],
)
def test_what_is_no_question_is_refused(home: Path, arguments: tuple[str, ...]) -> None:
    refused = gridctl(home, "ask", *arguments, expect=Exit.USAGE)
    assert (refused.stdout, refused.stderr.count("\n")) == ("", 1)


def test_a_site_s_question_and_a_broken_one(home: Path) -> None:
    folder = home / "questions"
    folder.mkdir()
    title = HOSTILE.replace("\r\n", "")
    head = [
        f"title: {title}",
        "subject: incidents at opened_unix_s",
        "meaning: M",
        "computed: C",
        "unknown: U",
    ]
    lines = [f"-- {line}" for line in [*head, "columns:", "  n  how many"]]
    (folder / "ours.sql").write_text("\n".join([*lines, "SELECT count(*) AS n FROM subject"]))
    assert data(home, "ask", "ours")["rows"] == [{"n": 1}]
    assert "\x1b" not in gridctl(home, "ask", "ours", "--explain").stdout + gridctl(home, "ask").stdout
    (folder / "broken.sql").write_text("SELECT 1")
    assert "its header lacks title" in gridctl(home, "ask", expect=Exit.USAGE).stderr
    (folder / "broken.sql").unlink()


def test_without_a_journal_nothing_is_made_up(tmp_path: Path) -> None:
    assert "there is no journal" in gridctl(tmp_path, "sql", "SELECT 1", expect=Exit.USAGE).stderr
    assert len(data(tmp_path, "ask")) == len(QUESTIONS)
