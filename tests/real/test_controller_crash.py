"""Runs that do not go as planned, with real agents and a real job: kills, aborts, silence, a dead spare."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import pytest
from swap_fleet import PATIENCE_S, SwapFleet, ended, gate, parked, swap_fleet, training, wait_for

from gridagent.journal import Record, Tail, read, verify
from gridctl.control.client import Client
from gridctl.errors import Refused
from gridctl.model.plans import Gate, Plan, Request
from gridctl.model.runs import Incident, Run

YES = Gate(who="ann", reason="a test", yes=True)


@pytest.fixture
def fleet(request: pytest.FixtureRequest) -> Iterator[SwapFleet]:
    with swap_fleet(execute=getattr(request, "param", False)) as made:
        made.nodes("n1", "n2", "n3", "n4")
        client = made.controller()
        made.train("n1", "n2", "n3")
        made.park("n4")
        training(client)
        parked(client)
        yield made


def started(fleet: SwapFleet, client: Client) -> tuple[Plan, Run, Iterator[Record]]:
    """A run in hand, and the journal's records from its start on."""
    plan = client.plan(Request(node="n2", who="ann"))
    tail = Tail(fleet.home.journal, client.health()["journal_seq"])
    return plan, client.apply(plan.id, gate(plan)), records(tail)


def moved_once(fleet: SwapFleet, client: Client, run: Run) -> None:
    """Rank 1 trains on n4, and no agent did anything of the run twice."""
    job = training(client, step=max(fleet.steps(0)) + 5)
    assert (job.epoch, job.ranks[1].node) == (1, "n4")
    for node in fleet.agents:
        done = [op for op in ops(fleet, node) if op.startswith(run.id)]
        assert len(done) == len(set(done))


def records(tail: Tail) -> Iterator[Record]:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        yield from tail.new()
        time.sleep(0.002)
    raise AssertionError("nothing more came into the journal")


def until(journal: Iterator[Record], step: str, state: str = "started") -> None:
    next(r for r in journal if r.kind == "step" and (r.data["step"], r.data["state"]) == (step, state))


def ops(fleet: SwapFleet, node: str) -> list[str]:
    """The operations that a node has accepted, by id."""
    found = [record.data for record in read(fleet.agents[node].home / "ops") if record.kind == "step"]
    return [data["request"]["id"] for data in found if data["event"] == "accepted"]


def untouched(fleet: SwapFleet, client: Client) -> None:
    """The old members train on in the old epoch and the node is as it was."""
    job = training(client, step=max(fleet.steps(0)) + 5)
    assert (job.epoch, [rank.node for rank in job.ranks]) == (0, ["n1", "n2", "n3"])
    assert fleet.agents["n2"].client().status().cordoned is False


def test_a_controller_killed_three_times_in_one_run_does_nothing_twice(fleet: SwapFleet) -> None:
    client = fleet.controller()
    second = client.plan(Request(node="n3", who="bob"))
    _, run, journal = started(fleet, client)
    for step in ("specialise", "cut", "watch"):
        until(journal, step)
        client = fleet.kill_controller()
        found = client.one("run", run.id, Run)
        assert found.state == "interrupted"
        with pytest.raises(Refused, match="wait for its end, or end it"):
            client.apply(second.id, gate(second))
        client.resume(run.id, YES)
    found = ended(client, run.id)
    assert found.state == "done", found
    moved_once(fleet, client, run)
    with pytest.raises(Refused, match="a new hand-over"):
        client.rollback(run.id, YES)
    fleet.finish_job()
    assert verify(fleet.home.journal).ok


def test_a_run_of_its_own_is_resumed_by_each_next_controller_and_does_nothing_twice(
    fleet: SwapFleet,
) -> None:
    fleet.home.policy_file.write_text("auto = true\n")
    client = fleet.controller()
    plan = client.plan(Request(node="n2", who="gridctl"))
    tail = Tail(fleet.home.journal, client.health()["journal_seq"])
    agreed = Gate(digest=plan.digest, who="policy", reason="memory errors", yes=True)
    run, journal = client.apply(plan.id, agreed), records(tail)
    for step in ("specialise", "cut", "watch"):
        until(journal, step)
        client = fleet.kill_controller()
    found = wait_for("the run ends", lambda: run_ended(client, run.id))
    assert found.state == "done", found
    moved_once(fleet, client, run)
    told = [r.data for r in read(fleet.home.journal) if r.data.get("what") == "resume"]
    assert [(data["who"], data["run"]) for data in told] == [("policy", run.id)] * 3
    fleet.finish_job()
    assert verify(fleet.home.journal).ok


