import json
import threading
from pathlib import Path
from typing import Any

import pytest

from gridagent.journal import Journal
from gridctl.history import VIEWS, History, HistoryError

ECC = {"incident": "i1", "kind": "ecc", "node": "n2", "job": "demo", "title": "T"}
LOST = {"incident": "i2", "kind": "gpu_lost", "node": "n3", "job": "", "title": "U"}
RUN = {"incident": "i1", "run": "r1", "plan": "p1", "node": "n2", "job": "demo", "who": "ann"}
STEP = {"incident": "i1", "run": "r1"}
STORY: list[tuple[str, dict[str, Any]]] = [
    ("finding", {"incident": "i1", "node": "n2", "kind": "ecc_uncorrectable_dram", "why": ["DBE 'x'"]}),
    ("incident", {**ECC, "state": "open"}),
    ("decision", {"incident": "i1", "node": "n2", "decision": "swap_now"}),
    ("plan", {"incident": "i1", "plan": {"id": "p1", "steps": [{"name": "open"}]}}),
    ("gate", {"incident": "i1", "plan": "p1", "run": "r1", "who": "ann"}),
    ("run", {**RUN, "state": "running"}),
    ("step", {**STEP, "step": "open", "index": 0, "state": "started", "attempt": 1}),
    ("step", {**STEP, "step": "open", "index": 0, "state": "failed", "code": "busy"}),
    ("step", {**STEP, "step": "open", "index": 0, "state": "started", "attempt": 2}),
    ("step", {**STEP, "step": "open", "index": 0, "state": "done"}),
    ("step", {**STEP, "step": "cut", "index": 1, "state": "started"}),
    ("incident", {**LOST, "state": "open"}),
    ("run", {**RUN, "state": "done"}),
    ("incident", {**ECC, "state": "closed"}),
    ("note", {"text": "unrelated"}),
]


def write(folder: Path, segment_bytes: int = 900) -> None:
    clock = iter(range(1000, 2000))
    with Journal(folder, lambda: float(next(clock)), segment_bytes=segment_bytes) as log:
        for kind, data in STORY:
            log.append(kind, "tester", data)


@pytest.fixture
def history(tmp_path: Path) -> History:
    write(tmp_path)
    return History(tmp_path)


def test_incidents_are_folded(history: History) -> None:
    newest, oldest = history.incidents()
    assert (newest["incident"], newest["state"], newest["closed_unix_s"]) == ("i2", "open", None)
    assert oldest == {
        **ECC,
        "state": "closed",
        "opened_unix_s": 1001.0,
        "closed_unix_s": 1013.0,
        "findings": 1,
        "decisions": 1,
        "plans": 1,
        "runs": 1,
        "verdict": None,
        "verdict_by": None,
        "merged_into": None,
        "acked_unix_s": None,
        "duration_s": 12.0,
    }
    whole = history.incident("i1")
    assert [moment["kind"] for moment in whole["timeline"]] == [
        kind for kind, data in STORY if data.get("incident") == "i1"
    ]
    assert json.loads(whole["timeline"][0]["data"]) == STORY[0][1]
    assert [run["run"] for run in whole["runs"]] == ["r1"]


def test_runs_and_steps_are_folded(history: History) -> None:
    (run,) = history.runs()
    assert (run["state"], run["who"], run["plan"]) == ("done", "ann", "p1")
    assert (run["started_unix_s"], run["ended_unix_s"], run["duration_s"]) == (1005.0, 1012.0, 7.0)
    first, second = history.run("r1")["steps"]
    assert (first["step"], first["position"], first["state"], first["attempts"]) == ("open", 0, "done", 2)
    assert (first["started_unix_s"], first["duration_s"]) == (1006.0, 3.0)
    assert (second["step"], second["state"], second["ended_unix_s"]) == ("cut", "started", None)


def test_sql_over_all_views(history: History) -> None:
    assert history.query("SELECT count(*) AS n, max(seq) FROM events") == (["n", "max(seq)"], [(15, 15)])
    assert history.query("SELECT data ->> '$.why[0]' FROM events WHERE kind = 'finding'")[1] == [("DBE 'x'",)]
    assert str(history.query("SELECT t_utc FROM events LIMIT 1")[1][0][0]) == "1970-01-01 00:16:40"
    for view in VIEWS:
        assert history.query(f"FROM {view}")[0]
    for view in ("events", "incidents", "runs", "steps", "findings", "decisions", "plans", "gates", "nodes"):
        assert history.query(f"FROM {view}")[1]


