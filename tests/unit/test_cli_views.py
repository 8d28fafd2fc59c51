"""What `gridctl nodes` shows of ranks."""

import csv
import io
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from runbook_world import fleet, rank, spare

from gridctl.cli import views
from gridctl.cli.console import Console
from gridctl.cli.output import Format
from gridctl.model.fleet import Job, Node, jobs


def shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nodes: Mapping[str, Node]
) -> dict[str, tuple[str, str]]:
    """Node -> what stands under RANKS and WHY."""
    told: dict[Any, list[Any]] = {Node: list(nodes.values()), Job: jobs(nodes.values())}
    controller = SimpleNamespace(view=lambda _, what: told[what])
    monkeypatch.setattr(Console, "of", lambda _: SimpleNamespace(controller=controller))
    views.nodes(None, output=Format.csv)  # type: ignore[arg-type]
    return {
        row["name"]: (row["ranks"], row["why"])
        for row in csv.DictReader(io.StringIO(capsys.readouterr().out))
    }


def test_a_node_shows_the_ranks_that_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = [rank(r, job="old", session=f"o{r}", state=state) for r, state in enumerate(("finished", "lost"))]
    moved = {"ranks": [*over, rank(1, state="frozen")]}
    found = shown(
        monkeypatch,
        capsys,
        fleet(n2=moved, n4={"spares": [spare()], "ranks": [rank(1, session="x", epoch=1)]}),
    )
    left = "rank 1 of lm is on n4 since epoch 1; process 101 here, of epoch 0, is what is left of it"
    assert found == {"n1": ("lm/0", ""), "n2": ("lm/1:old", left), "n3": ("lm/2", ""), "n4": ("lm/1", "")}


def test_a_process_that_was_taken_for_dead_and_is_back_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = {name: {"ranks": [rank(r, epoch=1)]} for name, r in (("n1", 0), ("n3", 2))}
    taken = {"spares": [], "ranks": [rank(1, session="x", epoch=1)]}
    for state in ("standing", "training"):
        nodes = fleet(**new, n2={"ranks": [rank(1, state=state)]}, n4=taken)
        found = shown(monkeypatch, capsys, nodes)
        assert (found["n2"][0], found["n4"]) == ("lm/1:old", ("lm/1", ""))
        assert "rank 1 of lm is on n4 since epoch 1" in found["n2"][1]
    silent = {**nodes, "n2": msgspec.structs.replace(nodes["n2"], reachable=False, error="refused")}
    assert shown(monkeypatch, capsys, silent)["n2"][0] == "lm/1:old"


def test_a_dead_rank_is_shown_as_such_while_its_job_stands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stands = {"n1": {"ranks": [rank(0, state="standing")]}, "n3": {"ranks": [rank(2, state="standing")]}}
    lost = {"ranks": [rank(1, state="lost")], "cordoned": True, "cordon_reason": "dimm"}
    found = shown(monkeypatch, capsys, fleet(**stands, n2=lost))
    assert found["n2"] == ("lm/1:died", "rank 1 of lm died; the job stands; dimm")
    assert found["n1"] == ("lm/0", "")
    assert shown(monkeypatch, capsys, fleet(n2=lost))["n2"] == ("", "dimm"), "it does not stand any more"
