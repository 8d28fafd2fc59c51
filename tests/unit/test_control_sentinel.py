"""The controller's sentinel and the machine's clock."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from gridagent.journal import read
from gridagent.wire import NodeStatus, RankStatus, StreamRecord
from gridctl.control import sentinel
from gridctl.control.ledger import Ledger
from gridctl.control.steplog import StepLog
from gridctl.home import Home
from gridctl.model.fleet import Node


class Clock:
    """A machine's two clocks; somebody sets the one on the wall."""

    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1_000_000.0, 50.0

    def pass_(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    fake = SimpleNamespace(time=lambda: made.wall_s, monotonic=lambda: made.monotonic_s)
    monkeypatch.setattr(sentinel, "time", fake)
    return made


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_no_node_silent_and_hides_none(
    tmp_path: Path, clock: Clock, set_by_s: float
) -> None:
    async def propose(*_: object) -> None: ...

    ledger = Ledger(Home.at(tmp_path), "ann-1")
    watching = sentinel.Sentinel(ledger, StepLog(), propose)

    def beats(count: int) -> None:
        for _ in range(count):
            clock.pass_(1.0)
            beat = {"boot": "b", "seq": int(clock.monotonic_s)}
            watching.feed(
                StreamRecord(seq=1, boot="b", t_unix_s=clock.wall_s, node="n1", kind="beat", v=beat)
            )
            watching.tick()

    def told() -> list[str]:
        return [str(record.data["kind"]) for record in read(tmp_path / "journal")]

    beats(30)
    clock.wall_s += set_by_s
    watching.tick()
    beats(30)
    assert "blind" not in told()
    clock.pass_(60.0)
    watching.tick()
    assert "blind" in told()
    ledger.close()


@pytest.mark.parametrize(("state", "hangs"), [("training", True), ("finished", False)])
def test_a_job_that_makes_no_step_with_busy_gpus_hangs_while_it_is_there(
    tmp_path: Path, clock: Clock, state: str, hangs: bool
) -> None:
    async def propose(*_: object) -> None: ...

    ledger = Ledger(Home.at(tmp_path), "ann-1")
    watching = sentinel.Sentinel(ledger, StepLog(), propose)
    seen = 0

    def second(step: int) -> None:
        nonlocal seen
        clock.pass_(1.0)
        seen += 1
        told: list[tuple[str, dict[str, object]]] = [
            ("beat", {"boot": "b", "seq": seen}),
            ("sample", {"device": "gpu:0", "v": {"util_pct": 100, "temp_c": 60}}),
        ]
        if step:
            told.append(("progress", {"job": "lm", "rank": 0, "step": step, "loss": 2.0, "step_s": 1.0}))
        for kind, v in told:
            watching.feed(StreamRecord(seq=seen, boot="b", t_unix_s=clock.wall_s, node="n1", kind=kind, v=v))
        watching.tick()

    def now(state: str) -> None:
        rank = RankStatus(
            job="lm", rank=0, world_size=1, session="s", pid=7, epoch=0, step=1, connected=True, state=state
        )
        status = NodeStatus(
            node="n1",
            url="u",
            serial="",
            boot_id="b",
            version="1",
            now_unix_s=clock.wall_s,
            gpus=1,
            ranks=[rank],
        )
        watching.nodes_changed([Node(name="n1", url="u", reachable=True, status=status)])

    now("training")
    for step in range(1, 40):
        second(step)
    now(state)
    for _ in range(200):
        second(0)
    kinds = [str(record.data["kind"]) for record in read(tmp_path / "journal") if record.kind == "finding"]
    assert ("silent_hang" in kinds) is hangs
    ledger.close()