def test_new_records_are_seen_at_once(tmp_path: Path) -> None:
    history = History(tmp_path / "journal")
    assert history.query("SELECT count(*) FROM events")[1] == [(0,)]
    assert history.incidents() == history.runs() == []
    with Journal(tmp_path / "journal") as log:
        assert history.incidents() == []
        log.append("incident", "x", {"incident": "i1", "state": "open"})
        assert [i["incident"] for i in history.incidents()] == ["i1"]
        log.append("incident", "x", {"incident": "i1", "state": "closed"})
        assert [i["state"] for i in history.incidents()] == ["closed"]


@pytest.mark.parametrize(
    "tail", [b'{"seq":16,"t_unix_s":10', b"\x00" * 50, b'{"seq":"x"}\n', b"\xff\xfe{\n", b"{}\n"]
)
def test_a_damaged_or_torn_last_line_breaks_nothing(tmp_path: Path, tail: bytes) -> None:
    write(tmp_path)
    last = sorted(tmp_path.glob("*.jsonl"))[-1]
    with last.open("ab") as file:
        file.write(tail)
    assert History(tmp_path).query("SELECT count(*) FROM events")[1] == [(15,)]


def test_values_of_unexpected_types_break_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path) as log:
        log.append(
            "step", "x", {"run": 7, "step": {"a": 1}, "index": "first", "state": None, "incident": [1]}
        )
        log.append("run", "x", {"run": {"id": 1}, "state": 3})
        log.append("incident", "x", {"incident": "i\n\x1b[31m'; DROP", "state": "open"})
    history = History(tmp_path)
    for view in VIEWS:
        history.query(f"FROM {view}")
    assert history.incident("i\n\x1b[31m'; DROP")["state"] == "open"


FORBIDDEN = [
    "SELECT * FROM read_text('{outside}')",
    "SELECT * FROM '{outside}'",
    "SELECT * FROM read_json('{outside}')",
    "SELECT * FROM read_blob('{journal}')",
    "SELECT * FROM glob('/*')",
    "COPY events TO '{target}'",
    "COPY (SELECT 1) TO '{target}'",
    "EXPORT DATABASE '{target}'",
    "ATTACH '{target}'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET enable_external_access = true",
    "RESET lock_configuration",
    "INSERT INTO records SELECT * FROM records",
    "WITH x AS (DELETE FROM records RETURNING *) SELECT * FROM x",
    "DROP VIEW events",
    "CREATE TABLE t (a INT)",
    "CREATE TEMP TABLE t AS SELECT 1",
    "SELECT 1; SELECT 2",
    "PRAGMA version",
    "CALL duckdb_tables()",
    "SELECT secret FROM local_variable",
    "SELECT getenv('HOME')",
    "",
    "not sql",
]


@pytest.mark.parametrize("sql", FORBIDDEN)
def test_queries_read_the_views_and_nothing_else(tmp_path: Path, sql: str) -> None:
    journal, outside, target = tmp_path / "j", tmp_path / "outside.json", tmp_path / "target"
    write(journal)
    outside.write_text('{"a": 1}\n')
    local_variable = [{"secret": 1}]
    history = History(journal)
    before = history.query("FROM events")
    places = {"outside": outside, "target": target, "journal": next(journal.glob("*.jsonl"))}
    with pytest.raises(HistoryError):
        history.query(sql.format(**places))
    assert not target.exists()
    assert history.query("FROM events") == before
    assert local_variable


def test_unknown_names_are_told(history: History) -> None:
    with pytest.raises(HistoryError, match="knows no incident 'i9'"):
        history.incident("i9")
    with pytest.raises(HistoryError, match="knows no run"):
        history.run("r9")


def test_many_readers_beside_the_writer(tmp_path: Path) -> None:
    history, failures = History(tmp_path), []

    def read() -> None:
        last = 0
        for _ in range(15):
            (count,) = history.query("SELECT count(*) FROM events")[1][0]
            if count < last:
                failures.append((last, count))
            last = count

    with Journal(tmp_path, segment_bytes=2000) as log:
        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for index in range(60):
            log.append("note", "x", {"index": index})
        for reader in readers:
            reader.join()
    assert failures == []
    assert history.query("SELECT count(*) FROM events")[1] == [(60,)]
