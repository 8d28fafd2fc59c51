"""The watch of a swap as the controller's driver does it: what its end says, and whose silence it is."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
from runbook_world import JOB, NOW, World, fleet, plan_for, rank

from gridagent.wire import StreamRecord
from gridctl.control.driver import Driver
from gridctl.control.steplog import StepLog
from gridctl.model.fleet import Node
from gridctl.model.plans import Plan
from gridctl.model.policy import Policy
from gridctl.runbook.events import Started

STEPS = Policy().watch_steps


def watched_for(bound_s: float) -> Plan:
    plan = plan_for(fleet())
    steps = [msgspec.structs.replace(s, deadline_s=bound_s) if s.watch_steps else s for s in plan.steps]
    return msgspec.structs.replace(plan, steps=steps)


def up_to_the_watch(plan: Plan) -> World:
    """Its journal is that of a run whose ranks have moved."""
    world = World(plan)
    world.drive(Started("ann"))
    watch = next(
        index for index, (_, data) in enumerate(world.journal) if data.get("step") == "watch"
    )  # its start
    del world.journal[watch:]
    world.released = False
    return world


def step(number: int, index: int) -> StreamRecord:
    v = {"job": JOB, "rank": number, "epoch": 1, "step": index, "loss": 2.0, "step_s": 0.1, "grad_norm": 1.0}
    return StreamRecord(seq=index + 1, boot="b", t_unix_s=NOW, node="n", kind="progress", v=v)


def driven(plan: Plan, log: StepLog, look: Callable[[], Mapping[str, Node]]) -> list[dict[str, Any]]:
    """The records of a watch, up to the first step after it."""
    told: list[dict[str, Any]] = []
    before = up_to_the_watch(plan)

    async def looked(names: set[str]) -> Mapping[str, Node]:
        return look()

    async def drive() -> None:
        stopped = asyncio.Event()

        def append(kind: str, data: dict[str, Any]) -> None:
            told.append(data)
            if data.get("state") in ("done", "held"):
                stopped.set()

        ledger = SimpleNamespace(runs={"r1": ("p1", before.progress())}, append=append)
        lease = SimpleNamespace(fence=1, holder="h")
        world: Any = SimpleNamespace(
            ledger=ledger, lease=lease, steps=log, policy=Policy(), look=looked, agents=None
        )
        task = asyncio.create_task(Driver(world, "r1", plan, "ann").drive(Started("ann")))
        await stopped.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(drive())
    return told


def test_a_watch_that_ends_without_steps_says_of_whom_and_what_their_agents_say() -> None:
    plan, log = watched_for(1.5), StepLog()
    for number in (0, 1):
        for index in range(60, 60 + (STEPS if number == 0 else 2)):
            log.feed(step(number, index))
    n4 = {"spares": [], "ranks": [rank(1, session="spare", epoch=1, step=240)]}
    told = driven(plan, log, lambda: fleet(n4=n4, n3={"ranks": []}))
    failed = next(data for data in told if data.get("state") == "failed")
    assert failed["code"] == "rank-silent"
    assert failed["text"] == (
        f"step watch: not within 1.5 s: rank 1 on n4: 2 of {STEPS} steps came, its agent says training,"
        f" epoch 1, step 240; rank 2 on n3: 0 of {STEPS} steps came, its agent says nothing of it"
    )
    assert told[-1]["state"] == "held"


def test_a_controller_that_slept_past_the_deadline_first_hears_what_has_come() -> None:
    plan, log = watched_for(0.2), StepLog()
    slept: list[bool] = []

    def look() -> Mapping[str, Node]:
        if not slept:
            slept.append(True)
            threading.Event().wait(1.5)  # all of the process: a stalled disk, a stopped machine
            for number in range(3):
                for index in range(60, 60 + STEPS):
                    asyncio.get_running_loop().call_later(0.05, log.feed, step(number, index))
        return fleet()

    told = driven(plan, log, look)
    assert [(data["step"], data["state"]) for data in told if "step" in data][:2] == [
        ("watch", "started"),
        ("watch", "done"),
    ]
