"""The store of the history, with real files: sealed, read, damaged, made anew."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gridagent.journal import Journal
from gridctl.history import History
from gridctl.history.catalog import VERSION, CatalogError
from gridctl.history.compact import Compacted, Place, compact
from gridctl.history.seal import line_of
from gridctl.history.stats import stats
from gridctl.history.store import LocalStore, StoreError
from gridctl.home import Home
from gridctl.model.policy import Kept

DAY_S = 86_400.0
NOW = 1_790_000_000.0
#: Tables and views that rest on nothing but the journal.
OF_THE_JOURNAL = ("records", "row_incidents", "row_runs", "events", "incidents", "runs", "steps")
ODD = "i\n\x1b[31m'; DROP \u2028\U0001f600\x00"


def place_in(folder: Path) -> Place:
    return Place.of(Home.at(folder), Kept())


def write(place: Place, days: int = 3, a_day: int = 40, first: float = NOW - 100 * DAY_S) -> None:
    """A journal of some days: incidents that open and close, runs, and texts that are hard to keep."""
    moments = iter([first + (number / a_day) * DAY_S for number in range(days * a_day)])
    with Journal(place.journal, lambda: next(moments), segment_bytes=6000) as log:
        for number in range(days * a_day // 4):
            name = f"i{log.last_seq}"
            log.append("incident", "x", {"incident": name, "state": "open", "node": "n1", "kind": "ecc"})
            log.append("run", "x", {"incident": name, "run": f"r{number}", "state": "running", "who": "ann"})
            log.append("note", ODD, {"text": ODD, "f": [0.1, 1e-7, 1e300, -0.0, 2**60], "incident": name})
            log.append("incident", "x", {"incident": name, "state": "closed", "node": "n1", "kind": "ecc"})


def sealed(place: Place, **more: Any) -> Compacted:
    return compact(place, Kept(), **more)


def everything(place: Place) -> dict[str, Any]:
    history = History(place.journal, place.store, place.spool)
    return {view: sorted(_rows(history, view), key=repr) for view in OF_THE_JOURNAL}


def _rows(history: History, view: str) -> list[tuple[Any, ...]]:
    """With `data` as what it says: Parquet has the bytes of the line, the tail what DuckDB makes of them."""
    names, rows = history.query(f"FROM {view}")
    data = names.index("data") if "data" in names else None
    return [tuple(json.loads(v) if at == data else v for at, v in enumerate(row)) for row in rows]


def lines(place: Place) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(place.journal.glob("*.jsonl")))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = place_in(tmp_path)
    write(made)
    return made


def test_sealed_and_unsealed_answer_alike(place: Place) -> None:
    before, content = everything(place), lines(place)
    assert len(before["events"]) == 120
    found = sealed(place)
    assert (found.records, found.sealed_seq, found.problem, found.damaged) == (120, 120, "", ())
    assert everything(place) == before
    assert lines(place) == content  # sealing never touches the journal
    assert sealed(place).records == 0


def test_what_came_since_is_read_from_the_journal(place: Place) -> None:
    sealed(place)
    history = History(place.journal)
    assert history.query("SELECT count(*) FROM events")[1] == [(120,)]
    with Journal(place.journal) as log:
        log.append("incident", "x", {"incident": "new", "state": "open"})
        assert history.incident("new")["state"] == "open"
        log.append("incident", "x", {"incident": "new", "state": "closed"})
        assert history.incident("new")["state"] == "closed"
        assert sealed(place).sealed_seq == 122
        assert history.incident("new")["state"] == "closed"


def test_every_byte_of_the_chain_is_in_parquet(place: Place) -> None:
    sealed(place)
    content = lines(place)
    for path in place.journal.glob("*.jsonl"):
        path.unlink()
    history = History(place.journal)
    rows = history.query("SELECT seq, t_unix_s, kind, actor, data, prev FROM records ORDER BY seq")[1]
    assert b"".join(line_of(*row)[0] for row in rows) == content


def test_a_day_is_a_file_and_a_month_that_is_over_is_one(place: Place) -> None:
    sealed(place)
    catalog = place.store.catalog()
    assert len({file.period for file in catalog.of("records")}) == len(catalog.of("records")) == 4
    assert all(len(file.period) == len("2026-03") for file in catalog.of("incidents"))
    for file in catalog.files:
        path = Path(place.store.url(file.path))
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stat().st_mode & 0o077 == 0
    first, *_ = catalog.of("records")
    rows = History(place.journal).query(f"SELECT seq FROM read_parquet('{place.store.url(first.path)}')")[1]
    assert rows == sorted(rows)


def test_readers_of_an_older_catalog_keep_their_files_for_a_while(place: Place) -> None:
    sealed(place)
    older = {file.path for file in place.store.catalog().files}
    with Journal(place.journal, lambda: NOW - 100 * DAY_S) as log:
        log.append("incident", "x", {"incident": "late", "state": "open"})
    sealed(place)
    catalog = place.store.catalog()
    gone = {file.path for file in catalog.replaced}
    assert gone
    assert gone >= older - {file.path for file in catalog.files}
    assert all(Path(place.store.url(path)).exists() for path in gone)
    text = json.loads((Path(place.store.where) / "catalog.json").read_bytes())
    for file in text["replaced"]:
        file["t_unix_s"] -= 3600
    (Path(place.store.where) / "catalog.json").write_text(json.dumps(text))
    sealed(place)
    assert not any(Path(place.store.url(path)).exists() for path in gone)
    assert place.store.catalog().replaced == ()


def test_a_clock_that_jumps_loses_nothing(tmp_path: Path) -> None:
    place = place_in(tmp_path)
    clock = iter([NOW, NOW + 400 * DAY_S, NOW + 1, NOW + 401 * DAY_S, NOW + 2, -5.0, 1e18, NOW + 3])
    with Journal(place.journal, lambda: next(clock)) as log:
        for number in range(8):
            log.append("run", "x", {"run": f"r{number}", "state": "done"})
    before = everything(place)
    assert sealed(place).sealed_seq == 8
    assert everything(place) == before
    assert place.store.catalog().of("records")[0].rows in (1, 4)


@pytest.mark.parametrize("table", ["records", "incidents"])
@pytest.mark.parametrize("how", ["cut", "changed", "gone", "empty"])
def test_a_damaged_file_is_named_and_read_past_and_made_anew(
    place: Place, table: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = everything(place)
    sealed(place)
    path = Path(place.store.url(place.store.catalog().of(table)[0].path))
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "changed":
        path.write_bytes(b"PAR1" + bytes(len(content) - 8) + b"PAR1")
    else:
        path.write_bytes(content[: len(content) // 2] if how == "cut" else b"")
    assert everything(place) == before
    if how == "changed":
        assert str(path) in caplog.text
    else:
        assert str(path) in stats(place, Kept()).problem
    found = sealed(place, rebuild=True)
    assert found.damaged == (str(path),)
    assert stats(place, Kept()).problem == ""
    assert everything(place) == before


def test_compaction_makes_a_damaged_file_anew_by_itself(place: Place) -> None:
    sealed(place)
    path = Path(place.store.url(place.store.catalog().of("records")[-1].path))
    path.write_bytes(b"PAR1" + bytes(path.stat().st_size - 8) + b"PAR1")
    with Journal(place.journal, lambda: NOW - 97 * DAY_S - 1) as log:  # the day of that file goes on
        log.append("note", "x", {"text": "more"})
    assert sealed(place).damaged == (str(path),)
    assert len(everything(place)["events"]) == 121


def test_a_changed_bit_is_found_by_the_next_compaction(place: Place) -> None:
    before = everything(place)
    sealed(place)
    path = Path(place.store.url(place.store.catalog().of("records")[1].path))
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    assert sealed(place).damaged == (str(path),)
    assert everything(place) == before
    assert sealed(place).damaged == ()


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"version": 0}', b"\xff\xfe", b"[]", b'{"version": 2, "files": 1}']
)
def test_a_damaged_catalog_hides_nothing_of_the_journal(place: Place, content: bytes) -> None:
    before = everything(place)
    sealed(place)
    path = Path(place.store.where) / "catalog.json"
    path.write_bytes(content)
    assert everything(place) == before
    with pytest.raises(CatalogError, match=r"catalog.json.*--rebuild"):
        sealed(place)
    assert str(path) in stats(place, Kept()).problem
    assert sealed(place, rebuild=True).sealed_seq == 120
    assert everything(place) == before


def test_a_newer_catalog_is_left_alone(place: Place) -> None:
    sealed(place)
    path = Path(place.store.where) / "catalog.json"
    text = json.loads(path.read_bytes())
    path.write_text(json.dumps({**text, "version": VERSION + 1}))
    with pytest.raises(CatalogError, match="use a newer gridctl"):
        sealed(place, rebuild=True)
    assert len(everything(place)["events"]) == 120


def test_an_older_catalog_is_taken_over(place: Place) -> None:
    before = everything(place)
    sealed(place)
    path = Path(place.store.where) / "catalog.json"
    text = json.loads(path.read_bytes())
    for file in text["files"]:
        file["day"] = file.pop("period")
    path.write_text(json.dumps({**text, "version": 1}))
    assert place.store.catalog().files == msgspec.structs.replace(place.store.catalog()).files
    assert everything(place) == before
    sealed(place)
    assert everything(place) == before


def test_a_damaged_segment_is_sealed_up_to_the_damage(place: Place) -> None:
    third = sorted(place.journal.glob("*.jsonl"))[2]
    content = third.read_bytes()
    third.write_bytes(content.replace(b'"state":"open"', b'"state":"oPen"', 1))
    found = sealed(place)
    assert 0 < found.sealed_seq < 120
    assert third.name in found.problem
    assert "changed" in found.problem
    assert len(everything(place)["events"]) == 120  # what was changed is shown; verify says that it was
    third.write_bytes(content)
    assert sealed(place).sealed_seq == 120


def test_a_journal_that_was_cut_or_exchanged_is_told(place: Place, tmp_path: Path) -> None:
    sealed(place)
    last = sorted(place.journal.glob("*.jsonl"))[-1]
    last.unlink()
    assert "has not got record 120" in sealed(place).problem
    with pytest.raises(Exception, match="only copy"):
        sealed(place, rebuild=True)
    assert len(everything(place)["events"]) == 120
    for path in place.journal.glob("*.jsonl"):
        path.unlink()
    write(place, first=NOW)
    assert "another one than was sealed" in sealed(place).problem


def test_row_tables_that_another_select_made_are_made_anew(place: Place) -> None:
    before = everything(place)
    sealed(place)
    path = Path(place.store.where) / "catalog.json"
    text = json.loads(path.read_bytes())
    text["made_by"] = {"incidents": "another", "gone": "long ago"}
    path.write_text(json.dumps(text))
    assert everything(place) == before
    sealed(place)
    assert everything(place) == before
    assert "gone" not in place.store.catalog().made_by


def test_a_store_that_cannot_be_written_is_told(place: Place) -> None:
    root = Path(place.store.where)
    root.parent.mkdir(exist_ok=True)
    root.write_text("no folder")
    with pytest.raises(StoreError, match="cannot be written"):
        sealed(place)
    assert len(everything(place)["events"]) == 120


def test_one_compacts_at_a_time(place: Place) -> None:
    with LocalStore(Path(place.store.where)).writing(), pytest.raises(StoreError, match="another process"):
        sealed(place)


def test_stats(place: Place) -> None:
    found = stats(place, Kept())
    assert (found.journal_dir, found.journal_seq, found.sealed_seq) == (str(place.journal), 120, 0)
    sealed(place)
    found = stats(place, Kept())
    assert (found.sealed_seq, found.problem) == (120, "")
    assert {table.table: table.rows for table in found.tables}["records"] == 120
    assert found.bytes == sum(os.stat(place.store.url(f.path)).st_size for f in place.store.catalog().files)
    assert time.time() > found.tables[0].bytes > 0
