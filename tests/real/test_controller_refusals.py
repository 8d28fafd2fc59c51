"""What a controller refuses, with real agents and a real job; every time the job trains on untouched."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from swap_fleet import SwapFleet, ended, gate, parked, swap_fleet, training, wait_for

from gridagent.journal import verify
from gridctl.control import ensure
from gridctl.control.client import Client
from gridctl.errors import GridctlError, Refused, Unanswered
from gridctl.home import Home
from gridctl.model.fleet import Node, Spare
from gridctl.model.plans import Gate, Plan, Request
from gridctl.model.refusals import MEANINGS

NAMES = ("n1", "n2", "n3", "n4")
YES = Gate(who="ann", reason="a test", yes=True)


@pytest.fixture(scope="module")
def fleet() -> Iterator[SwapFleet]:
    with swap_fleet() as made:
        made.nodes(*NAMES)
        client = made.controller()
        made.train("n1", "n2", "n3")
        made.park("n4")
        training(client)
        parked(client)
        yield made


@pytest.fixture
def client(fleet: SwapFleet) -> Client:
    return fleet.controller()


def refusal(call: Callable[[], Any]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    assert caught.value.code in MEANINGS
    return caught.value


def apply(client: Client, plan: Plan, **changes: Any) -> Refused:
    return refusal(lambda: client.apply(plan.id, msgspec.structs.replace(gate(plan), **changes)))


@pytest.fixture
def plan(client: Client) -> Plan:
    return client.plan(Request(node="n2", who="ann"))


@contextlib.contextmanager
def home_of(fleet: SwapFleet, root: Path, who: str = "operator", head: str = "") -> Iterator[Client]:
    """A controller of another operator of the same fleet."""
    home = Home.at(root)
    root.mkdir(exist_ok=True)
    (root / "trust").symlink_to(fleet.trust_of(who))
    text = fleet.home.fleet_file.read_text().replace('name = "testfleet"\n', f'name = "testfleet"\n{head}', 1)
    home.fleet_file.write_text(text)
    with ensure(home) as other:
        try:
            yield other
        finally:
            with contextlib.suppress(Unanswered, ValueError, OSError):
                os.kill(int(home.lock.read_text()), signal.SIGKILL)


def test_a_gate_that_does_not_fit(client: Client, plan: Plan) -> None:
    assert apply(client, plan, digest="f" * 64).code == "wrong-digest"
    assert apply(client, plan, reason="").code == "not-confirmed"
    assert apply(client, plan, typed="n1").code == "not-confirmed"
    assert refusal(lambda: client.dry_run("p-none")).code == "unknown-plan"
    assert client.view("runs", dict) == []


def test_a_dry_run_names_every_call_and_makes_none(fleet: SwapFleet, client: Client, plan: Plan) -> None:
    before = client.health()["journal_seq"]
    calls = client.dry_run(plan.id)
    assert {call.kind for call in calls} >= {"handover.specialise", "handover.cut", "node.uncordon"}
    assert "small_training" not in msgspec.json.encode(calls).decode()
    assert client.health()["journal_seq"] == before
    assert fleet.agents["n2"].client().status().cordoned is False


def test_frozen(fleet: SwapFleet, client: Client, plan: Plan) -> None:
    answers = client.freeze("fleet", YES)
    assert answers == [{"node": name, "answer": "ok"} for name in NAMES]
    try:
        with home_of(fleet, fleet.root / "bob") as other:
            text = refusal(lambda: other.plan(Request(node="n2"))).text
            assert "the fleet is frozen on n2 by ann (a test)" in text, "the other operator is told by whom"
            wait_for("it is shown too", lambda: frozen_by(other) == ["ann (a test)"] * len(NAMES))
        found = apply(client, plan)
        assert (found.code, "frozen by ann (a test)" in found.text) == ("frozen", True)
        assert fleet.agents["n3"].client().status().frozen == ["fleet"]
    finally:
        client.thaw("fleet", YES)
    assert fleet.agents["n3"].client().status().frozen == []


def frozen_by(client: Client) -> list[str]:
    nodes = client.view("nodes", Node)
    return [node.status.frozen_by["fleet"] for node in nodes if node.status and node.status.frozen]


def test_what_has_changed_since_the_plan(fleet: SwapFleet, client: Client, plan: Plan) -> None:
    agent = fleet.agents["n2"].client()
    fence = agent.status().fence + 1
    agent.lease("slurm", fence)
    agent.op("node.cordon", {"reason": "maintenance", "owner": "slurm"}, holder="slurm", fence=fence)
    try:
        agent.lease("slurm", fence, 0.0)
        found = apply(client, plan)
        assert (found.code, "cordon of n2: was no, is slurm" in found.text) == ("stale-plan", True)
    finally:
        agent.lease("slurm", fence)
        agent.op("node.uncordon", {"owner": "slurm"}, holder="slurm", fence=fence)
        agent.lease("slurm", fence, 0.0)


def test_an_expired_plan(fleet: SwapFleet, client: Client) -> None:
    fleet.home.policy_file.write_text("plan_expiry_s = 0.01\n")
    try:

        def short_lived() -> Plan | None:
            plan = client.plan(Request(node="n2"))
            return plan if plan.expires_unix_s - plan.created_unix_s < 1 else None

        assert apply(client, wait_for("the policy is read", short_lived)).code == "expired-plan"
    finally:
        fleet.home.policy_file.unlink()
    wait_for("the policy is read", lambda: not short_lived())


def test_another_controller_acts(fleet: SwapFleet, client: Client, plan: Plan) -> None:
    agents = [agent.client() for agent in fleet.agents.values()]
    fence = max(agent.status().fence for agent in agents) + 1
    for agent in agents:
        agent.lease("rival", fence)
    try:
        found = apply(client, plan)
        assert (found.code, "rival acts on" in found.text) == ("fenced", True)
    finally:
        for agent in agents:
            agent.lease("rival", fence, 0.0)


def test_a_node_that_cannot_take_the_lease_lets_no_run_begin(
    fleet: SwapFleet, client: Client, plan: Plan
) -> None:
    """A majority would do for the lease, and the spare's node would then refuse what the run asks of it."""
    lease, runs = fleet.agents["n4"].home / "lease.json", client.view("runs", dict)
    lease.unlink(missing_ok=True)
    (lease / "in the way").mkdir(parents=True)
    try:
        found = apply(client, plan)
        assert (found.code, "n4 did not grant the lease: " in found.text) == ("no-lease", True)
        assert client.view("runs", dict) == runs
        assert not any(agent.client().status().cordoned for agent in fleet.agents.values())
        assert not any(agent.client().status().lease_holder for agent in fleet.agents.values())
    finally:
        shutil.rmtree(lease)


