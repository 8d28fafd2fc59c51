"""A recording cut out of an incident, and what `gridctl replay` makes of it."""

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pytest
from command_line import gridctl
from incident_story import INCIDENT, NOW, STORY, write

from gridagent.journal import Journal
from gridagent.wire import StreamRecord
from gridctl.cli.exits import Exit
from gridctl.history import History
from gridctl.history.report.derive import report
from gridctl.history.report.excerpt import excerpt
from gridctl.history.report.source import read
from gridctl.ports.archive import NotAsTold, spooled
from gridctl.ports.recording import Recording

SAMPLES = (
    "t_unix_s DOUBLE, span_s DOUBLE, node VARCHAR, device VARCHAR, metric VARCHAR, value DOUBLE, low DOUBLE, "
)
SAMPLES += "high DOUBLE, last DOUBLE, n BIGINT"
PROGRESS = (
    "t_unix_s DOUBLE, node VARCHAR, job VARCHAR, rank BIGINT, epoch BIGINT, step BIGINT, step_s DOUBLE, "
)
PROGRESS += "loss DOUBLE, grad_norm DOUBLE"


class Measured(History):
    """A history that keeps telemetry: the two tables as its views have them, in a database beside it."""

    def __init__(self, journal: Path) -> None:
        super().__init__(journal)
        self._tables = duckdb.connect(":memory:")
        self._tables.execute(f"CREATE TABLE samples ({SAMPLES}); CREATE TABLE progress ({PROGRESS})")

    def add(self, table: str, rows: list[tuple[Any, ...]]) -> None:
        self._tables.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)

    def query(self, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        if " FROM samples" not in sql and " FROM progress" not in sql:
            return super().query(sql)
        found = self._tables.execute(sql)
        return [column[0] for column in found.description or ()], found.fetchall()


@pytest.fixture
def history(tmp_path: Path) -> Measured:
    write(tmp_path / "journal")
    made = Measured(tmp_path / "journal")
    made.add(
        "samples",
        [
            (NOW + t, 1.0, node, "gpu:3", metric, 60.0 + t, 60.0 + t, 60.0 + t, 60.0 + t, 1)
            for t in range(-30, 30)
            for node in ("n1", "n2", "n9")
            for metric in ("temp_c", "ecc_dbe_total", "power_w")
        ],
    )
    losses = [2.0 - step / 100 for step in range(100)]
    made.add(
        "progress",
        [
            (
                NOW - 40 + step,
                f"n{rank + 1}",
                "lm",
                rank,
                0,
                step,
                0.1,
                losses[step] if step != 61 else None,
                1.0,
            )
            for step in range(100)
            for rank in range(3)
        ],
    )
    return made


def test_telemetry_that_is_kept_is_in_the_report(history: Measured) -> None:
    made = report(read(history, INCIDENT))
    loss, step_s, temperature, errors = made.plots
    assert [line.name for line in loss.series] == ["rank 0", "rank 1", "rank 2"]
    assert [line.name for line in temperature.series] == ["gpu:3 temp_c"]
    assert [line.name for line in errors.series] == ["gpu:3 ecc_dbe_total"]
    assert step_s.series
    assert len(temperature.series[0].points) > 10
    beside = {its.step: its for its in made.losses}
    assert sorted(beside) == list(range(55, 65))
    assert beside[59].loss == pytest.approx(2.0 - 0.59)
    assert (beside[59].side, beside[60].side) == ("before", "after")
    assert beside[61].loss is None, "a loss that nobody told of is not made up"


def test_what_is_kept_of_the_nodes_is_in_the_recording(history: Measured) -> None:
    made = excerpt(history, read(history, INCIDENT), [])
    found = list(made.records)
    assert [node.name for node in made.header.nodes] == ["n1", "n2", "n3"]
    assert made.header.jobs[0].ranks == {"0": "n1", "1": "n2", "2": "n3"}
    samples = [r for r in found if r.kind == "sample" and r.v["v"]]
    assert {r.node for r in samples} == {"n1", "n2"}, "of the job's nodes, and of no other"
    assert samples[0].v["v"].keys() == {"temp_c", "ecc_dbe_total", "power_w"}
    steps = [r for r in found if r.kind == "progress"]
    assert len(steps) == 300
    assert {r.kind for r in found} == {"sample", "progress", "log", "note"}
    assert [r.t_unix_s for r in found] == sorted(r.t_unix_s for r in found)
    assert not any("samples of" in lack or "steps" in lack for lack in made.lacking)


def packed(path: Path, records: list[StreamRecord]) -> str:
    """An archive of evidence with a spool; returns its digest."""
    content = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("spool.jsonl")
        entry.size = len(content) + 5
        archive.addfile(entry, io.BytesIO(content + b'{"seq'))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def spool() -> list[StreamRecord]:
    line = {
        "source": "kmsg",
        "line": "NVRM: Xid (PCI:0000:9b:00.0): 48, pid=7, name=python, Double Bit ECC Error",
    }
    told = [("beat", {"boot": "b", "seq": n}) for n in range(30)] + [("log", line)]
    return [
        StreamRecord(seq=n, boot="b", t_unix_s=NOW - 30 + n, node="n2", kind=kind, v=v)
        for n, (kind, v) in enumerate(told)
    ]


def test_a_spool_takes_the_place_of_what_findings_quote(history: Measured, tmp_path: Path) -> None:
    digest = packed(tmp_path / "a.tar.gz", spool())
    told = spooled(tmp_path / "a.tar.gz", digest)
    assert told == spool(), "the torn last line is left out"
    with pytest.raises(NotAsTold):
        spooled(tmp_path / "a.tar.gz", "0" * 64)
    found = [r for r in excerpt(history, read(history, INCIDENT), told).records if r.node == "n2"]
    assert [r.v["line"] for r in found if r.kind == "log"] == [told[-1].v["line"]]
    assert sum(r.kind == "beat" for r in found) == 30
    inside = [r for r in found if r.kind == "sample" and NOW - 30 <= r.t_unix_s <= NOW]
    assert inside == [], "what the spool tells is not told twice"


def test_replay_decides_again_what_was_decided(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence.tar.gz"
    digest = packed(evidence, spool())
    with Journal(tmp_path / "journal", lambda: NOW) as log:
        for _, kind, data in STORY:
            changed = {"file": str(evidence), "sha256": digest} if data.get("what") == "evidence" else {}
            log.append(kind, "ctl", {**data, **changed})
    out = tmp_path / "cut.jsonl.gz"
    said = gridctl(tmp_path, "incident", "record", INCIDENT, "--out", str(out)).stderr
    assert "not in it: no samples of that time are kept" in said
    assert "archive of evidence" not in said, "it was at hand"
    again = gridctl(tmp_path, "replay", str(out), "-o", "json").stdout
    decided = [line for line in map(msgspec.json.decode, again.splitlines()) if line["type"] == "decision"]
    assert [(line["node"], line["preempt_job"]) for line in decided] == [("n2", True)]
    gridctl(tmp_path, "incident", "record", INCIDENT, "--out", str(out), expect=Exit.USAGE)
    gridctl(tmp_path, "incident", "record", "i-zz", "--out", str(tmp_path / "b.jsonl"), expect=Exit.NOT_FOUND)
    assert not (tmp_path / "b.jsonl").exists()


def test_without_evidence_the_lines_of_findings_are_played(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    out = tmp_path / "cut.jsonl"
    said = gridctl(tmp_path, "incident", "record", INCIDENT, "--out", str(out)).stderr
    assert "n2-ev-1.tar.gz" in said
    recording = Recording(out)
    assert [r.kind for r in recording.records()] == ["sample", "note", "log", "note"]
    recording.close()
    assert out.stat().st_mode & 0o777 == 0o600
    again = gridctl(tmp_path, "replay", str(out), "-o", "json").stdout
    assert '"xid.48"' in again
