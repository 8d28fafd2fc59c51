"""The command line against a real controller and real agents; no job is needed for any of this."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from agents import wait_for
from command_line import COMMAND, OnTerminal, data, environment, gridctl
from swap_fleet import SwapFleet, swap_fleet

from gridagent import journal
from gridctl.cli.exits import Exit

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\nok  all is well [/red] %s {}"


@pytest.fixture(scope="module")
def fleet() -> Iterator[SwapFleet]:
    with swap_fleet() as made:
        made.nodes("n1", "n2")
        yield made


def test_what_nodes_are_is_in_the_history(fleet: SwapFleet) -> None:
    gridctl(fleet.root, "nodes")
    query = "SELECT node, rack, serial, spare FROM nodes WHERE serial IS NOT NULL ORDER BY node"
    wait_for("facts of both nodes", lambda: len(data(fleet.root, "sql", query)) == 2)
    before = data(fleet.root, "sql", "SELECT count(*) AS n FROM events WHERE kind = 'facts'")
    found = {its["name"]: its for its in data(fleet.root, "nodes")}
    for row in data(fleet.root, "sql", query):
        assert row["rack"] == found[row["node"]]["rack"]
        assert row["spare"] is False
    assert data(fleet.root, "sql", "SELECT count(*) AS n FROM events WHERE kind = 'facts'") == before


READING = [
    *(
        "fleet",
        "nodes",
        "nodes n1",
        "jobs",
        "spares",
        "incidents --all",
        "run list",
        "risk",
        "risk --skill",
    ),
    *("doctor", "version"),
]


@pytest.mark.parametrize("command", READING)
def test_a_reading_command_has_four_forms(fleet: SwapFleet, command: str) -> None:
    arguments = command.split()
    shown = gridctl(fleet.root, *arguments)
    rows = list(csv.DictReader(io.StringIO(gridctl(fleet.root, *arguments, "-o", "csv").stdout)))
    found = data(fleet.root, *arguments)
    same = yaml.safe_load(gridctl(fleet.root, *arguments, "-o", "yaml").stdout)
    assert type(found) is type(same)
    if isinstance(found, list):
        assert len(found) == len(same) == len(rows)
        assert bool(shown.stdout) == bool(found)
        assert shown.stdout or shown.stderr, "an empty table says that it is empty"
    else:
        assert found.keys() == same.keys() == rows[0].keys()


def test_nodes_are_there_in_full(fleet: SwapFleet) -> None:
    nodes = {node["name"]: node for node in data(fleet.root, "nodes")}
    assert set(nodes) == {"n1", "n2"}
    assert nodes["n1"]["reachable"] is True
    assert nodes["n1"]["status"]["serial"] == "SN-n1"
    assert nodes["n1"]["status"]["quarantined"] is False, "members with their default value are there too"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("nodes zz", Exit.NOT_FOUND),
        ("jobs zz", Exit.NOT_FOUND),
        ("run show r-zz", Exit.NOT_FOUND),
        ("run abort r-zz --yes --reason x", Exit.NOT_FOUND),
        ("incident show i-zz", Exit.NOT_FOUND),
        ("swap apply p-zz --yes --reason x", Exit.NOT_FOUND),
        ("swap plan zz", Exit.NOT_FOUND),
        ("swap plan n1", Exit.REFUSED),
        ("risk zz", Exit.NOT_FOUND),
        ("risk n1 --skill", Exit.USAGE),
        ("freeze", Exit.REFUSED),
        ("freeze --reason x", Exit.REFUSED),
        ("freeze --yes", Exit.USAGE),
        ("uncordon zz --yes --reason x", Exit.NOT_FOUND),
        ("uncordon n1 --yes --reason x", Exit.REFUSED),
        ("uncordon n1 --yes", Exit.USAGE),
    ],
)
def test_every_no_has_its_exit_code(fleet: SwapFleet, command: str, code: Exit) -> None:
    done = gridctl(fleet.root, *command.split(), expect=code)
    assert done.stdout == ""
    assert done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run", "show", HOSTILE], Exit.NOT_FOUND),
        (["run", "show", "\n"], Exit.NOT_FOUND),
        (["incident", "show", HOSTILE], Exit.NOT_FOUND),
        (["nodes", HOSTILE], Exit.NOT_FOUND),
        (["jobs", HOSTILE], Exit.NOT_FOUND),
        (["risk", HOSTILE], Exit.NOT_FOUND),
        (["swap", "plan", HOSTILE], Exit.NOT_FOUND),
        (["swap", "plan", "n1", "--job", HOSTILE], Exit.NOT_FOUND),
        (["swap", "plan", "n1", "--to", HOSTILE], Exit.NOT_FOUND),
        (["swap", "apply", HOSTILE, "--yes", "--reason", "x"], Exit.NOT_FOUND),
        (["uncordon", HOSTILE, "--yes", "--reason", "x"], Exit.NOT_FOUND),
        (["collect", HOSTILE], Exit.NOT_FOUND),
        (["policy", "show", HOSTILE], Exit.NOT_FOUND),
        (["enroll", HOSTILE], Exit.USAGE),
        (["simulate", "out.jsonl", "--incident", HOSTILE], Exit.USAGE),
        (["replay", HOSTILE], Exit.ERROR),
        (["nodes", "-o", HOSTILE], Exit.USAGE),
        ([HOSTILE], Exit.USAGE),
    ],
)
def test_what_somebody_typed_is_shown_in_an_error_and_never_obeyed(
    fleet: SwapFleet, arguments: list[str], code: Exit
) -> None:
    said = gridctl(fleet.root, *arguments, expect=code).stderr
    assert not set(said) & set("\x1b\x07\r")
    assert said.startswith(("gridctl: ", "Usage: "))
    assert not any(line.startswith("ok") for line in said.splitlines()), said


def frozen(fleet: SwapFleet) -> list[list[str]]:
    return [agent.client().status().frozen for agent in fleet.agents.values()]


def test_a_person_freezes_on_a_terminal_and_a_script_thaws(fleet: SwapFleet) -> None:
    person = OnTerminal(fleet.root, "freeze")
    person.sees("name: ")
    person.types("fleet")
    person.sees("reason: ")
    person.types("smoke in the hall")
    assert person.ends() == Exit.OK, person.screen
    assert frozen(fleet) == [["fleet"], ["fleet"]]
    assert gridctl(fleet.root, "thaw", "--dry-run", "-o", "csv").stdout.count("/v1/freeze") == 2
    assert frozen(fleet) == [["fleet"], ["fleet"]], "a dry run changes nothing"
    answers = data(fleet.root, "thaw", "--yes", "--reason", "fan replaced")
    assert answers == [{"node": "n1", "answer": "ok"}, {"node": "n2", "answer": "ok"}]
    assert frozen(fleet) == [[], []]


def test_a_freeze_that_misses_a_node_says_so_and_is_passed_on(fleet: SwapFleet) -> None:
    agent = fleet.agents["n2"]
    agent.end()
    done = gridctl(fleet.root, "freeze", "--yes", "--reason", "a test", "-o", "json", expect=Exit.UNKNOWN)
    answers = {row["node"]: row["answer"] for row in json.loads(done.stdout)}
    assert (answers["n1"], answers["n2"] == "ok") == ("ok", False)
    assert "NOT on n2" in done.stderr
    agent.start()
    wait_for("the freeze is passed on", lambda: agent.client().status().frozen == ["fleet"])
    gridctl(fleet.root, "thaw", "--yes", "--reason", "over")


def test_a_freeze_that_an_agent_cannot_write_is_in_force_and_passed_on_until_it_is(fleet: SwapFleet) -> None:
    agent = fleet.agents["n2"]
    in_the_way = agent.home / "freeze.json" / "in the way"
    (agent.home / "freeze.json").unlink(missing_ok=True)
    in_the_way.mkdir(parents=True)
    seen = len(list(journal.read(agent.home / "ops")))
    written = len(list(journal.read(fleet.home.journal)))

    def relayed() -> list[list[str]]:
        records = list(journal.read(fleet.home.journal))[written:]
        return [record.data["missed"] for record in records if record.data.get("what") == "relayed"]

    def freezes() -> list[journal.Record]:
        records = list(journal.read(agent.home / "ops"))[seen:]
        return [record for record in records if record.data.get("event") == "freeze"]

    done = gridctl(fleet.root, "freeze", "--yes", "--reason", "a test", "-o", "json", expect=Exit.UNKNOWN)
    assert "NOT on n2, or not for good" in done.stderr
    assert "a restart of this agent would undo it" in json.loads(done.stdout)[1]["answer"]
    assert frozen(fleet) == [["fleet"], ["fleet"]]
    wait_for("it is passed on again and again", lambda: len(freezes()) > 2)
    assert relayed() == [["n2"]], "what is known already is not written down again"
    shutil.rmtree(in_the_way.parent)
    wait_for("the agent has written it", lambda: relayed() == [["n2"], []])
    gridctl(fleet.root, "thaw", "--yes", "--reason", "over")


def test_a_slip_at_the_gate_changes_nothing(fleet: SwapFleet) -> None:
    person = OnTerminal(fleet.root, "freeze")
    person.sees("name: ")
    person.types("flet")
    assert person.ends() == Exit.REFUSED
    assert frozen(fleet) == [[], []]


def test_what_a_node_says_cannot_act_on_the_terminal(fleet: SwapFleet) -> None:
    agent = fleet.agents["n2"].client()
    agent.lease(fence=1000)
    agent.op("node.cordon", {"reason": HOSTILE}, fence=1000)
    wait_for("the controller sees it", lambda: data(fleet.root, "nodes", "n2")[0]["status"]["cordoned"])
    person = OnTerminal(fleet.root, "nodes", TERM="xterm", NO_COLOR="1")
    assert person.ends() == Exit.OK
    assert "\x1b" not in person.screen
    assert "\x07" not in person.screen
    assert r"\x1b" in person.screen
    assert len(person.screen.splitlines()) == 3
    assert data(fleet.root, "nodes", "n2")[0]["status"]["cordon_reason"] == HOSTILE, "data stays what it is"
    agent.op("node.uncordon", fence=1000)
    agent.lease(fence=1000, ttl_s=0)


def test_somebody_elses_cordon_is_not_lifted(fleet: SwapFleet) -> None:
    agent = fleet.agents["n2"].client()
    agent.lease(fence=2000)
    agent.op("node.cordon", {"reason": "a burn-in", "owner": "scheduler"}, fence=2000)
    agent.lease(fence=2000, ttl_s=0)
    wait_for("the controller sees it", lambda: data(fleet.root, "nodes", "n2")[0]["status"]["cordoned"])
    said = gridctl(fleet.root, "uncordon", "n2", "--yes", "--reason", "x", expect=Exit.REFUSED).stderr
    assert "only scheduler lifts that" in said
    agent.lease(fence=3000)
    agent.op("node.uncordon", {"owner": "scheduler"}, fence=3000)
    agent.lease(fence=3000, ttl_s=0)


def test_a_table_fits_the_terminal_and_colours_are_a_choice(fleet: SwapFleet) -> None:
    narrow = OnTerminal(fleet.root, "nodes", TERM="xterm", COLUMNS="40")
    assert narrow.ends() == Exit.OK
    assert "\x1b[32mready\x1b[0m" in narrow.screen
    plain = narrow.screen.replace("\x1b[32m", "").replace("\x1b[0m", "")
    assert max(len(line.rstrip("\r")) for line in plain.split("\n")) <= 40


def test_watching_in_a_pipe_gives_one_document_for_each_change(fleet: SwapFleet) -> None:
    command = [*COMMAND, "nodes", "n1", "--watch", "-o", "json"]
    with subprocess.Popen(
        command, env=environment(fleet.root), stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())[0]["status"]["frozen"] == []
        gridctl(fleet.root, "freeze", "--yes", "--reason", "a test")
        lines = (json.loads(line)[0] for line in watching.stdout)
        assert next(node for node in lines if node["status"]["frozen"])
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == Exit.INTERRUPTED
    gridctl(fleet.root, "thaw", "--yes", "--reason", "a test")


def test_the_shell_completes_names_of_the_live_fleet(fleet: SwapFleet) -> None:
    gridctl(fleet.root, "nodes")
    done = subprocess.run(
        COMMAND,
        env=environment(
            fleet.root, _GRIDCTL_COMPLETE="complete_bash", COMP_WORDS="gridctl swap plan n", COMP_CWORD="3"
        ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["n1", "n2"], "")


def test_a_controller_is_started_where_none_runs_and_the_doctor_starts_none(fleet: SwapFleet) -> None:
    gridctl(fleet.root, "fleet")
    before = fleet.controller_pid()
    client = fleet.controller()
    client.stop()
    client.close()
    wait_for("it is gone", lambda: not fleet.home.socket.exists())
    unknown = [check["what"] for check in data(fleet.root, "doctor") if check["state"] == "unknown"]
    assert unknown == ["controller"]
    assert data(fleet.root, "fleet")["pid"] != before


def test_a_controller_that_hangs_is_named_and_does_not_hold_up_a_freeze(fleet: SwapFleet) -> None:
    gridctl(fleet.root, "fleet")
    pid = fleet.controller_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as both:
            looked = both.submit(gridctl, fleet.root, "nodes", expect=Exit.UNKNOWN)
            stopped = both.submit(gridctl, fleet.root, "freeze", "--yes", "--reason", "a test")
        assert f"kill -CONT {pid}" in looked.result().stderr
        assert "it goes from here to the agents instead" in stopped.result().stderr
        assert frozen(fleet) == [["fleet"], ["fleet"]]
    finally:
        os.kill(pid, signal.SIGCONT)
    gridctl(fleet.root, "thaw", "--yes", "--reason", "it goes on")
    assert fleet.controller_pid() == pid, "no other one was started beside it"
    assert frozen(fleet) == [[], []]


def test_the_journal_is_verified_and_one_changed_byte_is_found(fleet: SwapFleet) -> None:
    gridctl(fleet.root, "freeze", "--yes", "--reason", "something to write down")
    gridctl(fleet.root, "thaw", "--yes", "--reason", "something to write down")
    assert data(fleet.root, "journal", "verify")["ok"] is True
    copy = fleet.root / "copy"
    copy.mkdir()
    (copy / "journal").mkdir()
    for segment in fleet.home.journal.glob("*.jsonl"):
        text = segment.read_bytes()
        (copy / "journal" / segment.name).write_bytes(text.replace(b"something", b"everything", 1))
    found = json.loads(gridctl(copy, "journal", "verify", "-o", "json", expect=Exit.NOT_VERIFIED).stdout)
    assert found["ok"] is False
    assert found["what"]
    assert os.listdir(copy) == ["journal"]
