"""Jobs that stand because a rank's process has died: the others hold the step and wait, but not for ever."""

from collections.abc import Iterable, Iterator

from gridctl.model.findings import Decision, Finding
from gridctl.model.fleet import GIVEN_UP, Job, Rank

RANK_DIED = "rank_died"
RULE = "job.stands"


class Standing:
    """Tells of every such death once, and decides for a new process unless the same step killed one before.

    A rank that dies again in the step that it was brought back for dies of the job's own doing (a bad
    batch, too little memory): then a person decides.
    """

    def __init__(self) -> None:
        self._told: dict[str, tuple[int, int]] = {}  #: job -> (epoch, step) of the last death
        self._waiting: set[str] = set()  #: nodes of dead ranks in jobs that stand now

    def look(self, jobs: Iterable[Job], now_unix_s: float) -> Iterator[Finding | Decision]:
        """Takes all jobs as they are now."""
        self._waiting = set()
        for job in jobs:
            dead = [rank for rank in job.ranks if rank.state in GIVEN_UP]
            if job.state == "standing":
                self._waiting.update(rank.node for rank in dead)
            before = self._told.get(job.name, (-1, -1))
            if job.state != "standing" or not dead or before == (job.epoch, job.step):
                continue
            self._told[job.name] = (job.epoch, job.step)
            again = before[1] == job.step
            for rank in dead:
                yield _found(job, rank, now_unix_s, again)
            if not again:
                yield _decided(job, dead, now_unix_s)

    def stands(self, decision: Decision) -> bool:
        """Is what was decided still to be done?"""
        return decision.node in self._waiting


def _found(job: Job, rank: Rank, now_unix_s: float, again: bool) -> Finding:
    waiting = ", ".join(str(other.rank) for other in job.ranks if other.state == "standing")
    why = [
        f"the process of rank {rank.rank} of {job.name} has ended; ranks {waiting} stand in step {job.step}."
        " They hold it for GRIDAGENT_HOLD_S (default 600 s), then they end",
        f"gridctl swap plan {rank.node}: a new process takes the rank, no step is lost",
    ]
    if again:
        why.append(f"step {job.step} has killed a process before: look at the job's own log first")
    return Finding(
        t_unix_s=now_unix_s,
        node=rank.node,
        device="node",
        kind=RANK_DIED,
        severity="critical",
        action="recover_rank",
        why=why,
        rule=RULE,
        layer="progress",
        fault="app" if again else "unknown",
    )


def _decided(job: Job, dead: list[Rank], now_unix_s: float) -> Decision:
    ranks = ", ".join(str(rank.rank) for rank in dead)
    return Decision(
        t_unix_s=now_unix_s,
        node=dead[0].node,
        device="node",
        kind=RANK_DIED,
        severity="critical",
        action="recover_rank",
        when="now",
        why=[f"{job.name} stands in step {job.step} for want of rank {ranks}"],
        rule=RULE,
        decision="swap_now",
        rules=[RULE],
    )
