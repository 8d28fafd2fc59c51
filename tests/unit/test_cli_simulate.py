"""`gridctl simulate` and `gridctl detect score`, by the command line."""

import json
from pathlib import Path

from typer.testing import CliRunner

from gridctl.cli.app import root
from gridctl.errors import ConfigError


def test_an_incident_is_written_and_scored(tmp_path: Path) -> None:
    file = tmp_path / "lost.jsonl.gz"
    made = CliRunner().invoke(root, ["simulate", "--incident", "off-the-bus", "--out", str(file)])
    assert made.exit_code == 0
    scored = CliRunner().invoke(root, ["detect", "score", str(file), "-o", "json"])
    (row,) = json.loads(scored.stdout)
    assert (row["recording"], row["found"], row["faults"], row["missed"]) == ("lost", 1, 1, [])
    assert (row["preemptions"], row["unnecessary"], row["device_named"]) == (1, 0, 1)


def test_an_unknown_incident_is_refused_with_those_there_are(tmp_path: Path) -> None:
    done = CliRunner().invoke(root, ["simulate", "--incident", "list", "--out", str(tmp_path / "x.jsonl")])
    assert isinstance(done.exception, ConfigError)
    assert any("crash-churn" in line for line in done.exception.__notes__)
    assert list(tmp_path.iterdir()) == []
