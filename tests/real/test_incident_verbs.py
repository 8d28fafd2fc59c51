"""What people do to an incident, through a real controller, while detection goes on."""

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from command_line import COMMAND, OnTerminal, data, environment, gridctl
from swap_fleet import SwapFleet, swap_fleet, wait_for

from gridagent.journal import read, verify
from gridctl.cli.exits import Exit
from gridctl.control import ensure
from gridctl.errors import Refused
from gridctl.home import Home
from gridctl.model.runs import Act, Incident

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\n</script><b>ok</b> [/red] | `x`"
YES = ("--yes", "--reason", "a test")


@pytest.fixture(scope="module")
def fleet() -> Iterator[SwapFleet]:
    with swap_fleet() as made:
        kernel_log(made).touch()
        made.nodes("n1", config=f'sources = ["log:{kernel_log(made)}?as=kmsg"]')
        made.controller()
        wait_for("the node is followed", lambda: data(made.root, "fleet")["followed"])
        yield made


def kernel_log(fleet: SwapFleet) -> Path:
    return fleet.root / "kern.log"


def fails(fleet: SwapFleet, gpu: int, xid: int = 63) -> None:
    """The node's kernel says that a GPU fails."""
    stamp = f"Dec  1 01:31:{gpu:02d} n1 kernel: [ 1000.{gpu:06d}]"
    with kernel_log(fleet).open("a") as log:
        log.write(f"{stamp} NVRM: Xid (PCI:0000:{gpu:02x}:00): {xid}, pid=1, name=x, Row remapping event\n")


def open_ones(fleet: SwapFleet) -> list[Incident]:
    return [i for i in fleet.clients[-1].view("incidents", Incident) if i.state == "open"]


def begin(fleet: SwapFleet, gpu: int) -> Incident:
    """A fresh incident."""
    for old in open_ones(fleet):
        gridctl(fleet.root, "incident", "close", old.id, "--verdict", "unknown", *YES)
    fails(fleet, gpu)
    return wait_for("an incident is open", lambda: open_ones(fleet))[0]


def test_an_incident_from_its_first_line_to_its_verdict(fleet: SwapFleet) -> None:
    root, name = fleet.root, begin(fleet, 1).id
    assert data(root, "incidents")[0]["acked_by"] == ""
    gridctl(root, "incident", "ack", name, "--yes", "--reason", "on it")
    (shown,) = data(root, "incidents")
    who = shown["acked_by"]
    assert "@" in who
    assert who in gridctl(root, "incidents").stdout
    gridctl(root, "incident", "assign", name, "bob", *YES)
    assert data(root, "incidents")[0]["assigned_to"] == "bob"
    gridctl(root, "incident", "note", name, "-", types="words\nfrom stdin")
    gridctl(root, "incident", "link", name, "https://tickets.example/7", *YES)
    found = len(shown["findings"])
    fails(fleet, 2)
    wait_for("detection adds to it", lambda: len(open_ones(fleet)[0].findings) > found)
    (more,) = open_ones(fleet)
    assert (more.id, more.acked_by) == (name, who)
    gridctl(root, "incident", "close", name, "--verdict", "false-alarm", "--yes", "--reason", "a bad cable")
    fails(fleet, 3)
    (fresh,) = wait_for("what comes then opens another", lambda: open_ones(fleet))
    assert fresh.id != name
    told = data(root, "incident", "show", name)
    assert (told["state"], told["verdict"]) == ("closed", "false_alarm")
    assert told["notes"][0]["reason"] == "words\nfrom stdin"
    assert all("0000:03" not in str(finding) for finding in told["findings"])
    rows = data(root, "incident", "compare", name, fresh.id)
    assert {"what": "kind", "a": more.kind, "b": fresh.kind} in rows
    for form in ("table", "csv", "yaml"):
        assert "signals in common" in gridctl(root, "incident", "compare", name, fresh.id, "-o", form).stdout
    text = gridctl(root, "incident", "report", name).stdout
    assert "a bad cable" in text
    assert "https://tickets.example/7" in text
    assert "Xid 63" in text


def test_the_same_twice_is_once(fleet: SwapFleet) -> None:
    root, name = fleet.root, begin(fleet, 4).id

    def twice(*arguments: str) -> None:
        gridctl(root, "incident", *arguments)
        before = [r.data for r in read(fleet.home.journal) if "who" in r.data]
        gridctl(root, "incident", *arguments)
        assert [r.data for r in read(fleet.home.journal) if "who" in r.data] == before, arguments

    twice("ack", name, *YES)
    twice("note", name, "the same words")
    twice("close", name, "--verdict", "unknown", *YES)
    twice("reopen", name, *YES)
    other = begin(fleet, 5).id
    twice("merge", name, "--into", other, *YES)
    assert data(root, "incident", "show", name)["merged_into"] == other
    assert data(root, "incident", "show", other)["merged"] == [name]
    gridctl(root, "incident", "merge", other, "--into", name, *YES, expect=Exit.REFUSED)


