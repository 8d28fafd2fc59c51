"""The newest training steps of every rank, as the stream tells them."""

import asyncio
from collections import deque
from collections.abc import Iterable

from gridagent.wire import StepEntry, StreamRecord

KEPT = 512


class StepLog:
    """Fed by the followers, read by the watch of a run."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], deque[tuple[int, StepEntry]]] = {}
        self._news = asyncio.Event()

    def feed(self, record: StreamRecord) -> None:
        """Takes a `progress` record; any other is passed over."""
        v = record.v
        if record.kind != "progress" or "step" not in v:
            return
        entry = StepEntry(
            v["step"], record.t_unix_s, v.get("step_s") or 0.0, v.get("loss"), v.get("grad_norm")
        )
        key = (str(v.get("job")), int(v.get("rank", -1)))
        self._steps.setdefault(key, deque(maxlen=KEPT)).append((int(v.get("epoch", 0)), entry))
        self._news.set()
        self._news = asyncio.Event()

    async def changed(self) -> None:
        """Returns after the next step of any rank."""
        await self._news.wait()

    def before(self, job: str, ranks: Iterable[int], epoch: int, count: int) -> dict[int, list[StepEntry]]:
        """The last `count` steps of each rank before `epoch`."""
        return {rank: self._of(job, rank, epoch, new=False)[-count:] for rank in ranks}

    def after(self, job: str, ranks: Iterable[int], epoch: int) -> dict[int, list[StepEntry]]:
        """The steps of each rank from `epoch` on."""
        return {rank: self._of(job, rank, epoch, new=True) for rank in ranks}

    def _of(self, job: str, rank: int, epoch: int, *, new: bool) -> list[StepEntry]:
        kept = self._steps.get((job, rank), ())
        return [entry for its_epoch, entry in kept if (its_epoch >= epoch) == new]
