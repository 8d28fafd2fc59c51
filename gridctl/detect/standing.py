"""Jobs that stand because a rank's process has died: the others hold the step and wait, but not for ever.

The fault of such a finding is "unknown"; "app" where a person should look at the job before anything else,
"monitor" where a rank's node does not answer, so that its process may live.
"""

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from gridctl.model.actions import RECOVER
from gridctl.model.findings import Decision, Finding
from gridctl.model.fleet import GIVEN_UP, Job, Rank

RANK_DIED = "rank_died"
#: Its node does not answer: unknown, not failed. Nothing is decided then.
RANK_SILENT = "rank_silent"
KINDS = (RANK_DIED, RANK_SILENT)
RULE = "job.stands"
#: What becomes of a job that stood.
GOES_ON = "the job trains again"
ENDED = "the processes of that run of the job have ended"
REPLACED = "it stands for want of others; every rank that was here has a process again"
#: States of a rank whose process may live.
_ALIVE = ("training", "standing", "unknown")


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """The last death of a job's run. A scheduler starts the next run under the same name, perhaps from the
    same step: it is known by its sessions, none of which is among `others`."""

    epoch: int
    step: int
    again: bool  #: this step had killed one before
    others: frozenset[str]  #: sessions of the ranks that lived then, or when it last trained
    told: dict[str, Finding] = {}  #: session -> what was said of it, of every rank that died in this run


class Standing:
    """Tells of every such death once, and decides for a new process unless the same step killed one before.

    A rank that dies again in the step that it was brought back for dies of the job's own doing (a bad
    batch, too little memory): then a person decides.
    """

    def __init__(self, deaths: Mapping[str, Death] | None = None) -> None:
        """`deaths`: job -> what an earlier one knew, see `death`."""
        self._deaths = dict(deaths or {})
        self._recalled = set(self._deaths)  #: jobs of whose run nobody has been seen yet
        self._waiting: list[Finding] = []
        self._fates: dict[str, str] = {}  #: job -> what has become of it
        self._standing: set[str] = set()  #: jobs that stand
        self._seen: set[str] | None = None  #: all jobs that there are; None: not all are known

    def look(self, jobs: Iterable[Job], now_unix_s: float, *, heard: bool = True) -> list[Finding | Decision]:
        """Takes all jobs as they are now; afterwards `fate` and `findings` answer. `heard`: every node has
        told what it has, so what nobody reports is not there."""
        known = {job.name: job for job in jobs}
        self._waiting, self._fates, self._seen = [], {}, set(known) if heard else None
        self._standing = {job.name for job in known.values() if job.state == "standing"}
        if heard:
            self._recalled.clear()
        for name in self._deaths.keys() - known.keys() - self._recalled:
            del self._deaths[name]
            self._fates[name] = ENDED
        return [output for job in known.values() for output in self._look(job, now_unix_s)]

    def death(self, job: str) -> Death:
        """What there is to remember of the job's last death, if this is asked anew: all but what was said,
        which is said again where the job stands."""
        return msgspec.structs.replace(self._deaths[job], told={})

    def stands(self, decision: Decision) -> bool:
        """Is what was decided still to be done?"""
        return any((found.job, found.node) == (decision.job, decision.node) for found in self._waiting)

    def findings(self, node: str) -> list[Finding]:
        """What was said of the dead on a node, as far as their jobs stand now."""
        return [found for found in self._waiting if found.node == node]

    def warnings(self, job: str) -> list[str]:
        """What speaks against bringing a job on that stands now."""
        death = self._deaths.get(job)
        waits = any(found.job == job for found in self._waiting)
        return [_killed_before(death.step)] if death and death.again and waits else []

    def fate(self, job: str, node: str) -> str:
        """What has become of a job that stood for want of ranks on a node; "" while it does, or while that
        is not known."""
        if self._seen is not None and job not in self._seen:
            return ENDED
        waits = any((found.job, found.node) == (job, node) for found in self._waiting)
        replaced = REPLACED if job in self._standing and not waits else ""
        return self._fates.get(job, replaced)

    def _look(self, job: Job, now_unix_s: float) -> Iterator[Finding | Decision]:
        before = self._of_this_run(job)
        if job.state != "standing":
            return
        told = dict(before.told) if before else {}
        dead = [rank for rank in job.ranks if rank.state in GIVEN_UP]
        silent = [rank for rank in job.ranks if rank.state == "unknown"]
        fresh = [rank for rank in dead if not _has_died(told.get(rank.session))]
        doubted = [rank for rank in silent if rank.session not in told]
        again = before is not None and before.step == job.step and (before.again or before.epoch < job.epoch)
        found = {rank.session: _found(job, rank, now_unix_s, again) for rank in fresh}
        found |= {rank.session: _silent(job, rank, now_unix_s) for rank in doubted}
        told |= found
        if fresh:
            before = Death(epoch=job.epoch, step=job.step, again=again, told=told, others=_alive(job))
        elif doubted:
            before = before or Death(epoch=-1, step=-1, again=False, told={}, others=_alive(job))
            before = msgspec.structs.replace(before, told=told)
        if before is not None:
            self._deaths[job.name] = before
        self._waiting += [told[rank.session] for rank in dead]
        self._waiting += [
            _silent(job, rank, now_unix_s) if _has_died(told[rank.session]) else told[rank.session]
            for rank in silent
        ]
        yield from found.values()
        if not again:
            for node in sorted({rank.node for rank in fresh}):
                yield _decided(job, [rank for rank in fresh if rank.node == node], now_unix_s)

    def _of_this_run(self, job: Job) -> Death | None:
        """The last death of the run that the job is in; what has become of the job is noted."""
        alive, sessions = _alive(job), {rank.session for rank in job.ranks}
        death = self._deaths.get(job.name)
        if death and death.others & sessions:
            self._recalled.discard(job.name)
        elif job.name in self._recalled:  # they may be on nodes that have not told yet
            death = None
        over = not death.others & alive if death else self._seen is not None and not alive
        if over:
            self._fates[job.name] = ENDED
        elif job.state == "training":
            self._fates[job.name] = GOES_ON
        if death is None or not death.others & sessions:
            if job.name not in self._recalled:
                self._deaths.pop(job.name, None)
            return None
        # A process that was given up (for want of a word from it) and is back has not died.
        back = {rank.session for rank in job.ranks if rank.state in ("training", "standing")}
        told = {session: found for session, found in death.told.items() if session not in back}
        others = alive if job.state == "training" and not over else death.others
        death = self._deaths[job.name] = msgspec.structs.replace(death, told=told, others=others)
        return death


