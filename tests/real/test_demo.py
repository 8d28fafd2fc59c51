"""`gridctl demo` as a user runs it: the proof in its JSON, and nothing left behind when it is interrupted."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gridctl.cli.exits import Exit

DEADLINE_S = 400.0


def demo(folder: Path, *words: str) -> "subprocess.Popen[str]":
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("GRIDCTL_", "GRIDAGENT_"))
    }
    environ.update(TMPDIR=str(folder), PYTHONUNBUFFERED="1")
    command = [sys.executable, "-c", "from gridctl.cli import main; main()", "demo", *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_over(folder: Path) -> list[str]:
    """Command lines of processes that a demo below `folder` started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environ = (entry / "environ").read_bytes()
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"GRIDCTL_DEMO=" + os.fsencode(folder) in environ and words:
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))  # short: a Unix socket's path lies below it
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_node_leaves_and_nothing_differs(folder: Path) -> None:
    child = demo(folder, "--yes", "--reason", "a test", "-o", "json")
    output, narration = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == Exit.OK, narration
    report = json.loads(output)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1, 2]
    for rank in report["ranks"]:
        assert rank["identical"] is True
        assert rank["first_difference"] is None
        assert rank["losses_hex"] == rank["control_losses_hex"]
        assert all(isinstance(float.fromhex(loss), float) for loss in rank["losses_hex"])
    assert set(report["digests"]) == {"parameters", "optimizer", "buffers", "rng"}
    assert all(
        digest["identical"] and digest["swap"] == digest["control"] for digest in report["digests"].values()
    )
    assert report["steps"] == {"lost": 0, "repeated": 0}
    assert set(report["pause"]) == {"worst_excess_ms", "cut_ms", "prepare_excess_ms", "parts_ms"}
    assert set(report["pause"]["parts_ms"]) == {"capture", "transport", "verify", "switch"}
    assert report["bytes"] > 50_000_000
    assert [(m["source"]["node"], m["target"]["node"]) for m in report["plan"]["moves"]] == [("n2", "n4")]
    kinds = [moment["kind"] for moment in report["incident"]["timeline"]]
    order = [kinds.index(kind) for kind in ("finding", "decision", "plan", "gate", "run", "step")]
    assert order == sorted(order)
    assert left_over(folder) == []
    assert list(folder.iterdir()) == []


@pytest.mark.matrix  # as long as the demo itself; test_train_damage.py has all kinds of damage
def test_a_spoilt_transfer_is_found_and_training_goes_on(folder: Path) -> None:
    child = demo(folder, "--yes", "--reason", "a drill", "--sabotage", "moment", "-o", "json")
    output, narration = child.communicate(timeout=DEADLINE_S)
    assert child.returncode == Exit.OK, narration
    report = json.loads(output)
    assert report["outcome"] == "abort"
    assert any("optimizer" in line for line in report["found"])
    assert all(rank["identical"] for rank in report["ranks"])
    assert report["steps"] == {"lost": 0, "repeated": 0}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--yes",), Exit.USAGE, "--yes needs --reason"),
        ((), Exit.REFUSED, "nobody to ask"),
        (("--yes", "--reason", "x", "--evacuate", "gpu:7"), Exit.USAGE, "no such device"),
    ],
)
def test_what_cannot_be_confirmed_is_not_begun(
    folder: Path, words: tuple[str, ...], code: Exit, says: str
) -> None:
    child = demo(folder, *words)
    _, narration = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, says in narration) == (code, True), narration
    assert "certificates" not in narration
    assert list(folder.iterdir()) == []


def test_a_folder_too_deep_for_sockets_is_named(folder: Path) -> None:
    deep = folder / ("x" * 100)
    deep.mkdir()
    child = demo(deep, "--yes", "--reason", "a test")
    _, narration = child.communicate(timeout=DEADLINE_S)
    assert (child.returncode, "set TMPDIR to a shorter one" in narration) == (Exit.ERROR, True), narration
    assert list(deep.iterdir()) == []


def test_an_interrupted_demo_leaves_nothing(folder: Path) -> None:
    child = demo(folder, "--yes", "--reason", "a test")
    assert child.stderr is not None
    for line in child.stderr:
        if "training" in line:
            break
    assert left_over(folder) != []
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.1)
    child.send_signal(signal.SIGINT)  # an impatient person presses it twice
    child.communicate(timeout=DEADLINE_S)
    assert child.returncode == Exit.INTERRUPTED
    assert left_over(folder) == []
    assert list(folder.iterdir()) == []
