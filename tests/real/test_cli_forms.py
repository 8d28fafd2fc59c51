"""Every command prints real values of a real fleet in every form of output."""

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import typer
import yaml
from command_line import data
from swap_fleet import SwapFleet, parked, swap_fleet, training

from gridagent.ops.node import CordonState
from gridctl.cli.app import root
from gridctl.cli.output import Format
from gridctl.home import Home

BECAUSE = ["--yes", "--reason", "a test"]
#: They need no name of anything in the fleet.
PLAIN = (
    ("audit verify",),
    ("audit show",),
    ("ask",),
    ("ask", "swaps"),
    ("sql", "FROM runs"),
    ("history stats",),
    ("notify status",),
    ("journal verify",),
    ("policy list",),
    ("policy show", "xid 48"),
    ("help exit-codes",),
    ("doctor",),
    ("version",),
)
#: Their output is that of `run attach`, or goes through its forms in the tests of its own.
ELSEWHERE = {
    "run abort",
    "run rollback",
    "run resume",
    "enroll",
    "diagnose",
    "replay",
    "demo",
    "detect score",
    "reset apply",
    "incident compare",
    "history compact",
    "history export",
    "history import",
    "history retain",
    "notify silence",
    "notify test",
}


def commands(found: Any, *path: str) -> Iterator[str]:
    """All that have a form of output."""
    for name, inner in getattr(found, "commands", {}).items():
        yield from commands(inner, *path, name)
    if any(option.name == "output" for option in found.params):
        yield " ".join(path)


def printed(fleet: SwapFleet, capsys: pytest.CaptureFixture[str], form: Format, *arguments: str) -> str:
    """What a command prints, whose controller and agents are real; only its process is this one."""
    capsys.readouterr()
    root([*arguments, "-o", form.value], standalone_mode=False)
    out = capsys.readouterr().out
    match form:
        case Format.json:
            json.loads(out)
        case Format.yaml:
            list(yaml.safe_load_all(out))
        case Format.csv:
            widths = {len(row) for row in csv.reader(io.StringIO(out))}
            assert len(widths) == 1, out
    assert out.strip(), (arguments, form)
    return out


def cordon_again(fleet: SwapFleet, name: str) -> None:
    """As after another swap."""
    agent = fleet.agents[name]
    agent.end()
    (agent.home / "node.json").write_bytes(msgspec.json.encode(CordonState("gridctl", "after a swap")))
    agent.start()


def test_every_command_prints_real_values_in_every_form(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with swap_fleet() as fleet:
        fleet.nodes("n1", "n2", "n3", "n4", config='reboot = ["true"]')
        monkeypatch.setenv("GRIDCTL_HOME", str(fleet.root))
        assert Home.find().journal == fleet.home.journal
        client = fleet.controller()
        fleet.train("n1", "n2", "n3")
        fleet.park("n4", 2)
        job = training(client).name
        parked(client, 2)
        done = set()

        def all_forms(command: str, *arguments: str) -> None:
            for form in Format:
                printed(fleet, capsys, form, *command.split(), *arguments)
            done.add(command)

        all_forms("swap plan", "n2")
        plan = data(fleet.root, "swap", "plan", "n2")
        all_forms("swap apply", plan["id"], "--dry-run")
        run = json.loads(printed(fleet, capsys, Format.json, "swap", "apply", plan["id"], *BECAUSE))["id"]
        for command, *arguments in (
            *PLAIN,
            ("fleet",),
            ("nodes",),
            ("nodes", "n2"),
            ("jobs",),
            ("jobs", job),
            ("spares",),
            ("incidents", "--all"),
            ("incident show", plan["incident"]),
            ("run list",),
            ("run show", run),
            ("run attach", run),
            ("risk",),
            ("risk", "n2"),
            ("freeze", "--dry-run"),
            ("freeze", *BECAUSE),
            ("thaw", "--dry-run"),
            ("thaw", *BECAUSE),
            ("collect", "n1", "--dry-run"),
            ("collect", "n1", "--out", str(fleet.root / "evidence")),
            ("uncordon", "n2", "--dry-run"),
            ("reset plan", "n2", "--reboot"),
        ):
            all_forms(command, *arguments)
        for form in Format:
            assert "n2" in printed(fleet, capsys, form, "uncordon", "n2", *BECAUSE)
            assert not fleet.agents["n2"].client().status().cordoned
            cordon_again(fleet, "n2")
        done.add("uncordon")
        client.stop()
    assert done | ELSEWHERE == set(commands(typer.main.get_command(root)))
