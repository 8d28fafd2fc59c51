"""What the facts of real agents forbid, asked on the command line; nothing changes at any of them.

Ranks and spares are sessions without torch: every one of these refusals comes before one is asked.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from agents import Agent
from command_line import gridctl
from swap_fleet import JOB, SwapFleet, swap_fleet
from trust_parties import forge

from gridctl.cli.exits import Exit
from gridctl.control import connect
from gridctl.home import Home
from gridctl.model.fleet import Node
from gridctl.trust import Authority

#: Members of a status that change by themselves.
PASSING = {"now_unix_s", "stream_seq", "complete"}
SKEW_S = 3600


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwapFleet]:
    with swap_fleet() as made:
        made.nodes("n1", "n2", "rack9", "driver560", "h200")
        for name, old, new in (
            ("rack9", 'rack = "r1"', 'rack = "r9"'),
            ("driver560", 'driver = "555"', 'driver = "560"'),
            ("h200", 'driver = "555"', 'driver = "555"\ngpu_model = "H200"'),
        ):
            change(made.agents[name], old, new)
        twin = made.agent("twin", 'serial = "SN-n2"\nrack = "r1"\ndriver = "555"\n').start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(other_clock(tmp_path_factory.mktemp("clock"))), prepend=":")
            late = made.agent("late", 'serial = "SN-late"\nrack = "r1"\ndriver = "555"\n').start()
        made.write_fleet_file()
        for rank, name in enumerate(("n1", "n2")):
            made.peer(made.agents[name], job=JOB, rank=rank, world_size=2)
        for agent in (*(made.agents[name] for name in ("rack9", "driver560", "h200")), twin, late):
            made.peer(agent, role="spare")
        yield made


def change(agent: Agent, old: str, new: str) -> None:
    """Starts the agent anew with another configuration."""
    agent.end()
    config = agent.home / "agent.toml"
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    agent.start()


def other_clock(folder: Path) -> Path:
    """A folder in whose company Python's wall clock is an hour ahead."""
    text = f"import time\n\nright = time.time\ntime.time = lambda: right() + {SKEW_S}\n"
    (folder / "sitecustomize.py").write_text(text)
    return folder


def told(fleet: SwapFleet) -> dict[str, Any]:
    """All that the agents say of themselves, and all that they have written down."""
    found: dict[str, Any] = {}
    for name, agent in fleet.agents.items():
        status = msgspec.to_builtins(agent.client().status())
        found[name] = {key: value for key, value in status.items() if key not in PASSING}
        found[f"{name}'s journal"] = [path.read_bytes() for path in sorted((agent.home / "ops").glob("*"))]
    return found


@pytest.mark.parametrize(
    ("spare", "policy", "words"),
    [
        ("twin", "", "the spare on twin is on the machine of n2 (both say chassis serial SN-n2)"),
        ("n2", "", "no spare"),
        ("driver560", "", "driver560 runs driver 560, n2 555: the policy asks for the same"),
        ("rack9", "require_same_rack = true", "rack9 stands in rack r9, n2 in r1"),
        ("h200", "", "h200 has GPUs of model H200, n2 of unknown"),
        ("late", "", "the clock of late is +3"),
        ("rack9", "require_attestation = true", "n2 is not_attested"),
    ],
)
def test_a_plan_is_refused_and_nothing_has_changed(
    fleet: SwapFleet, spare: str, policy: str, words: str
) -> None:
    fleet.home.policy_file.write_text(policy)
    assert len(fleet.controller().view("nodes", Node)) == len(fleet.agents), "and the policy is read"
    before = told(fleet)
    said = gridctl(fleet.root, "swap", "plan", "n2", "--to", spare, expect=Exit.REFUSED)
    assert said.stdout == ""
    assert words in said.stderr
    assert told(fleet) == before


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("stranger", "shows no certificate that this home's CA vouches for"),
        ("late", "has expired, a new one comes from `gridctl grant`"),
        ("early", "is not valid yet, or the clock is wrong here"),
    ],
)
def test_a_certificate_that_no_agent_takes_is_named_and_not_the_network(
    fleet: SwapFleet, tmp_path: Path, who: str, words: str
) -> None:
    if who == "stranger":
        Authority.ephemeral(tmp_path / "trust", "testfleet")
    else:
        made_days_ago = 2 if who == "late" else -2
        uri = "gridctl://testfleet/operator/eve"
        forge(tmp_path / "trust", fleet.authority, uri, days=1, made_days_ago=made_days_ago)
    shutil.copy(fleet.home.fleet_file, tmp_path)
    before = told(fleet)
    try:
        said = gridctl(tmp_path, "freeze", "--yes", "--reason", "a test", expect=Exit.UNKNOWN)
        assert said.stdout.count(words) == len(fleet.agents)
        planned = gridctl(tmp_path, "swap", "plan", "n2", expect=Exit.UNKNOWN)
        assert words in planned.stderr
    finally:
        with connect(Home.at(tmp_path)) as controller:
            controller.stop()
    assert told(fleet) == before