def test_two_people_at_once_and_a_controller_that_is_killed_lose_nothing(fleet: SwapFleet) -> None:
    name = begin(fleet, 6).id

    def writes(who: str) -> None:
        with ensure(Home.at(fleet.root)) as client:
            for number in range(20):
                client.act(name, "note", Act(who=who, reason=f"word {number}"))
            client.act(name, "ack", Act(who=who, reason="mine"))

    with ThreadPoolExecutor(2) as both:
        list(both.map(writes, ("ann", "bob")))
    found = fleet.kill_controller().one("incident", name, Incident)
    notes = {(note["who"], note["reason"]) for note in found.notes}
    assert notes == {(who, f"word {number}") for who in ("ann", "bob") for number in range(20)}
    assert found.acked_by in ("ann", "bob")
    assert sum("has it in hand" in moment.what for moment in found.timeline) == 2
    assert verify(fleet.home.journal).ok


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["ack", "i-zz", *YES], Exit.NOT_FOUND, "no incident i-zz"),
        (["ack", HOSTILE, *YES], Exit.NOT_FOUND, "no incident"),
        (["report", HOSTILE], Exit.NOT_FOUND, "no incident"),
        (["compare", "i-zz", "i-zz"], Exit.NOT_FOUND, "i-zz"),
        (["ack", "ID"], Exit.REFUSED, "--yes --reason"),
        (["ack", "ID", "--yes"], Exit.USAGE, "--reason"),
        (["ack", "ID", "--yes", "--reason", "  "], Exit.USAGE, "--reason"),
        (["note", "ID", " "], Exit.REFUSED, "words"),
        (["link", "ID", "javascript:alert(1)", *YES], Exit.REFUSED, "https://"),
        (["close", "ID", "--verdict", "maybe", *YES], Exit.USAGE, "true-fault"),
        (["close", "ID", *YES], Exit.USAGE, "--verdict"),
        (["merge", "ID", "--into", "ID", *YES], Exit.REFUSED, "itself"),
        (["merge", "ID", "--into", "i-zz", *YES], Exit.NOT_FOUND, "i-zz"),
    ],
)
def test_every_no_is_clear_and_writes_nothing(
    fleet: SwapFleet, arguments: list[str], code: Exit, word: str
) -> None:
    name = (open_ones(fleet) or [begin(fleet, 7)])[0].id
    before = len([r for r in read(fleet.home.journal) if "who" in r.data])
    filled = [name if argument == "ID" else argument for argument in arguments]
    said = gridctl(fleet.root, "incident", *filled, expect=code).stderr
    assert word in re.sub(r"\s+", " ", said)
    assert not set(said) & set("\x1b\x07\r")
    assert len([r for r in read(fleet.home.journal) if "who" in r.data]) == before


def test_a_note_of_a_megabyte_is_refused_and_says_how_much_is_taken(fleet: SwapFleet) -> None:
    name = (open_ones(fleet) or [begin(fleet, 8)])[0].id
    done = subprocess.run(
        [*COMMAND, "incident", "note", name, "-"],
        env=environment(fleet.root),
        input=b"x\xff" * (3 << 19),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == Exit.REFUSED, done.stderr
    assert b"65536" in done.stderr
    with pytest.raises(Refused):
        fleet.clients[-1].act(name, "note", Act(who="ann", reason="x" * (2 << 20)))
    assert fleet.clients[-1].health()["pid"], "the controller goes on"


def test_hostile_words_act_nowhere(fleet: SwapFleet) -> None:
    name = (open_ones(fleet) or [begin(fleet, 9)])[0].id
    gridctl(fleet.root, "incident", "note", name, "-", types=HOSTILE)
    gridctl(fleet.root, "incident", "assign", name, HOSTILE, *YES)
    person = OnTerminal(fleet.root, "incident", "show", name, TERM="xterm", NO_COLOR="1")
    assert person.ends() == Exit.OK
    assert not set(person.screen) & set("\x1b\x07")
    for form in ("md", "html"):
        text = gridctl(fleet.root, "incident", "report", name, "-f", form).stdout
        assert not set(text) & set("\x1b\x07\r")
    assert "<b>ok" not in text
    told = json.loads(gridctl(fleet.root, "incident", "report", name, "-f", "json").stdout)
    assert told["incident"]["assigned_to"] == HOSTILE, "data stays what it is"


def test_a_person_is_asked_for_a_reason(fleet: SwapFleet) -> None:
    name = (open_ones(fleet) or [begin(fleet, 10)])[0].id
    person = OnTerminal(fleet.root, "incident", "ack", name)
    person.sees("reason: ")
    person.types("typed at night")
    assert person.ends() == Exit.OK, person.screen
    assert any("typed at night" in m["what"] for m in data(fleet.root, "incident", "show", name)["timeline"])


def test_read_only_changes_nothing(fleet: SwapFleet) -> None:
    name = (open_ones(fleet) or [begin(fleet, 11)])[0].id
    gridctl(fleet.root, "--read-only", "incident", "note", name, "words", expect=Exit.REFUSED)
    gridctl(fleet.root, "--read-only", "incident", "report", name)
