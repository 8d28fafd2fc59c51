"""Saved questions over a journal made by hand, against answers that were worked out by hand."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from history_story import (
    HOUR,
    T0,
    answer,
    closed,
    decision,
    facts,
    finding,
    opened,
    story,
    swap,
    uncordon,
    written,
)

from gridctl.errors import ConfigError, UsageError
from gridctl.history import VIEWS, History
from gridctl.history.ask import BY, Asked, compose, expression, moment, parse, questions
from gridctl.history.schema import schema
from gridctl.model.policy import Policy, Slo


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    return written(tmp_path_factory.mktemp("story"), story())


def near(**figures: Any) -> dict[str, Any]:
    return {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in figures.items()
    }


def part(row: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in wanted}


def test_mttr(history: History) -> None:
    (found,) = answer(history, "mttr")
    wanted = near(incidents=7, closed=4, still_open=3, mean_s=2845.0, median_s=2000.0, decided_median_s=0.0)
    assert part(found, wanted) == wanted
    assert (found["begun_median_s"], found["moved_median_s"]) == (60.0, 180.0)
    assert "fewer than 5" in found["note"]
    assert "longer" in found["note"]


def test_mtbf_with_its_interval_and_what_no_fault_means(history: History) -> None:
    (found,) = answer(history, "mtbf")
    # 3 x 100 h and 5 h of n4. Exact limits for 5 events: 1.97015 and 10.51303
    wanted = near(
        nodes=4, node_h=305.0, faults=5, mtbf_h=61.0, mtbf_low_h=305 / 10.51303, mtbf_high_h=305 / 1.97015
    )
    assert part(found, wanted) == wanted
    assert found["per_1000_node_days"] == pytest.approx(5000 / (305 / 24))
    r1, r2, unknown = answer(history, "mtbf", by="rack")
    assert (r1["scope"], r1["faults"], r1["node_h"]) == ("r1", 5, 200.0)
    assert (r2["scope"], r2["faults"], r2["mtbf_h"], r2["mtbf_high_h"]) == ("r2", 0, None, None)
    assert r2["mtbf_low_h"] == pytest.approx(100 / 2.99573)
    assert (unknown["scope"], unknown["node_h"]) == (None, 5.0)
    assert "never journaled" in unknown["note"]


def test_a_time_and_an_expression_narrow_what_is_asked(history: History) -> None:
    (found,) = answer(history, "mtbf", since_h=20.0, until_h=55.0, where="node = 'n1'")
    assert (found["nodes"], found["node_h"], found["faults"]) == (1, 35.0, 2)
    assert [row["scope"] for row in answer(history, "mtbf", by="driver")] == ["550", "560", None]
    (found,) = answer(history, "mttr", where="rack = 'r1' AND verdict = 'true_fault'")
    assert (found["incidents"], found["mean_s"]) == (1, 180.0)
    assert answer(history, "mttr", until_h=1.0) == []


def test_a_fault_counts_for_the_driver_that_the_node_had_then(tmp_path: Path) -> None:
    told = [facts(0, "n1", "r1", "550"), decision(5 * HOUR, "i1", "n1"), facts(10 * HOUR, "n1", "r1", "560")]
    old, new = answer(written(tmp_path, told), "mtbf", by="driver")
    assert (old["scope"], old["faults"], old["node_h"]) == ("550", 1, 10.0)
    assert (new["scope"], new["faults"], new["node_h"]) == ("560", 0, 90.0)


def test_false_preemptions(history: History) -> None:
    (found,) = answer(history, "false-preemptions")
    wanted = {"preemptions": 2, "true_faults": 1, "false_alarms": 1, "opened_unchanged": 0, "unmarked": 0}
    assert part(found, wanted) == wanted
    assert found["false_share"] == 0.5
    assert 0 < found["false_low"] < 0.5 < found["false_high"] < 1


@pytest.mark.parametrize(
    ("between", "word"),
    [
        ([], "opened_unchanged"),
        ([facts(2 * HOUR, "n1", "r1", boot_id="another")], "unmarked"),
        ([facts(2 * HOUR, "n1", "r1", devices={"gpu:0": {"uuid": "new"}})], "unmarked"),
        ([facts(2 * HOUR, "n1", "r1", jobs={"other": [0]})], "opened_unchanged"),
        (
            [
                (
                    2 * HOUR,
                    "plan",
                    {"incident": "i1", "plan": {"id": "px", "runbook": "reset", "node": "n1"}},
                ),
                (2 * HOUR, "run", {"run": "rx", "plan": "px", "node": "n1", "state": "done"}),
            ],
            "unmarked",
        ),
    ],
)
def test_a_node_that_nobody_judged_counts_as_false_only_if_it_came_back_unchanged(
    tmp_path: Path, between: list[Any], word: str
) -> None:
    told = [facts(0, "n1", "r1"), opened(HOUR, "i1", "n1"), *swap(HOUR, "i1", "n1", "r1", "n2")]
    history = written(tmp_path, [*told, *between, uncordon(3 * HOUR, "n1")])
    (found,) = answer(history, "false-preemptions")
    assert (found["preemptions"], found[word]) == (1, 1)
    assert found["false_share"] == (1.0 if word == "opened_unchanged" else None)


def test_nothing_is_called_unchanged_of_which_no_facts_are_known(tmp_path: Path) -> None:
    told = [opened(HOUR, "i1", "n1"), *swap(HOUR, "i1", "n1", "r1", "n2"), uncordon(3 * HOUR, "n1")]
    (found,) = answer(written(tmp_path, told), "false-preemptions")
    assert (found["unmarked"], found["false_share"], found["false_low"]) == (1, None, None)
    assert "none is judged" in found["note"]


def test_lemons(history: History) -> None:
    first, second = answer(history, "lemons")
    wanted = near(node="n1", lemon=True, relapses=2, opened=2, faults=3, expected=5 * 100 / 305, node_h=100.0)
    assert part(first, wanted) == wanted
    assert first["kinds"] == ["ecc_uncorrectable_dram", "gpu_lost"]
    assert first["last_unix_s"] == T0 + 50 * HOUR
    assert (second["node"], second["lemon"], second["faults"], second["more_than_chance"]) == (
        "n2",
        False,
        2,
        False,
    )


def test_swaps(history: History) -> None:
    rows = answer(history, "swaps")
    assert [(row["run"], row["outcome"], row["pause_ms"], row["digests"]) for row in rows] == [
        ("r1", "commit", 1800.0, 2),
        ("r2", "commit", 900.0, 2),
        ("r3", "commit", 20.0, 2),
        ("r4", "abort", 500.0, 2),
    ]
    assert (rows[0]["node"], rows[0]["targets"], rows[0]["state_bytes"]) == ("n1", ["n3"], 4096)


def test_spare_use(history: History) -> None:
    (found,) = answer(history, "spare-use")
    wanted = near(nodes=4, spare_nodes=1, spare_h=10.05, spare_share=10.05 / 305, taken=3, lacked=1)
    assert part(found, wanted) == wanted
    assert answer(history, "spare-use", by="node")[-1]["scope"] == "n4"
    (spare,) = history.query("SELECT node, from_unix_s, until_unix_s, taken_by FROM spares")[1]
    assert spare == ("n3", T0, T0 + 10 * HOUR + 180, "r1")


def test_lost_gpu_hours(history: History) -> None:
    rows = answer(history, "lost-gpu-hours", Policy(price_usd_per_gpu_h=2.0))
    assert [(row["cause"], row["events"], row["gpu_h"]) for row in rows] == [
        ("pause", 2, pytest.approx(32 * 2.7 / 3600)),
        ("standing", 1, pytest.approx(32 * 360 / 3600)),
        ("stood and not brought on", 1, None),
        ("turned back", 1, pytest.approx(32 * 0.5 / 3600)),
    ]
    assert [row["usd"] for row in rows][1:3] == [pytest.approx(6.4), None]
    assert all(row["usd"] is None and "price" in row["note"] for row in answer(history, "lost-gpu-hours"))


def test_recovered_cost(history: History) -> None:
    spent = 32 * 2.7 / 3600 + 32 * 360 / 3600 + 8 * (50 + 50 + 300) / 3600
    (found,) = answer(history, "recovered-cost", Policy(price_usd_per_gpu_h=2.0))
    wanted = near(swaps=3, recovered_gpu_h=52.0, spent_gpu_h=spent, usd_per_recovered_gpu_h=2 * spent / 52)
    assert part(found, wanted) == wanted
    assert (found["mean_power_w"], found["kwh_per_recovered_gpu_h"]) == (None, None)
    assert "no sample tells the power" in found["note"]
    assert answer(history, "recovered-cost")[0]["usd_per_recovered_gpu_h"] is None


def test_the_energy_of_a_recovered_hour_by_samples_of_power(history: History) -> None:
    """A CTE takes the place of the table, so that no store is needed."""
    told = [(10 * HOUR + 60, "n1", 400), (10 * HOUR + 120, "n3", 600), (50 * HOUR, "n3", 9)]
    rows = ", ".join(f"({T0 + t}, 60, '{node}', 'gpu:0', 'power_w', {watts}, 60)" for t, node, watts in told)
    samples = f"samples(t_unix_s, span_s, node, device, metric, value, n) AS (VALUES {rows})"
    question = questions(Path("nowhere"))["recovered-cost"]
    sql = compose(history, question, Asked(until_unix_s=T0 + 100 * HOUR), Policy())
    names, (row,) = history.query(sql.replace("WITH ", f"WITH {samples}, ", 1))
    found = dict(zip(names, row, strict=True))
    assert found["mean_power_w"] == 500
    assert found["kwh_per_recovered_gpu_h"] == pytest.approx(found["spent_gpu_h"] / 52 * 0.5)


def test_slo(history: History) -> None:
    rows = {row["objective"]: row for row in answer(history, "slo")}
    assert {name: (row["events"], row["good"]) for name, row in rows.items()} == {
        "recover": (7, 3),
        "pause": (3, 2),
        "swap": (4, 3),
        "preemption": (2, 1),
    }
    assert rows["pause"]["budget_left"] == pytest.approx(1 - 1 / 0.03)
    assert [row["met"] for row in rows.values()] == [False, False, False, False]
    kind = {row["objective"]: row for row in answer(history, "slo", Policy(slo=Slo(pause_ms=2000.0)))}
    assert (kind["pause"]["good"], kind["pause"]["met"], kind["pause"]["budget_left"]) == (3, True, 1.0)
    before = {row["objective"]: row for row in answer(history, "slo", since_h=50.0, until_h=50.1)}
    assert (before["recover"]["events"], before["recover"]["met"]) == (0, None), "too young to be counted"


def test_covariance(tmp_path: Path) -> None:
    day = 24 * HOUR
    told = [facts(0, "n1", "r1")]
    for number in range(4):  # days 0, 2, 4, 6 have both, day 8 a NIC error alone, day 9 a fault alone
        told += [
            finding(2 * number * day, "", "n1", "link_flap", "nic:mlx5_0"),
            finding(2 * number * day + 600, "", "n1", "gpu_lost"),
        ]
    told += [finding(8 * day, "", "n1", "link_flap", "nic:mlx5_0"), finding(9 * day, "", "n1", "gpu_lost")]
    told += [finding(9.5 * day, "", "n1", "gpu_lost", severity="info"), (9.6 * day, "note", {"node": "n1"})]
    (found,) = answer(written(tmp_path, told), "covariance", until_h=10 * 24 - 1.0)
    wanted = near(
        node_days=10, nic_days=5, gpu_days=5, both_days=4, expected_days=2.5, lift=1.6, phi=0.6, nic_first=4
    )
    assert part(found, wanted) == wanted
    assert found["lift_low"] < 1.6 < found["lift_high"]
    (few,) = answer(written(tmp_path / "few", told[:3]), "covariance", until_h=240.0)
    assert (few["nic_days"], few["lift"], few["phi"]) == (1, None, None)
    assert "nothing can be said" in few["note"]


@pytest.mark.parametrize("by", ["", *BY])
@pytest.mark.parametrize("name", list(questions(Path("nowhere"))))
def test_every_question_answers_by_everything_also_of_an_empty_or_an_old_journal(
    tmp_path: Path, history: History, name: str, by: str
) -> None:
    answer(history, name, by=by)
    assert answer(written(tmp_path / "empty", []), name, by=by) == []
    old = written(tmp_path / "old", [told for told in story() if told[1] != "facts"])
    for row in answer(old, name, by=by):
        assert row["scope"] in ("fleet", None, "n1", "n2", "n3", "n4")
        assert row["scope"] or row["note"] or name in ("swaps", "lemons", "spare-use")


def test_what_was_not_known_then_is_null(tmp_path: Path) -> None:
    (found,) = answer(written(tmp_path, [told for told in story() if told[1] != "facts"]), "spare-use")
    assert (found["spare_nodes"], found["spare_h"], found["taken_per_1000_spare_h"]) == (None, None, None)
    assert "never journaled" in found["note"]


def test_verdicts_and_reopening(tmp_path: Path) -> None:
    told = [opened(0, "i1", "n1"), closed(10, "i1", "n1", verdict="true_fault", who="a")]
    told += [closed(20, "i1", "n1", verdict="false_alarm", who="b")]
    ask = "SELECT state, closed_unix_s, verdict, verdict_by FROM incidents"
    assert written(tmp_path, told).query(ask)[1] == [("closed", T0 + 10, "false_alarm", "b")]
    told += [opened(30, "i1", "n1")]
    assert written(tmp_path / "again", told).query(ask)[1] == [("open", None, None, None)]


INJECTIONS = [
    *("1) UNION SELECT (2", "1); DROP VIEW events; SELECT (1", "1) FROM incidents WHERE (1", "1), (2", "'"),
    *("node IN (SELECT node FROM nodes)", "EXISTS (FROM nodes)", "1) AS x ORDER BY (1", "$1", "*", "\ud800"),
    *(
        "1)\n LIMIT (1",
        "(VALUES (1))",
        "count(*) OVER ()",
        "COLUMNS('.*') = 1",
        "x -> x",
        "rack = 'r1' node",
        "rack = 'r1' /*",
    ),
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_where_takes_an_expression_and_nothing_else(history: History, text: str) -> None:
    with pytest.raises(UsageError, match="is no expression over columns"):
        answer(history, "mtbf", where=text)


@pytest.mark.parametrize(
    "text", ["read_text('/etc/passwd') = ''", "getenv('HOME') = ''", "no_such_column", "sum(gpus) > 1"]
)
def test_an_expression_reaches_nothing_but_the_columns(history: History, text: str) -> None:
    from gridctl.history import HistoryError

    with pytest.raises(HistoryError):
        answer(history, "mtbf", where=text)


def test_comments_in_an_expression_are_dropped(history: History) -> None:
    assert expression(history, "rack = 'r1' -- ) OR (1=1") == "((rack = 'r1'))"
    assert answer(history, "mtbf", where="rack = '''; DROP VIEW events; --'") == []


def test_by_and_times_are_no_way_in(history: History) -> None:
    with pytest.raises(UsageError, match="--by"):
        answer(history, "mtbf", by="node) FROM nodes --")
    now = T0 + 100 * HOUR
    assert moment("7d", now) == now - 7 * 86400
    assert moment("2023-11-14", now) == T0
    assert moment("2023-11-14T01:00+01:00", now) == T0
    for text in ("", "7 days", "0); DROP", "2023-13-01", "-1d", "yesterday", "1e3d"):
        with pytest.raises(UsageError, match="is no time"):
            moment(text, now)


HEADER = """\
-- title: T
-- subject: nodes_subject
-- meaning: M
-- computed: C
-- unknown: U
-- columns:
--   n  how many
"""


def test_a_site_adds_questions_of_its_own(tmp_path: Path, history: History) -> None:
    text = (
        HEADER.replace("nodes_subject", "incidents at opened_unix_s") + "SELECT count(*) AS n FROM subject;\n"
    )
    (tmp_path / "ours.sql").write_text(text)
    (tmp_path / "notes.txt").write_text("no question")
    found = questions(tmp_path)["ours"]
    assert (found.title, found.columns, found.source) == ("T", {"n": "how many"}, str(tmp_path / "ours.sql"))
    asked = Asked(until_unix_s=T0 + 100 * HOUR, where="node = 'n2'")
    assert history.query(compose(history, found, asked, Policy())) == (["n"], [(4,)])


def test_the_document_s_example_is_a_question(history: History) -> None:
    text = (Path(__file__).parents[2] / "docs/history.md").read_text(encoding="utf-8")
    question = parse("example", text.partition("```sql\n")[2].partition("```")[0])
    names, rows = history.query(compose(history, question, Asked(until_unix_s=T0 + 100 * HOUR), Policy()))
    assert names == list(question.columns)
    assert rows[0] == ("fleet", "k", 4)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("mttr", HEADER, "the name of a delivered question"),
        ("ours", "SELECT 1", "its header lacks title, subject"),
        ("ours", HEADER, "subject 'nodes_subject'"),
        ("ours", HEADER.replace("nodes_subject", "incidents"), "which column says when"),
        ("ours", HEADER.replace("nodes_subject", "incidents at x; DROP"), "which column says when"),
        ("Ours'", HEADER, "no name of a question"),
    ],
)
def test_a_file_that_is_no_question_is_told(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / f"{name}.sql").write_text(text)
    with pytest.raises(ConfigError, match=why):
        questions(tmp_path)


def test_questions_rest_on_the_limits_of_the_rules() -> None:
    import tomllib
    from importlib.resources import files

    lemon = tomllib.loads((files("gridctl.detect.policy") / "cluster.toml").read_text())["lemon"]
    sql = questions(Path("nowhere"))["lemons"].sql
    assert f"<= b.t_unix_s + {lemon['window_days']:.0f} * 86400" in sql
    assert f"relapses >= {lemon['cycles_min']:.0f} AS lemon" in sql


def test_every_column_of_every_view_has_a_meaning(history: History) -> None:
    found = schema(history)
    assert {column.view for column in found} == set(VIEWS)
    assert [column for column in found if not column.meaning] == []


def test_a_header_says_what_it_must() -> None:
    for question in questions(Path("nowhere")).values():
        assert all(
            msgspec.to_builtins(question)[word]
            for word in ("title", "meaning", "computed", "unknown", "columns")
        )
    with pytest.raises(ValueError, match="no name"):
        parse("../x", HEADER)


JUNK: list[Any] = [
    *(None, 7, -1e300, "NaN", "", [1, {"a": []}], {"a": {"b": None}}, True, "x" * 300, "\x1b[31m'; DROP\n"),
    *({"id": "p1", "moves": 7, "members": [{"rank": "x"}], "runbook": "hot-swap"}, [{"cut_ms": "1e999"}]),
]


@pytest.mark.parametrize("seed", range(6))
def test_records_that_say_something_else_than_written_break_no_view_and_no_question(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    told = story()
    for _ in range(150):
        kind, data = (copy := chance.choice(told))[1], dict(copy[2])
        for key in chance.sample(sorted(data), k=min(len(data), 3)):
            data[key] = chance.choice(JUNK)
        told.append(
            (chance.choice([copy[0], -1e18, 1e18, 0.0]), kind, {**data, "t_unix_s": chance.choice(JUNK)})
        )
    history = written(tmp_path, told)
    for view in VIEWS:
        history.query(f"FROM {view}")
    for name in questions(Path("nowhere")):
        for by in ("", *BY):
            answer(history, name, by=by)
