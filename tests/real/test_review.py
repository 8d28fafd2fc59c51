"""A week that was made up, in review: the journal, the history and the command are real."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_line import gridctl

from gridagent.journal import Journal
from gridctl.history.review.week import WEEK_S, week

#: Monday of 2026-W10, 00:00 UTC.
MONDAY_UNIX_S = 1_772_409_600.0
HOUR_S = 3600.0
HOSTILE = "<script>alert(1)</script> | \x1b[31m"


class Story:
    """A journal that is written as time goes on."""

    def __init__(self, folder: Path) -> None:
        self._now_s = MONDAY_UNIX_S - WEEK_S
        self._journal = Journal(folder, lambda: self._now_s)

    def at(self, hours: float) -> "Story":
        """So many hours after the week's begin."""
        self._now_s = MONDAY_UNIX_S + hours * HOUR_S
        return self

    def write(self, what: str, /, **data: Any) -> "Story":
        self._journal.append(what, "controller", data)
        return self

    def incident(
        self, name: str, node: str, state: str = "open", kind: str = "gpu_lost", **more: Any
    ) -> "Story":
        return self.write(
            "incident", incident=name, node=node, state=state, kind=kind, title=kind, job="j", **more
        )

    def fault(self, name: str, node: str, kind: str = "gpu_lost") -> "Story":
        common = {"incident": name, "node": node, "device": "gpu:1", "kind": kind, "t_unix_s": self._now_s}
        common |= {"severity": "critical", "preempt_job": True, "why": ["Xid 79"], "rule": "xid.79"}
        self.write("finding", type="finding", layer="kernel", fault="node", **common)
        return self.write("decision", type="decision", decision="swap_now", **common)

    def choice(self, name: str, node: str, action: str) -> "Story":
        return self.write("decision", type="choice", incident=name, node=node, kind="gpu_lost", action=action)

    def swap(self, name: str, node: str, run: str, who: str, pause_ms: float, state: str = "done") -> "Story":
        member = {"node": node, "rank": 0, "role": "source", "session": "s", "url": "u"}
        move = {"rank": 0, "source": member, "target": {**member, "node": "spare-1"}}
        cost = {"steps_lost": 0, "pause_s": 0.2, "preparation_s": 1.0, "state_bytes": 10}
        plan = {
            "id": f"p-{run}",
            "runbook": "hot-swap",
            "incident": name,
            "node": node,
            "job": "j",
            "who": who,
        }
        plan |= {"moves": [move], "members": [member], "cost": cost, "steps": [], "devices": []}
        about = {"incident": name, "run": run, "plan": f"p-{run}", "node": node, "job": "j", "who": who}
        self.write("plan", incident=name, plan=plan).write("run", **about, state="running")
        if state == "done":
            value = {"outcome": "commit", "cut_ms": pause_ms, "handover": f"h-{run}"}
            self.write("step", incident=name, run=run, step="cut", index=7, state="done", values=[value])
        return self.write("run", **about, state=state)

    def close(self) -> None:
        self._journal.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    story = Story(tmp_path / "journal")
    story.at(-100).incident("i-0", "n1").fault("i-0", "n1").incident("i-0", "n1", "closed")
    story.at(10).incident("i-1", "n1").fault("i-1", "n1").choice("i-1", "n1", "swap_now")
    story.at(10.1).swap("i-1", "n1", "r-1", "ann", 120.0).incident("i-1", "n1", "closed")
    story.at(20).incident("i-2", "n2").fault("i-2", "n2", "ecc_uncontained").choice("i-2", "n2", "swap_now")
    story.at(21).incident("i-2", "n2", "closed", verdict="false_alarm", who="bob", reason=HOSTILE)
    story.at(30).incident("i-3", "n3", kind="thermal_throttle").choice("i-3", "n3", "watch")
    story.at(31).swap("i-3", "n3", "r-3", "ann", 180.0)
    story.at(40).incident("i-4", "n4").choice("i-4", "n4", "swap_now").swap(
        "i-4", "n4", "r-4", "policy", 90.0
    )
    story.at(50).swap("i-3", "n3", "r-5", "ann", 0.0, "aborted")
    story.write("audit", what="aborted", run="r-5", incident="i-3", who="eve", reason="not now")
    story.at(200).incident("i-9", "n9")
    story.close()
    return tmp_path


def test_what_a_week_says(home: Path) -> None:
    found = json.loads(gridctl(home, "review", "--week", "2026-W10", "--format", "json").stdout)
    assert (found["week"], found["from_unix_s"], found["unended"]) == ("2026-W10", MONDAY_UNIX_S, False)
    assert (found["opened"], found["closed"], found["faults"]) == (4, 2, 2)
    assert found["verdicts"] == {"false_alarm": 1, "unmarked": 1}
    assert found["kinds"] == [["gpu_lost", 3], ["thermal_throttle", 1]]
    assert found["moves"] == {
        "committed": 3,
        "turned_back": 1,
        "by_policy": 1,
        "pause_ms_median": 120.0,
        "pause_ms_max": 180.0,
        "steps_lost": 0,
    }
    assert [one["incident"] for one in found["left_open"]] == ["i-3", "i-4"]
    assert found["repeats"] == [{"node": "n1", "faults": 2, "in_week": 1, "kinds": ["gpu_lost"]}]
    assert found["spares"] == {"nodes_at_end": None, "nodes_least": None, "taken": 3}, "unknown is not none"
    movers = {one["node"]: (one["before"], one["after"]) for one in found["movers"]}
    assert movers.keys() == {"n1", "n2"}
    assert movers["n2"][0] == 0 < movers["n2"][1]


def test_where_people_decided_otherwise(home: Path) -> None:
    found = json.loads(gridctl(home, "review", "--week", "2026-W10", "--format", "json").stdout)["overrides"]
    assert [(one["incident"], one["what"].split(":")[0]) for one in found] == [
        ("i-2", "bob says that it was a false alarm, and a decision had been made"),
        ("i-2", "gridctl would have it"),
        ("i-3", "gridctl would have it"),
        ("i-3", "eve turned a run back (aborted)"),
    ]


class Page(HTMLParser):
    """What a page would fetch, and its tags."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_opens_offline_and_shows_hostile_text_as_text(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "week.html"
    gridctl(home, "review", "--week", "2026-W10", "--format", "html", "--out", str(out))
    page = Page()
    page.feed(out.read_text())
    assert page.fetched == []
    assert "script" not in page.tags
    first = gridctl(home, "review", "--week", "2026-W10").stdout
    assert first == gridctl(home, "review", "--week", "2026-W10").stdout
    assert "\x1b" not in first


def test_weeks() -> None:
    assert week("2026-W10", 0.0) == ("2026-W10", MONDAY_UNIX_S, MONDAY_UNIX_S + WEEK_S)
    assert week("last", MONDAY_UNIX_S + WEEK_S + 5.0)[0] == "2026-W10"
    assert week("this", MONDAY_UNIX_S)[0] == "2026-W10"
    assert week("2020-W53", 0.0)[0] == "2020-W53"
    for text in ("2026-W54", "W10", "yesterday", "2026-W00", "9999-W99"):
        with pytest.raises(ValueError, match=r"."):
            week(text, 0.0)


def test_weeks_that_cannot_be(home: Path, tmp_path: Path) -> None:
    gridctl(home, "review", "--week", "2026-W60", expect=2)
    gridctl(home, "review", "--week", "2999-W01", expect=2)
    gridctl(tmp_path / "nothing", "review", expect=2)
