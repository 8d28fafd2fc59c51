"""Jobs that stand because a rank's process has died: the others hold the step and wait, but not for ever."""

from collections.abc import Iterable, Iterator

from gridctl.model.findings import Finding
from gridctl.model.fleet import GIVEN_UP, Job


class Standing:
    """Tells of every such death once."""

    def __init__(self) -> None:
        self._told: set[tuple[str, int, int]] = set()

    def look(self, jobs: Iterable[Job], now_unix_s: float) -> Iterator[Finding]:
        """Takes the jobs as they are now."""
        for job in jobs:
            if job.state != "standing" or (job.name, job.epoch, job.step) in self._told:
                continue
            self._told.add((job.name, job.epoch, job.step))
            waiting = ", ".join(str(rank.rank) for rank in job.ranks if rank.state == "standing")
            for rank in job.ranks:
                if rank.state not in GIVEN_UP:
                    continue
                yield Finding(
                    t_unix_s=now_unix_s,
                    node=rank.node,
                    device="node",
                    kind="rank_died",
                    severity="critical",
                    action="recover_rank",
                    why=[
                        f"the process of rank {rank.rank} of {job.name} has ended; ranks {waiting} stand in"
                        f" step {job.step}. They hold it for GRIDAGENT_HOLD_S (default 600 s), then they end",
                        f"gridctl swap plan {rank.node}: a new process takes the rank, no step is lost",
                    ],
                    rule="job.stands",
                    layer="progress",
                    fault="unknown",
                )