def test_an_abort_before_the_cut_leaves_everything_as_it_was(fleet: SwapFleet) -> None:
    client = fleet.controller()
    plan, run, journal = started(fleet, client)
    until(journal, "specialise")
    client.abort(run.id, YES)
    found = ended(client, run.id)
    assert (found.state, found.text) == ("aborted", "aborted by ann: a test")
    untouched(fleet, client)
    assert parked(client), "a fresh spare was parked in place of the one that was used up"
    with pytest.raises(Refused, match="was applied as run"):
        client.apply(plan.id, gate(plan))
    fleet.finish_job()


def test_a_killed_controller_s_run_can_be_rolled_back(fleet: SwapFleet) -> None:
    client = fleet.controller()
    _, run, journal = started(fleet, client)
    until(journal, "join")
    fleet.home.policy_file.write_text("auto = true\n")
    client = fleet.kill_controller()
    wait_for("it is told that the run waits", lambda: waits(client, run))
    assert client.one("run", run.id, Run).state == "interrupted", "a person began it"
    client.rollback(run.id, YES)
    found = ended(client, run.id)
    assert found.state == "rolled-back", found
    untouched(fleet, client)
    fleet.finish_job()


@pytest.mark.parametrize("fleet", [True], indirect=True, ids=["executed"])  # as the agent starts a spare
def test_a_spare_that_dies_turns_the_run_back_and_the_next_plan_works(fleet: SwapFleet) -> None:
    client = fleet.controller()
    plan, run, journal = started(fleet, client)
    until(journal, "join")
    spare = fleet.known(fleet.agents["n4"], plan.moves[0].target.session)
    os.kill(spare.pid, signal.SIGKILL)
    found = ended(client, run.id)
    assert found.state == "aborted", found
    untouched(fleet, client)
    parked(client)
    _, run, _ = started(fleet, client)
    found = ended(client, run.id)
    assert found.state == "done", found
    fleet.finish_job()


def test_a_rank_that_never_acknowledges_ends_in_an_abort(fleet: SwapFleet) -> None:
    client = fleet.controller()
    survivor = fleet.agents["n3"].client().status().ranks[0]
    _, run, journal = started(fleet, client)
    until(journal, "join", "done")
    os.kill(survivor.pid, signal.SIGSTOP)
    try:
        found = ended(client, run.id)
    finally:
        os.kill(survivor.pid, signal.SIGCONT)
    assert (found.state, found.code) == ("aborted", "cut-aborted"), found
    untouched(fleet, client)
    fleet.finish_job()


def test_the_death_of_the_chair_s_agent_does_not_reach_into_the_cut(fleet: SwapFleet) -> None:
    client = fleet.controller()
    plan, run, journal = started(fleet, client)
    agent = fleet.agents[plan.chair.node]
    until(journal, "cut")
    agent.end(signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        (agent.home / "url").unlink()
    port = plan.chair.url.rpartition(":")[2]
    config = (agent.home / "agent.toml").read_text()
    (agent.home / "agent.toml").write_text(config.replace(':0"', f':{port}"', 1))
    agent.start()
    found = wait_for("the run ends", lambda: run_ended(client, run.id))
    job = training(client, step=max(fleet.steps(0)) + 5)
    expected = ("done", 1) if job.ranks[1].node == "n4" else ("aborted", 0)
    assert (found.state, job.epoch) == expected, found
    fleet.finish_job()


def waits(client: Client, run: Run) -> bool:
    told = client.one("incident", run.incident, Incident).timeline
    return any(f"gridctl run resume {run.id}" in moment.what for moment in told if moment.kind == "note")


def run_ended(client: Client, run: str) -> Run | None:
    found = client.one("run", run, Run)
    return found if found.state in ("done", "aborted", "held") else None
