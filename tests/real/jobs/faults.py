"""What goes wrong in a training, and a recovery that only makes the groups anew.

Words after the kind: `loose` (the loader is not registered), `attempt` (steps are attempts), `regroup` (all
ranks live: see `Regroup`), and `fault=ACT:MOMENT:STEP:RANK`. ACT is kill (SIGKILL to itself) or drop (its
process groups). MOMENT is where
in the step: see `Fault`.
"""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import record
import torch
from torch.distributed import PrefixStore, TCPStore

from gridagent.train import CONTEXT, Session

WORDS = ("attempt", "regroup", "torchdata", "wrapped", "loose")


def is_option(word: str) -> bool:
    """Is this word no argument of the kind?"""
    return word in WORDS or word.startswith("fault=")


def attempt(session: Session) -> Any:
    """`session.attempt()`, or nothing where the job is not asked to use it."""
    return session.attempt() if "attempt" in record.MORE else contextlib.nullcontext()


def install(session: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Prepares what the words ask for. In the undisturbed run, which knows of no agent, nothing."""
    if CONTEXT.link is None:
        return
    for word in record.MORE:
        if word.startswith("fault="):
            Fault(session, model, optimizer, *word.partition("=")[2].split(":"))
    if "regroup" in record.MORE:
        threading.Thread(target=Regroup(session).run, daemon=True).start()


class Fault:
    """Happens once, in one rank, at one moment of one step.

    start: before DDP hands out buffers; forward: within the model; backward: as the first gradient is there,
    late: as the last is; memory: before the exchange that precedes the vote; vote: between the two;
    voted: the vote has succeeded everywhere, here it counts as failed; tail: the optimizer has stepped.
    """

    def __init__(
        self, session: Session, model: Any, optimizer: Any, act: str, moment: str, step: str, rank: str
    ) -> None:
        self.session, self.act, self.step = session, act, int(step)
        self.done = record.FOLDER / f"fault-{moment}-{step}-{rank}"
        self.due = session.rank == int(rank) and not self.done.exists()  # not once more in the new process
        parameters = list(model.parameters())
        attempts, memory = session.attempts, session.attempts.memory
        match moment:
            case "start":
                model.register_forward_pre_hook(self.hook)
            case "forward":
                model.module.register_forward_pre_hook(self.hook)
            case "backward":
                parameters[-1].register_hook(self.hook)
            case "late":
                parameters[0].register_hook(self.hook)
            case "memory":
                memory.exchange = self.around(memory.exchange, before=True)  # type: ignore[method-assign]
            case "vote":
                memory.exchange = self.around(memory.exchange, before=False)  # type: ignore[method-assign]
            case "voted":
                attempts._failed_vote = self.spoil(attempts._failed_vote)  # type: ignore[method-assign]
            case "tail":
                optimizer.register_step_post_hook(self.hook)
            case _:
                raise ValueError(moment)

    def hook(self, *_: Any) -> None:
        if not self.due or self.session.step != self.step:
            return
        self.due = False
        self.done.touch()
        if self.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        CONTEXT.registry.tolerate().fail("dropped on purpose")

    def around(self, function: Callable[..., None], *, before: bool) -> Callable[..., None]:
        def call(step: int) -> None:
            if before:
                self.hook()
            function(step)
            if not before:
                self.hook()

        return call

    def spoil(self, function: Callable[[], str]) -> Callable[[], str]:
        def call() -> str:
            why = function()
            if self.due and self.session.step == self.step:
                self.due = False
                if self.act == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                return "spoilt on purpose"
            return why

        return call


class Regroup:
    """Once all ranks stand, gives them new groups over a fresh store, and lets them go on."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.stores: list[Any] = []

    def run(self) -> None:
        number = 0
        while True:
            while not (self.session.attempts.void and self.session.standing):
                time.sleep(0.002)
            self.once(number)
            number += 1
            while self.session.attempts.void:
                time.sleep(0.0005)

    def once(self, number: int) -> None:
        session, registry = self.session, CONTEXT.registry
        attempts = session.attempts
        self.write(f"void-{number}-{session.rank}", [session.step, attempts.entered])
        told = [self.read(f"void-{number}-{rank}") for rank in range(session.world_size)]
        furthest = max(step for step, _ in told)
        store = self.store(number)
        inners = registry.build(PrefixStore(f"again/{number}", store), timedelta(seconds=60))

        def switch() -> None:
            if session.step < furthest:
                attempts.apply()
            registry.switch(inners, store)

        session.jobs.put(switch)
        session.go_on()

    def store(self, number: int) -> TCPStore:
        if self.session.rank == 0:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.write(f"store-{number}", store.port)
        else:
            store = TCPStore("127.0.0.1", self.read(f"store-{number}"), is_master=False)
        self.stores.append(store)
        return store

    def write(self, name: str, value: Any) -> None:
        draft = record.FOLDER / f"{name}.draft"
        draft.write_text(json.dumps(value))
        draft.rename(record.FOLDER / name)

    def read(self, name: str) -> Any:
        path = record.FOLDER / name
        while not path.exists():
            time.sleep(0.002)
        return json.loads(path.read_text())
