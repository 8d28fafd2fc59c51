"""A stop always works: with a full disk, without a controller, and across two operators' homes."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import data, gridctl
from swap_fleet import SwapFleet, swap_fleet, wait_for

from gridagent.journal import read
from gridctl.cli.exits import Exit
from gridctl.errors import Unanswered
from gridctl.home import Home


@pytest.fixture(scope="module")
def fleet() -> Iterator[SwapFleet]:
    with swap_fleet() as made:
        made.nodes("n1", "n2")
        yield made


@contextlib.contextmanager
def home_in(fleet: SwapFleet, root: Path, trust: Path | None = None) -> Iterator[Home]:
    """Another operator's home of the same fleet; its controller, if one came up, is ended."""
    home = Home.at(root)
    root.mkdir(exist_ok=True)
    (root / "trust").symlink_to(trust or fleet.home.trust)
    home.fleet_file.write_text(fleet.home.fleet_file.read_text())
    try:
        yield home
    finally:
        with contextlib.suppress(Unanswered, ValueError, OSError):
            os.kill(int(home.lock.read_text()), signal.SIGKILL)
        for agent in fleet.agents.values():
            if agent.process and agent.process.poll() is not None:
                agent.start()
            agent.client().post("/v1/freeze", {"scope": "fleet", "frozen": False, "who": "t", "reason": "t"})


@pytest.fixture
def small(fleet: SwapFleet) -> Iterator[Path]:
    """A folder on a disk of its own that is soon full."""
    root = fleet.root / "small"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        root.rmdir()
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield root
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)
        root.rmdir()


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(b"x" * 512)


def frozen(fleet: SwapFleet) -> list[dict[str, str]]:
    return [agent.client().status().frozen_by for agent in fleet.agents.values()]


REASON = ("--yes", "--reason", "smoke")


def test_where_no_controller_can_start_the_freeze_goes_straight_to_the_agents(fleet: SwapFleet) -> None:
    with home_in(fleet, fleet.root / "broken") as home:
        home.journal.write_text("no folder")
        done = gridctl(home.config, "freeze", *REASON, "-o", "json")
        assert json.loads(done.stdout) == [{"node": "n1", "answer": "ok"}, {"node": "n2", "answer": "ok"}]
        assert "is in no journal" in done.stderr
        assert "fleet: frozen" in done.stderr
        assert [by["fleet"].endswith("(smoke)") for by in frozen(fleet)] == [True, True]
        done = gridctl(home.config, "thaw", *REASON, expect=Exit.UNKNOWN)
        assert all("fleet" in by for by in frozen(fleet)), "to set going again needs a controller"
        fleet.agents["n2"].end()
        done = gridctl(home.config, "freeze", *REASON, expect=Exit.UNKNOWN)
        assert "NOT on n2, or not for good: freeze again once they answer" in done.stderr
        fleet.agents["n2"].start()


def test_a_full_disk_and_no_controller(fleet: SwapFleet, small: Path) -> None:
    with home_in(fleet, small) as home:
        fill(small)
        done = gridctl(home.config, "freeze", *REASON)
        assert "is in no journal" in done.stderr
        assert all("fleet" in by for by in frozen(fleet))


def test_a_full_disk_and_a_controller_that_passes_the_freeze_on(fleet: SwapFleet, small: Path) -> None:
    with home_in(fleet, small) as home:
        gridctl(home.config, "fleet")
        fill(small)
        fleet.agents["n2"].end()
        long = "longer than what is left of a block " * 120 + "disk"
        done = gridctl(home.config, "freeze", "--yes", "--reason", long, expect=Exit.UNKNOWN)
        assert "the journal cannot be written now" in done.stderr
        assert "NOT on n2, or not for good: it is passed on once they answer" in done.stderr
        assert data(home.config, "fleet")["journal_owed"] == ["fleet"]
        fleet.agents["n2"].start()
        wait_for("the freeze is passed on", lambda: all("fleet" in by for by in frozen(fleet)))
        (small / "ballast").unlink()
        wait_for("it is written", lambda: data(home.config, "fleet")["journal_owed"] == [])
        written = [(r.data["what"], r.data.get("reason")) for r in read(home.journal) if r.kind == "audit"]
        assert written[:2] == [("freeze", long), ("relayed", None)]
        gridctl(home.config, "thaw", *REASON)
        assert frozen(fleet) == [{}, {}]


def test_a_viewer_sees_and_freezes_nothing(fleet: SwapFleet) -> None:
    with home_in(fleet, fleet.root / "viewer", fleet.trust_of("viewer")) as home:
        assert [node["reachable"] for node in data(home.config, "nodes")] == [True, True]
        for verb in ("freeze", "thaw"):
            done = gridctl(home.config, verb, *REASON, expect=Exit.REFUSED)
            assert "is that of viewer viewer-1" in done.stderr
        assert relays(home) == []
    with home_in(fleet, fleet.root / "lost-viewer", fleet.trust_of("viewer")) as home:
        home.journal.write_text("no folder")
        done = gridctl(home.config, "freeze", *REASON, expect=Exit.REFUSED)
        assert "nothing was frozen" in done.stderr
    assert frozen(fleet) == [{}, {}]


def test_what_is_refused_to_a_revoked_operator_is_not_tried_again(fleet: SwapFleet) -> None:
    trust = fleet.root / "trust-eve"
    fleet.authority.write_identity(trust, "operator", "eve")
    with home_in(fleet, fleet.root / "eve", trust) as home:
        gridctl(home.config, "freeze", *REASON)
        gridctl(home.config, "thaw", *REASON)
        fleet.authority.revoke("operator/eve")
        pem = fleet.authority.crl_pem()
        fleet.agents["n1"].client().request("PUT", "/v1/crl", pem)
        done = gridctl(home.config, "freeze", *REASON, "-o", "json", expect=Exit.UNKNOWN)
        answers = {row["node"]: row for row in json.loads(done.stdout)}
        assert (answers["n1"]["refused"], "is revoked" in answers["n1"]["answer"]) == ("forbidden", True)
        assert answers["n2"] == {"node": "n2", "answer": "ok"}
        assert "NOT on n1: refused to this certificate, and not asked again" in done.stderr
        fleet.agents["n2"].client().request("PUT", "/v1/crl", pem)
        done = gridctl(home.config, "thaw", *REASON, expect=Exit.REFUSED)
        assert "NOWHERE" in done.stderr
        assert relays(home) == [([], ["n1"]), ([], ["n1", "n2"])]


def relays(home: Home) -> list[tuple[list[str], list[str]]]:
    """Whom a freeze or thaw has missed, and who refused it, as the journal has it."""
    records = [record.data for record in read(home.journal)]
    return [(data["missed"], data["refused"]) for data in records if data.get("what") == "relayed"]