def test_a_majority_must_grant_the_lease(fleet: SwapFleet, client: Client, plan: Plan) -> None:
    rest = "".join(f'[[node]]\nname = "x{i}"\nurl = "https://127.0.0.9:{i}"\n' for i in range(1, 6))
    text = fleet.home.fleet_file.read_text()
    fleet.home.fleet_file.write_text(text + rest)
    try:
        wait_for("the file is read", lambda: len(client.view("nodes", Node)) == 9)
        found = apply(client, plan)
        assert (found.code, "4 of 9 agents granted" in found.text) == ("no-lease", True)
    finally:
        fleet.home.fleet_file.write_text(text)
    wait_for("the file is read", lambda: len(client.view("nodes", Node)) == 4)


def test_a_viewer_sees_and_does_not_act(fleet: SwapFleet) -> None:
    with home_of(fleet, fleet.root / "viewer-home", "viewer") as viewer:
        assert len(viewer.view("nodes", Node)) == 4
        found = refusal(lambda: viewer.plan(Request(node="n2")))
        assert (found.code, "for operator" in found.text) == ("forbidden", True)


def test_a_read_only_controller_changes_nothing(fleet: SwapFleet) -> None:
    with home_of(fleet, fleet.root / "read-only", head="read_only = true\n") as other:
        assert other.health()["mode"] == "read-only"
        assert refusal(lambda: other.freeze("fleet", YES)).code == "read-only"
        assert refusal(lambda: other.apply("p", YES)).code == "read-only"


def test_a_policy_that_cannot_be_read_lets_nothing_begin(
    fleet: SwapFleet, client: Client, plan: Plan
) -> None:
    fleet.home.policy_file.write_text('require_same_rack = "perhaps"\n')
    try:
        wait_for("the controller has read it", lambda: said_no(client) or None)
        with pytest.raises(GridctlError, match=r"policy\.toml"):
            client.apply(plan.id, gate(plan))
    finally:
        fleet.home.policy_file.unlink()
    wait_for("the controller plans again", lambda: not said_no(client) or None)


