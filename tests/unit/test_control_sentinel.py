"""The controller's sentinel and the machine's clock."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from runbook_world import fleet, node, plan_for, rank, status

from gridagent.journal import read
from gridagent.wire import NodeStatus, RankStatus, StreamRecord
from gridctl.control import sentinel
from gridctl.control.ledger import Ledger
from gridctl.control.steplog import StepLog
from gridctl.detect.standing import ENDED, GOES_ON, REPLACED
from gridctl.home import Home
from gridctl.model.findings import Decision
from gridctl.model.fleet import Node
from gridctl.model.runs import Incident


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


class Watching:
    """A sentinel over the nodes that a test makes up, with a real ledger."""

    def __init__(self, folder: Path) -> None:
        self.proposed: list[Decision] = []
        self.ledger = Ledger(Home.at(folder), "ann-1")
        self.sentinel = sentinel.Sentinel(self.ledger, StepLog(), self._propose)
        self._loop = asyncio.new_event_loop()

    async def _propose(self, _: Incident, decision: Decision) -> bool:
        self.proposed.append(decision)
        return True

    def see(self, *ranks: list[RankStatus], silent: str = "", unreachable: str = "") -> None:
        """n1 has the first ranks, n2 the next ones ... `silent`: has told nothing yet."""
        told = [
            node(status(name, ranks=its), reachable=name != unreachable)
            for name, its in ((f"n{i}", its) for i, its in enumerate(ranks, 1))
        ]

        async def change() -> None:
            self.sentinel.nodes_changed(
                msgspec.structs.replace(its, status=None, reachable=False) if its.name == silent else its
                for its in told
            )
            await asyncio.sleep(0)

        self._loop.run_until_complete(change())

    def incidents(self) -> list[tuple[str, str, str]]:
        return [(i.node, i.job, i.state) for i in self.ledger.incidents.all()]

    def close(self) -> None:
        self._loop.run_until_complete(self.sentinel.close())
        self._loop.close()
        self.ledger.close()


def stood(job: str, number: int, **more: Any) -> RankStatus:
    return rank(number, job=job, world_size=2, session=f"{job}{number}", **{"state": "standing", **more})


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    made = Watching(tmp_path)
    yield made
    made.close()


def test_a_death_in_another_job_is_an_incident_of_its_own(watching: Watching) -> None:
    a, b = stood("a", 1, state="lost"), stood("b", 1, state="lost")
    watching.see([stood("a", 0)], [a, stood("b", 0)])
    watching.see([stood("a", 0), stood("b", 0)], [a, b])
    assert watching.incidents() == [("n2", "a", "open"), ("n2", "b", "open")]
    assert [decision.job for decision in watching.proposed] == ["a", "b"]
    first, second = watching.ledger.incidents.all()
    assert [[found["job"] for found in its.findings] for its in (first, second)] == [["a"], ["b"]]


def test_two_ranks_that_die_on_one_node_are_both_told_of(watching: Watching) -> None:
    lost = [rank(r, state="lost", session=f"s{r}") for r in (1, 2)]
    watching.see([rank(0, state="standing")], lost)
    (incident,) = watching.ledger.incidents.all()
    assert ["rank 1" in incident.findings[0]["why"][0], "rank 2" in incident.findings[1]["why"][0]] == [
        True
    ] * 2
    assert [decision.why for decision in watching.proposed] == [
        ["lm stands in step 50 for want of rank 1, 2"]
    ]


@pytest.mark.parametrize(
    ("later", "why"),
    [
        ([stood("a", 0, epoch=1, state="training"), rank(1, job="a", world_size=2, epoch=1)], GOES_ON),
        ([stood("a", 0, state="lost"), stood("a", 1, state="lost")], ENDED),
        ([], ENDED),
    ],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_the_incident_of_a_death_closes_with_its_reason(
    tmp_path: Path, later: list[RankStatus], why: str, *, restarted: bool
) -> None:
    watching = Watching(tmp_path)
    watching.see([stood("a", 0)], [stood("a", 1, state="lost")])
    if restarted:
        watching.close()
        watching = Watching(tmp_path)
        watching.see(later[:1], later[1:], silent="n1")
        assert watching.incidents() == [("n2", "a", "open")], "n1 has not told yet what it has"
    watching.see(later[:1], later[1:])
    (incident,) = watching.ledger.incidents.all()
    assert (incident.state, incident.timeline[-1].what) == ("closed", f"incident closed: a: {why}")
    watching.close()


def test_a_run_that_has_not_ended_closes_its_own_incident(watching: Watching) -> None:
    watching.see([stood("lm", 0)], [stood("lm", 1, state="lost")])
    (incident,) = watching.ledger.incidents.all()
    plan = msgspec.structs.replace(plan_for(fleet()), incident=incident.id)
    watching.ledger.append("plan", {"incident": incident.id, "plan": msgspec.to_builtins(plan)})
    run = {"incident": incident.id, "run": "r1", "plan": "p1", "node": "n2", "job": "lm"}
    watching.ledger.append("run", {**run, "state": "running"})
    on = [stood("lm", 0, epoch=1, state="training"), rank(1, world_size=2, epoch=1)]
    watching.see(on[:1], on[1:])
    assert watching.incidents() == [("n2", "lm", "open")]
    watching.ledger.append("run", {**run, "state": "failed"})
    watching.see(on[:1], on[1:])
    assert watching.incidents() == [("n2", "lm", "closed")]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_step_that_kills_again_is_for_a_person_whoever_watches_by_then(
    tmp_path: Path, *, restarted: bool
) -> None:
    watching = Watching(tmp_path)
    watching.see([stood("a", 0)], [stood("a", 1, state="lost")])
    assert len(watching.proposed) == 1
    if restarted:
        watching.close()
        watching = Watching(tmp_path)
        watching.see([], [], silent="n1")

    def new(state: str) -> RankStatus:
        return msgspec.structs.replace(stood("a", 1, epoch=1, state=state), session="a1.new")

    watching.see([stood("a", 0, epoch=1, state="training")], [new("training")])
    watching.see([stood("a", 0, epoch=1)], [new("lost")])
    assert len(watching.proposed) == (0 if restarted else 1), "nothing is decided about it"
    incident = watching.ledger.incidents.all()[-1]
    assert incident.state == "open"
    assert "has killed a process before" in incident.findings[-1]["why"][-1]
    watching.close()


def test_a_death_that_nobody_has_answered_is_decided_on_by_the_next_controller(tmp_path: Path) -> None:
    for _ in range(2):
        watching = Watching(tmp_path)
        watching.see([stood("a", 0)], [stood("a", 1, state="lost")])
        assert len(watching.proposed) == 1
        assert watching.incidents() == [("n2", "a", "open")]
        assert [moment.kind for moment in watching.ledger.incidents.all()[0].timeline] == [
            "incident",
            "finding",
            "decision",
        ], "what was said is not said again"
        watching.close()


def moved(node_of_rank_1: str, state: str, epoch: int) -> list[list[RankStatus]]:
    """Job a of two ranks; the second one has been moved to another node by epoch 1."""
    new = msgspec.structs.replace(stood("a", 1, epoch=epoch, state=state), session=f"a1.{epoch}")
    first = stood("a", 0, epoch=epoch, state="standing" if state == "lost" else state)
    return [[first], [], [new]] if node_of_rank_1 == "n3" else [[first], [new], []]


def test_the_incident_of_a_death_closes_once_its_rank_has_a_new_process_which_died_elsewhere(
    watching: Watching,
) -> None:
    watching.see(*moved("n2", "lost", 0))
    watching.see(*moved("n3", "lost", 1))  # it has trained in between, and nobody has looked
    assert watching.incidents() == [("n2", "a", "closed"), ("n3", "a", "open")]
    first, _ = watching.ledger.incidents.all()
    assert first.timeline[-1].what == f"incident closed: a: {REPLACED}"
    watching.see(*moved("n3", "training", 2))
    assert watching.incidents() == [("n2", "a", "closed"), ("n3", "a", "closed")]


def test_a_silent_rank_that_is_known_to_be_dead_is_called_so(watching: Watching) -> None:
    ranks = [[stood("a", 0)], [stood("a", 1)]]
    watching.see(*ranks)
    watching.see(*ranks, unreachable="n2")
    assert [(i.kind, i.title) for i in watching.ledger.incidents.all()] == [
        ("rank_silent", "rank_silent on n2")
    ]
    watching.see([stood("a", 0)], [stood("a", 1, state="lost")])
    (incident,) = watching.ledger.incidents.all()
    assert (incident.kind, incident.title, incident.state) == ("rank_died", "rank_died on n2", "open")
    assert "incident open: rank_died on n2" in [moment.what for moment in incident.timeline]
