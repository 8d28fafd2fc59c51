"""A node's agent is gone, or begins anew, while a job stands for want of the rank that was there."""

import signal

import pytest
from agents import DEADLINE_S
from crash_fleet import CrashFleet
from fleet import Job, Run, assert_same
from swap_fleet import wait_for
from test_recovery import apply, ended_run, stands, watched

from gridctl.control.client import Client
from gridctl.errors import Refused
from gridctl.model import fleet as model
from gridctl.model.plans import Gate, Request
from gridctl.model.runs import Incident

JOB = Job("ddp", steps=24)
FAULT = "kill:late:9:1"


def rank_1(client: Client, run: Run, state: str) -> bool:
    """Whether the job stands and rank 1 on n2 is in this state."""
    job = next((job for job in client.view("jobs", model.Job) if job.name == run.name), None)
    return (
        job is not None
        and job.state == "standing"
        and (job.ranks[1].node, job.ranks[1].state) == ("n2", state)
    )


def test_the_agent_of_the_dead_rank_begins_anew(crashing: CrashFleet) -> None:
    control = crashing.control(JOB)
    with watched(crashing, JOB, FAULT) as (client, run):
        assert run.ranks.pop(1).process.wait(DEADLINE_S) == -signal.SIGKILL
        stands(client, run)
        wait_for("there is an incident", lambda: client.view("incidents", Incident))
        agent = crashing.agents["n2"]
        agent.end(signal.SIGKILL)
        wait_for("the node is silent", lambda: rank_1(client, run, "unknown"))
        agent.start("--allow-damage")
        told = agent.client().status()
        assert (told.ranks, [mark.split()[0] for mark in told.marks.values()]) == ([], ["9"])
        wait_for("its new agent is sure", lambda: rank_1(client, run, "lost"))
        plan = apply(client, run, "n2")
        assert [(move.dead, move.origin) for move in plan.moves] == [(True, "n2")]
        assert plan.bit_identical, plan.blockers
        run.ranks[1], run.left = run.left[0], []
        assert_same(run, run.finish(), control)


def test_a_node_that_is_gone_is_taken_for_dead_on_a_persons_word(crashing: CrashFleet) -> None:
    """Its agent is not there any more either, and so nobody knows how the rank was started."""
    control = crashing.control(JOB)
    with watched(crashing, JOB, FAULT) as (client, run):
        assert run.ranks.pop(1).process.wait(DEADLINE_S) == -signal.SIGKILL
        stands(client, run)
        agent = crashing.agents["n2"]
        agent.end(signal.SIGKILL)
        try:
            wait_for("the node is silent", lambda: rank_1(client, run, "unknown"))
            with pytest.raises(Refused, match="does not answer") as refused:
                client.plan(Request(node="n2", job=run.name, who="ann"))
            assert any("--assume-dead" in blocker.text for blocker in refused.value.blockers)
            wait_for(
                "there is an incident",
                lambda: [i for i in client.view("incidents", Incident) if i.node == "n2"],
            )
            plan = client.plan(Request(node="n2", job=run.name, who="ann", assume_dead=True))
            assert "taken for dead on your word" in plan.notes[0]
            made = client.apply(plan.id, Gate(digest=plan.digest, who="ann", reason="it burns", typed="n2"))
            ended = wait_for("the run ends", lambda: ended_run(client, made.id))
            assert ended.state == "done", (ended.text, run.logs())
            run.ranks[1], run.left = run.left[0], []
            assert_same(run, run.finish(), control)
        finally:
            agent.start("--allow-damage")
