"""A whole hand-over from the command line, as a person on a terminal and as a script go through it."""

import csv
import io
import json
from pathlib import Path

import pytest
from command_line import OnTerminal, data, gridctl
from swap_fleet import parked, swap_fleet, training

from gridctl.cli.exits import Exit


def looks_at_its_report(home: Path, incident: str) -> None:
    """Reads it, says what the incident was, and finds that in the page."""
    shown = gridctl(home, "incident", "report", incident).stdout
    for words in ("corrected errors climb", "parameters", "uncordon n2", "before step"):
        assert words in shown, words
    gridctl(home, "incident", "close", incident, "--verdict", "true-fault", "--yes", "--reason", "a DIMM")
    page = home / "report.html"
    gridctl(home, "incident", "report", incident, "-f", "html", "--out", str(page))
    assert "true fault" in page.read_text()


def left_to_do(home: Path, incident: str) -> list[str]:
    found = json.loads(gridctl(home, "incident", "report", incident, "-f", "json").stdout)
    return [its["what"] for its in found["follow_ups"]]


def test_a_person_moves_a_rank_and_looks_at_it_afterwards() -> None:
    with swap_fleet(execute=True) as fleet:
        fleet.nodes("n1", "n2", "n3", "n4")
        root = fleet.root
        client = fleet.controller()
        fleet.train("n1", "n2", "n3")
        fleet.park("n4")
        training(client)
        parked(client)

        first = data(root, "swap", "plan", "n2", "--to", "n4")
        plan = data(root, "swap", "plan", "n2", "--to", "n4")
        assert plan["incident"] == first["incident"], "one wish is one incident"
        assert [move["target"]["node"] for move in plan["moves"]] == ["n4"]
        rows = csv.DictReader(
            io.StringIO(gridctl(root, "swap", "apply", plan["id"], "--dry-run", "-o", "csv").stdout)
        )
        calls = [(row["step"], row["when"], row["kind"]) for row in rows]
        assert ("cut", "do", "handover.cut") in calls
        assert ("cordon", "undo", "node.uncordon") in calls
        assert data(root, "run", "list") == [], "a dry run starts nothing"
        gridctl(root, "swap", "apply", plan["id"], expect=Exit.REFUSED)

        person = OnTerminal(root, "swap", "apply", plan["id"], COLUMNS="160")
        person.sees("Ranks that move")
        person.sees("name: ")
        person.types("n2")
        person.sees("reason: ")
        person.types("corrected errors climb")
        person.sees("cut: done")
        assert person.ends() == Exit.OK, person.screen

        (run,) = data(root, "run", "list")
        assert (run["state"], run["node"]) == ("done", "n2")
        attached = json.loads(gridctl(root, "run", "attach", run["id"], "-o", "json").stdout)
        assert [step["state"] for step in attached["steps"]] == ["done"] * len(attached["steps"])
        incident = data(root, "incident", "show", run["incident"])
        assert (incident["state"], incident["runs"]) == ("closed", [run["id"]])
        assert any("corrected errors climb" in moment["what"] for moment in incident["timeline"])
        looks_at_its_report(root, incident["id"])
        for again, words in (
            (["swap", "apply", plan["id"]], f"was applied as run {run['id']}"),
            (["run", "rollback", run["id"]], "was committed and is done"),
            (["run", "abort", run["id"]], "the way back is a new hand-over"),
        ):
            said = gridctl(root, *again, "--yes", "--reason", "a second time", expect=Exit.REFUSED).stderr
            assert words in said
        assert data(root, "jobs")[0]["epoch"] == 1

        gridctl(root, "uncordon", "n2", expect=Exit.REFUSED)
        assert data(root, "uncordon", "n2", "--dry-run")[-1]["kind"] == "node.uncordon"
        lifted = data(root, "uncordon", "n2", "--yes", "--reason", "memory replaced")
        assert (lifted[0]["name"], lifted[0]["status"]["cordoned"]) == ("n2", False)
        gridctl(root, "uncordon", "n2", "--yes", "--reason", "once more", expect=Exit.REFUSED)
        fleet.park("n2")
        parked(client)
        assert data(root, "swap", "plan", "n3")["moves"][0]["target"]["node"] == "n2", "it is a spare again"
        client.stop()
        assert not any("cordoned" in what for what in left_to_do(root, incident["id"])), "its repair is known"
        assert data(root, "journal", "verify")["ok"] is True


def test_a_script_detaches_aborts_and_finds_the_old_members_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_STEP_S", "1")  # the spare warms up for longer than the abort takes to come
    with swap_fleet() as fleet:
        fleet.nodes("n1", "n2", "n3", "n4")
        root = fleet.root
        client = fleet.controller()
        fleet.train("n1", "n2", "n3")
        fleet.park("n4")
        training(client)
        parked(client)
        because = ["--yes", "--reason", "a drill"]

        plan = data(root, "swap", "plan", "n3")
        run = data(root, "swap", "apply", plan["id"], *because, "--detach")
        assert run["state"] == "running"
        ended = gridctl(root, "run", "abort", run["id"], *because, "-o", "json", expect=Exit.RUN_ABORTED)
        assert json.loads(ended.stdout)["state"] == "aborted"
        gridctl(root, "run", "abort", run["id"], "--dry-run", expect=Exit.REFUSED)
        gridctl(root, "run", "attach", run["id"], expect=Exit.RUN_ABORTED)
        gridctl(root, "run", "resume", run["id"], *because, expect=Exit.REFUSED)
        job = training(client, step=data(root, "jobs")[0]["step"] + 2)
        assert (job.epoch, job.ranks[2].node) == (0, "n3")
        client.stop()
