"""`gridctl history` as a person or a script calls it, and its way out and back in as one file."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest

from gridagent.journal import Journal, verify
from gridagent.wire import StreamRecord
from gridctl.history import VIEWS, History
from gridctl.history.compact import Place, compact
from gridctl.history.export import STORAGE, ExportError, export, take_in
from gridctl.history.spool import Spool
from gridctl.home import Home
from gridctl.model.policy import Kept

RAN = "from gridctl.cli import main; main()"


def gridctl(home: Path, *words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-c", RAN, "history", *words],
        env={**os.environ, "GRIDCTL_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def place_in(folder: Path) -> Place:
    return Place.of(Home.at(folder), Kept())


def fill(place: Place) -> None:
    with Journal(place.journal, segment_bytes=4000) as log:
        for number in range(50):
            log.append(
                "incident", "x", {"incident": f"i{number}", "state": "open", "title": "\x1b[31m\u2028"}
            )
    writer = Spool(place.spool)
    for number in range(3):
        t_unix_s = time.time() - 30 + number
        v: dict[str, Any] = {"device": "gpu:0", "v": {"temp_c": 40 + number}}
        sample = StreamRecord(seq=number + 1, boot="b", t_unix_s=t_unix_s, node="n1", kind="sample", v=v)
        writer.write([sample], t_unix_s)
        writer.close()


def test_commands_in_all_forms(tmp_path: Path) -> None:
    fill(place_in(tmp_path))
    assert json.loads(gridctl(tmp_path, "compact", "-o", "json"))["sealed_seq"] == 50
    told = json.loads(gridctl(tmp_path, "stats", "-o", "json"))
    assert told["journal_dir"] == str(tmp_path / "journal")
    assert {"bytes", "rows", "bytes_per_sample", "tables", "sealed_seq", "keeps"} <= told.keys()
    assert "50" in gridctl(tmp_path, "stats")
    assert gridctl(tmp_path, "stats", "-o", "csv").startswith("table,span_s,rows,bytes")
    assert "sealed_seq: 50" in gridctl(tmp_path, "stats", "-o", "yaml")
    assert gridctl(tmp_path, "retain", "--dry-run", "-o", "json").strip() == "[]"
    assert "everything is in its tier" in gridctl(tmp_path, "retain")
    assert json.loads(gridctl(tmp_path, "export", str(tmp_path / "x.duckdb"), "-o", "json"))["records"] == 50
    back = tmp_path / "back"
    assert json.loads(gridctl(back, "import", str(tmp_path / "x.duckdb"), "-o", "json"))["records"] == 50
    assert "has a history already" in gridctl(back, "import", str(tmp_path / "x.duckdb"), code=1)


def test_damage_has_an_exit_code(tmp_path: Path) -> None:
    fill(place_in(tmp_path))
    segment = sorted((tmp_path / "journal").glob("*.jsonl"))[1]
    segment.write_bytes(segment.read_bytes().replace(b"open", b"opEn", 1))
    assert segment.name in gridctl(tmp_path, "compact", code=7)
    (tmp_path / "history" / "catalog.json").write_text("{")
    assert "catalog.json" in gridctl(tmp_path, "compact", code=1)


def test_where_and_how_long_stands_in_the_policy(tmp_path: Path) -> None:
    fill(place_in(tmp_path))
    (tmp_path / "policy.toml").write_text(f'[history]\nstore = "{tmp_path}/elsewhere"\nseconds_h = 24\n')
    gridctl(tmp_path, "compact")
    assert (tmp_path / "elsewhere" / "catalog.json").exists()
    assert json.loads(gridctl(tmp_path, "stats", "-o", "json"))["keeps"]["seconds_h"] == 24
    (tmp_path / "policy.toml").write_text("[history]\nseconds_h = 0\n")
    assert "seconds_h" in gridctl(tmp_path, "compact", code=2)


def test_read_only_mode_compacts_nothing(tmp_path: Path) -> None:
    fill(place_in(tmp_path))
    (tmp_path / "fleet.toml").write_text('[fleet]\nname = "f"\nread_only = true\n')
    assert "read_only" in gridctl(tmp_path, "compact", code=3)
    assert not (tmp_path / "history").exists()


def test_an_export_says_the_same_and_comes_back_byte_by_byte(tmp_path: Path) -> None:
    place = place_in(tmp_path / "home")
    fill(place)
    compact(place, Kept())
    with Journal(place.journal) as log:
        log.append("note", "x", {"text": "not sealed yet", "f": 1e-7})
    made = tmp_path / "out.duckdb"
    told = export(place, made)
    assert (told.records, told.samples, told.head) == (51, 3, verify(place.journal).head)
    here = History(place.journal)
    with duckdb.connect(str(made), read_only=True) as there:
        for view in (*VIEWS, "samples"):
            order = f"FROM {view} ORDER BY ALL"
            names = here.query(f"SELECT * FROM {view} LIMIT 0")[0]
            if "data" not in names:
                assert there.execute(order).fetchall() == here.query(order)[1]
            assert [column[0] for column in there.execute(order).description or ()] == names
        version = there.execute("SELECT tags FROM duckdb_databases() WHERE database_name = 'out'").fetchone()
        assert version is not None
        assert STORAGE.rsplit(".", 1)[0] in str(version[0])
    back = place_in(tmp_path / "back")
    taken = take_in(back, Kept(), made)
    assert (taken.records, taken.samples, taken.head) == (51, 3, told.head)
    content = [
        b"".join(p.read_bytes() for p in sorted(its.journal.glob("0*.jsonl"))) for its in (place, back)
    ]
    assert content[0] == content[1]
    assert History(back.journal).query("FROM samples ORDER BY ALL") == here.query("FROM samples ORDER BY ALL")
    with Journal(back.journal) as log:
        log.append("note", "x", {"text": "goes on"})
    assert verify(back.journal).ok


def test_what_is_no_export_changes_nothing(tmp_path: Path) -> None:
    place = place_in(tmp_path / "home")
    bad = tmp_path / "bad.duckdb"
    bad.write_bytes(b"nothing of that kind")
    with pytest.raises(ExportError, match="no export"):
        take_in(place, Kept(), bad)
    assert not place.journal.exists()
    fill(place)
    made = tmp_path / "out.duckdb"
    export(place, made)
    with pytest.raises(ExportError, match="there already"):
        export(place, made)
    with duckdb.connect(str(made)) as database:
        database.execute('UPDATE records SET data = \'{"incident":"i9"}\' WHERE seq = 9')
    with pytest.raises(ExportError, match="record 9 of the export"):
        take_in(place_in(tmp_path / "other"), Kept(), made)
    assert not (tmp_path / "other" / "journal").exists()
