"""The digest of a script: of what it and its modules say, not of where they lie."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, msgspec, torch
import beside
from inner import deep
from gridagent.train.code import script_digest
DIGEST = script_digest("")
"""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *, script: str = "", **modules: str) -> str:
    """The digest that a script takes of itself, as a new process would."""
    (folder / "inner").mkdir(parents=True)
    for name, text in {"beside": "A = 1", "inner/__init__": "", "inner/deep": "B = 1", **modules}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "train.py").write_text(SCRIPT + script)
    monkeypatch.syspath_prepend(folder)
    try:
        return str(runpy.run_path(str(folder / "train.py"), run_name="__main__")["DIGEST"])
    finally:
        for name in ("beside", "inner", "inner.deep"):
            sys.modules.pop(name, None)


def test_the_same_files_elsewhere_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path / "a", monkeypatch) == run(tmp_path / "b" / "c", monkeypatch)


@pytest.mark.parametrize(
    "change",
    [{"script": "# another one"}, {"beside": "A = 2"}, {"inner/deep": "B = 2"}],
    ids=["script", "beside", "package"],
)
def test_any_change_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]) -> None:
    assert run(tmp_path / "a", monkeypatch) != run(tmp_path / "b", monkeypatch, **change)


def test_a_script_that_is_named_relative_to_its_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spare runs it as it was named, and the script may go to another folder meanwhile."""
    lines = ["import os", "os.chdir('/')", "from gridagent.train.code import script_digest"]
    lines.append(f"DIGEST = script_digest({str(tmp_path)!r})")
    digests = []
    for end in ("", "# another one"):
        (tmp_path / "train.py").write_text("\n".join([*lines, end]))
        monkeypatch.chdir(tmp_path)
        digests.append(runpy.run_path("train.py", run_name="__main__")["DIGEST"])
    assert digests[0] != digests[1]


def test_what_answers_oddly_or_is_gone_does_not_stop_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from gridagent.train.code import script_digest

    class Odd:
        def __getattr__(self, name: str) -> str:
            raise RuntimeError(name)

    class Gone:
        __file__ = "/nowhere/gone.py"

    before = script_digest("")
    monkeypatch.setitem(sys.modules, "odd_module", Odd())
    assert script_digest("") == before
    monkeypatch.setitem(sys.modules, "gone_module", Gone())
    assert script_digest("") != before