def said_no(client: Client) -> bool:
    try:
        client.plan(Request(node="n2"))
    except GridctlError as error:
        return "policy.toml" in str(error)
    return False


def test_a_journal_that_was_changed_lets_nothing_begin(fleet: SwapFleet) -> None:
    with home_of(fleet, fleet.root / "changed") as other:
        other.plan(Request(node="n2"))
        home = Home.at(fleet.root / "changed")
        pid = int(home.lock.read_text())
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        (segment,) = home.journal.glob("*.jsonl")
        segment.write_bytes(segment.read_bytes().replace(b"wants lm to leave", b"wants xx to leave", 1))
        with ensure(home) as again:
            found = refusal(lambda: again.plan(Request(node="n2")))
            assert (found.code, "the record was changed" in found.text) == ("journal", True)
            assert len(again.view("nodes", Node)) == 4, "it still shows"


def test_a_rank_that_says_nothing(fleet: SwapFleet, client: Client) -> None:
    source = next(r for r in fleet.agents["n2"].client().status().ranks)
    os.kill(source.pid, signal.SIGSTOP)
    try:
        found = refusal(lambda: client.plan(Request(node="n2")))
        assert (found.code, "a process that hangs cannot be moved live" in found.text) == (
            "rank-silent",
            True,
        )
    finally:
        os.kill(source.pid, signal.SIGCONT)


def test_a_silent_node_is_unknown_and_not_failed(fleet: SwapFleet, client: Client) -> None:
    agent = fleet.agents["n2"]
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    try:
        found = refusal(lambda: client.plan(Request(node="n2")))
        assert (found.code, "not the same as failed" in found.text) == ("node-unreachable", True)
    finally:
        agent.process.send_signal(signal.SIGCONT)
    training(client)


def test_a_full_disk(fleet: SwapFleet) -> None:
    root = fleet.root / "small-home"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(root)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        with home_of(fleet, root) as other:
            plan = other.plan(Request(node="n2"))
            fill(root)
            found = apply(other, plan, reason="longer than what is left of a block " * 120)
            assert (found.code, "no space left for the journal" in found.text) == ("disk-full", True)
            assert other.view("runs", dict) == []
            assert fleet.agents["n2"].client().status().cordoned is False
            assert refusal(lambda: other.plan(Request(node="n2"))).code == "disk-full"
            other.freeze("lm", YES)  # a stop works all the same
            assert fleet.agents["n1"].client().status().frozen == ["lm"]
            (root / "ballast").unlink()
            other.thaw("lm", YES)
            assert verify(root / "journal").ok
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(b"x" * 512)


def test_one_controller_for_a_home(fleet: SwapFleet, client: Client) -> None:
    from gridctl.control import main

    with pytest.raises(GridctlError, match="another controller works in"):
        main(fleet.home)
    assert client.health()["pid"] == fleet.controller_pid()


def test_two_operators_at_once(fleet: SwapFleet, client: Client) -> None:
    """The second is told who steers; the first one's run is held up so long by a spare that sleeps."""
    (spare,) = fleet.agents["n4"].client().status().spares
    with home_of(fleet, fleet.root / "second") as other:
        theirs = other.plan(Request(node="n3", who="bob"))
        ours = client.plan(Request(node="n2", who="ann"))
        os.kill(spare.pid, signal.SIGSTOP)
        try:
            run = client.apply(ours.id, gate(ours))
            holder = client.health()["holder"]
            found = apply(other, theirs)
            assert (found.code, f"{holder} acts on" in found.text) == ("fenced", True), found.text
            assert "holds the lease for" in found.text
            wait_for("the spare is asked", lambda: spare_state(other) == "specialising")
            found = refusal(lambda: other.plan(Request(node="n3")))
            assert f"the one on n4 is specialising, {holder} steers there" in found.text
            client.abort(run.id, YES)
        finally:
            os.kill(spare.pid, signal.SIGCONT)
        assert ended(client, run.id).state == "aborted"
        assert other.health()["holder"] != holder


def spare_state(client: Client) -> str:
    return "".join(spare.state for spare in client.view("spares", Spare))


def test_after_all_of_it_the_job_is_whole(fleet: SwapFleet, client: Client) -> None:
    job = training(client)
    assert (job.epoch, [rank.node for rank in job.ranks]) == (0, ["n1", "n2", "n3"])
    fleet.finish_job()