def _alive(job: Job) -> frozenset[str]:
    return frozenset(rank.session for rank in job.ranks if rank.state in _ALIVE)


def _has_died(told: Finding | None) -> bool:
    return told is not None and told.kind == RANK_DIED


def _silent(job: Job, rank: Rank, now_unix_s: float) -> Finding:
    why = [
        f"{rank.node} does not answer (or has just begun to), which is not the same as failed, and others of"
        f" {job.name} stand in step {job.step} for want of a word of rank {rank.rank} there. They hold it for"
        " GRIDAGENT_HOLD_S (default 600 s), then they end",
        f"reach its agent (`gridctl doctor`); where you know that {rank.node} is dead: gridctl swap plan"
        f" {rank.node} --assume-dead",
    ]
    found = _found(job, rank, now_unix_s, again=False)
    return msgspec.structs.replace(found, kind=RANK_SILENT, why=why, fault="monitor")


def _killed_before(step: int) -> str:
    return f"step {step} has killed a process before: look at the job's own log first"


def _found(job: Job, rank: Rank, now_unix_s: float, again: bool) -> Finding:
    waiting = ", ".join(str(other.rank) for other in job.ranks if other.state == "standing")
    why = [
        f"the process of rank {rank.rank} of {job.name} has ended; ranks {waiting} stand in step {job.step}."
        " They hold it for GRIDAGENT_HOLD_S (default 600 s), then they end",
        f"gridctl swap plan {rank.node}: a new process takes the rank, no step is lost",
    ]
    if again:
        why.append(_killed_before(job.step))
    return Finding(
        t_unix_s=now_unix_s,
        node=rank.node,
        device="node",
        kind=RANK_DIED,
        severity="critical",
        action=RECOVER,
        why=why,
        rule=RULE,
        layer="progress",
        fault="app" if again else "unknown",
        job=job.name,
        whose=_whose([rank]),
    )


def _whose(ranks: Iterable[Rank]) -> str:
    return " ".join(sorted(f"{rank.session}@{rank.epoch}" for rank in ranks))


def _decided(job: Job, dead: list[Rank], now_unix_s: float) -> Decision:
    ranks = ", ".join(str(rank.rank) for rank in dead)
    return Decision(
        t_unix_s=now_unix_s,
        node=dead[0].node,
        device="node",
        kind=RANK_DIED,
        severity="critical",
        action=RECOVER,
        when="now",
        why=[f"{job.name} stands in step {job.step} for want of rank {ranks}"],
        rule=RULE,
        decision="swap_now",
        rules=[RULE],
        job=job.name,
        whose=_whose(dead),
    )
