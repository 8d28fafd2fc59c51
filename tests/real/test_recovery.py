"""A rank dies without warning, or connections break: all stand, and a plan brings a new process in."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from agents import DEADLINE_S
from crash_fleet import CrashFleet
from fleet import Job, Run, assert_same
from swap_fleet import wait_for

from gridagent.journal import read, verify
from gridctl.control import ensure
from gridctl.control.client import Client
from gridctl.model import fleet as model
from gridctl.model.plans import Gate, Plan, Request
from gridctl.model.runs import ENDS, Incident
from gridctl.model.runs import Run as OperatorRun


@contextmanager
def watched(crashing: CrashFleet, job: Job, fault: str, policy: str = "") -> Iterator[tuple[Client, Run]]:
    """The job with its steps as attempts and one fault, under a controller, with a spare on n5."""
    home = crashing.home()
    home.policy_file.write_text(policy)
    client = ensure(home)
    run = crashing.start(replace(job, args=(*job.args, "attempt", f"fault={fault}")), hold=None)
    run.left = [crashing.park(run)]
    left = ""
    try:
        yield client, run
        assert verify(home.journal).ok
    except BaseException:
        told = [
            (record.kind, record.data.get("text") or record.data.get("why")) for record in read(home.journal)
        ]
        print(*told, home.log.read_text(errors="replace")[-2000:], sep="\n")
        left = next((r.id for r in client.view("runs", OperatorRun) if r.state not in ENDS), "")
        raise
    finally:
        client.stop()
        client.close()
        for process in run.processes():
            process.kill()
        crashing.let_go(left)
        crashing.check_and_clear()


def stands(client: Client, run: Run) -> list[int]:
    """The ranks that stand, once the controller says of the job that it does."""

    def look() -> list[int]:
        jobs = [job for job in client.view("jobs", model.Job) if job.name == run.name]
        if not jobs or jobs[0].state != "standing":
            return []
        return [rank.rank for rank in jobs[0].ranks if rank.state == "standing"]

    return wait_for("the job stands", look)


def apply(client: Client, run: Run, node: str) -> Plan:
    """Plans, applies and waits; the run must be done."""
    wait_for(
        "a spare is parked", lambda: [s for s in client.view("spares", model.Spare) if s.state == "parked"]
    )
    found = lambda: [i for i in client.view("incidents", Incident) if i.kind == "rank_died"]  # noqa: E731
    if node not in [holder.agent.name for holder in run.ranks.values()]:
        wait_for("the death is an incident", found)
    plan = client.plan(Request(node=node, job=run.name, who="ann"))
    gate = Gate(digest=plan.digest, who="ann", reason="a test", typed=node)
    made = client.apply(plan.id, gate)

    found = wait_for("the run ends", lambda: ended_run(client, made.id))
    if found.code == "out-of-band":  # a job that overflows on purpose
        client.resume(made.id, Gate(who="ann", reason="a test", yes=True))
        found = wait_for("the run ends", lambda: ended_run(client, made.id))
    assert found.state == "done", (found.text, run.logs())
    return plan


CASES = [
    (Job("ddp", steps=24), "kill:late:9:1"),
    (Job("attributes", steps=24), "kill:backward:9:1"),  # an optimizer of one's own, numpy's numbers
    (Job("ddp", world=4, steps=24), "kill:tail:9:0"),  # rank 0, the host of the first store
]
MORE_CASES = [
    (Job("mixed", steps=24), "kill:backward:9:1"),
    (Job("ddp", steps=24), "kill:vote:9:2"),
    (Job("ddp", world=4, steps=24), "kill:start:9:1"),
    (Job("ddp", world=4, steps=24), "kill:tail:9:3"),
    (Job("ema", ("plain",), steps=24), "kill:forward:9:0"),
    (Job("ddp", ("torchdata",), steps=24), "kill:memory:9:2"),
]
CASES += [pytest.param(*case, marks=pytest.mark.matrix) for case in MORE_CASES]


@pytest.mark.parametrize(("job", "fault"), CASES, ids=lambda case: getattr(case, "kind", case))
def test_a_rank_that_dies_costs_no_step(crashing: CrashFleet, job: Job, fault: str) -> None:
    rank = int(fault.rpartition(":")[2])
    with watched(crashing, job, fault) as (client, run):
        assert run.ranks.pop(rank).process.wait(DEADLINE_S) == -signal.SIGKILL
        assert stands(client, run) == sorted(run.ranks)
        plan = apply(client, run, f"n{rank + 1}")
        assert [move.dead for move in plan.moves] == [True]
        run.ranks[rank], run.left = run.left[0], []
        trace, control = run.finish(), crashing.control(job)
        if ":tail:" in fault:  # the step was done, and its line died with the process
            assert trace.losses[rank][8:10] == control.losses[rank][8:11:2]
            trace.losses[rank].insert(9, control.losses[rank][9])
        assert_same(run, trace, control)
        incident = client.one("incident", plan.incident, Incident)
        assert any("gridctl swap plan" in line for found in incident.findings for line in found["why"])


def test_where_a_site_has_armed_it_nobody_is_needed(crashing: CrashFleet) -> None:
    job = Job("ddp", steps=24)
    with watched(crashing, job, "kill:backward:9:1", "auto = true\n") as (client, run):
        assert run.ranks.pop(1).process.wait(DEADLINE_S) == -signal.SIGKILL
        run.ranks[1], run.left = run.left[0], []
        assert_same(run, run.finish(), crashing.control(job))
        (begun,) = client.view("runs", OperatorRun)
        found = wait_for("the run ends", lambda: ended_run(client, begun.id))
        assert (found.state, found.who) == ("done", "policy"), found


def ended_run(client: Client, run: str) -> OperatorRun | None:
    found = client.one("run", run, OperatorRun)
    return found if found.state in (*ENDS, "held") else None


def test_connections_that_break_cost_no_step(crashing: CrashFleet) -> None:
    """Nobody died: the rank on the node that is left gives its state itself."""
    job = Job("ddp", steps=24)
    with watched(crashing, job, "drop:backward:9:2") as (client, run):
        assert stands(client, run) == [0, 1, 2]
        plan = apply(client, run, "n2")
        assert [move.dead for move in plan.moves] == [False]
        run.ranks[1], run.left = run.left[0], [run.ranks[1]]
        assert_same(run, run.finish(), crashing.control(job))
