"""A dead rank comes back bit for bit, or it is said that it cannot. Never a third."""

import signal

import pytest
from agents import DEADLINE_S
from crash_fleet import CrashFleet
from fleet import Job, Run, assert_same
from swap_fleet import wait_for
from test_recovery import ended_run, watched

from gridagent.train.driver import EXIT_REQUEUE
from gridctl.control.client import Client
from gridctl.errors import Refused
from gridctl.model import fleet as model
from gridctl.model.plans import Gate, Request


def job_of(kind: str, *args: str) -> Job:
    return Job(kind, args, steps=24, script="hostile.py", env=(("GRIDAGENT_HOLD_S", "60"),))


#: (job, fault, how it ends, words of the reason)
CASES = [
    # what the dead rank alone had, and changed after its last vote
    (job_of("best0"), "kill:late:9:0", "refused", "changes totals between the vote and end_step"),
    (job_of("ninth"), "kill:late:9:1", "aborted", "is not what it had"),
    # a buffer that changes without a version
    (job_of("codebook"), "kill:late:9:1", "recovered", ""),
    # a batch that cannot be given out once more
    (job_of("inplace", "numpy"), "kill:late:9:1", "ended", "changed a batch in place"),
    # collectives that a new process would call alone
    (job_of("epoch"), "kill:late:11:1", "refused", "which a new process would call alone"),
    # what the script does between two attempts comes a second time
    (job_of("behind", "schedule"), "kill:late:9:1", "recovered", ""),
    # what modules keep beside parameters and buffers
    (job_of("flags"), "kill:late:9:1", "recovered", ""),
]
MORE_CASES = [
    (job_of("behind", "moments"), "kill:late:9:1", "refused", "between end_step and the next batch"),
    (job_of("moments"), "kill:late:9:1", "ended", "the optimizers' state was changed before their step"),
    (job_of("behind", "rate"), "kill:late:9:1", "recovered", ""),
    (job_of("behind", "data"), "kill:late:9:1", "failed", "between two attempts, which cannot be undone"),
    (job_of("two_loaders"), "kill:late:9:1", "ended", "do not come through session.batches()"),
    (job_of("stage"), "kill:vote:9:1", "ended", "in the memory of the one before"),
    (job_of("head"), "kill:late:9:1", "lost", "is trained outside of DistributedDataParallel"),
    (job_of("bank"), "kill:late:9:1", "aborted", "holds a large tensor"),
    (job_of("ema8"), "kill:late:9:1", "aborted", "is not what it had"),
    (job_of("rng0"), "kill:late:9:0", "aborted", "is not what it had"),
    (job_of("bigbn"), "kill:late:9:1", "recovered", ""),
    (job_of("inplace", "obj"), "kill:late:9:1", "ended", "changed a batch in place"),
    (job_of("loop", "plain"), "kill:late:9:1", "lost", "no batch comes through session.batches()"),
    (job_of("loop", "draw"), "kill:late:9:1", "lost", "no batch comes through session.batches()"),
    (job_of("epoch"), "kill:late:12:1", "recovered", ""),
]
CASES += [pytest.param(*case, marks=pytest.mark.matrix) for case in MORE_CASES]


@pytest.mark.parametrize(("job", "fault", "ends", "why"), CASES, ids=lambda case: getattr(case, "kind", case))
def test_honest_or_identical(crashing: CrashFleet, job: Job, fault: str, ends: str, why: str) -> None:
    rank = int(fault.rpartition(":")[2])
    control = crashing.control(job)
    with watched(crashing, job, fault) as (client, run):
        assert run.ranks.pop(rank).process.wait(DEADLINE_S) == -signal.SIGKILL
        told, said = outcome(client, run, f"n{rank + 1}")
        if told == "recovered":
            run.ranks[rank], run.left = run.left[0], []
            assert_same(run, run.finish(), control)
        assert (told, why in said + run.logs()) == (ends, True), (told, said, run.logs())


def outcome(client: Client, run: Run, node: str) -> tuple[str, str]:
    """What becomes of a job that has lost a rank, and the words of it."""
    if not wait_for("it stands, or has ended", lambda: standing(client, run) or codes(run)):
        raise AssertionError
    if not standing(client, run):
        ended = set(codes(run))
        return ("ended" if ended == {EXIT_REQUEUE} else "lost"), str(ended)
    wait_for(
        "a spare is parked", lambda: [s for s in client.view("spares", model.Spare) if s.state == "parked"]
    )
    try:
        plan = client.plan(Request(node=node, job=run.name, who="ann"))
    except Refused as refused:
        return "refused", refused.text
    made = client.apply(plan.id, Gate(digest=plan.digest, who="ann", reason="a test", typed=node))
    found = wait_for("the run ends", lambda: ended_run(client, made.id))
    return ("recovered" if found.state == "done" else found.state), found.text


def standing(client: Client, run: Run) -> bool:
    return any(job.name == run.name and job.state == "standing" for job in client.view("jobs", model.Job))


def codes(run: Run) -> list[int]:
    """The exit codes, once all processes of the job have ended."""
    found = [holder.process.poll() for holder in run.ranks.values()]
    return [code for code in found if code is not None] if None not in found else []
