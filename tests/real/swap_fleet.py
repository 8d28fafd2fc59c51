"""Real agents, a real job, real spares and an operator's home, for tests of the controller."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from agents import DEADLINE_S, Agent, Fleet, free_port
from forkserver import Process, shared

from gridctl.control import ensure
from gridctl.control.client import Client
from gridctl.errors import Unanswered
from gridctl.home import Home
from gridctl.model.fleet import Job, Spare
from gridctl.model.plans import Gate, Plan
from gridctl.model.runs import ENDS, Run

SCRIPT = Path(__file__).with_name("small_training.py")
JOB = "lm"

T = TypeVar("T")


#: Five processes that import torch share two cores with whatever else runs there.
PATIENCE_S = 240.0


def wait_for(what: str, look: Callable[[], T | None]) -> T:
    """The first true result of `look`."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {PATIENCE_S:.0f} s: {what}")


class SwapFleet(Fleet):
    """Everything ends with `close`. `execute`: ranks and spares are programs of their own, as for a user.

    Else they are forks of a process that has torch already, which saves seconds of two cores for each.
    """

    def __init__(self, *, execute: bool = False) -> None:
        super().__init__()
        self.home = Home.at(self.root)
        self.execute = execute
        self.processes: list[Process] = []
        self.clients: list[Client] = []
        self.out = self.root / "out"
        self.out.mkdir()

    def nodes(self, *names: str, config: str = "") -> list[Agent]:
        made = []
        for name in names:
            extra = f'serial = "SN-{name}"\nrack = "r1"\ndriver = "555"\n{config}'
            made.append(self.agent(name, extra).start())
        self.write_fleet_file()
        return made

    def write_fleet_file(self, head: str = "") -> None:
        lines = [f'[fleet]\nname = "testfleet"\n{head}']
        lines += [f'[[node]]\nname = "{a.name}"\nurl = "{a.url}"\n' for a in self.agents.values()]
        self.home.fleet_file.write_text("\n".join(lines))

    def train(self, *nodes: str) -> None:
        """Starts a job with one rank on each of these nodes."""
        port = free_port()
        for rank, name in enumerate(nodes):
            agent = self.agents[name]
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(nodes)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = ["exec", "--home", str(agent.home), "--job", JOB, "--"]
            command += [sys.executable, str(SCRIPT), str(self.out)]
            self._start(agent, f"rank-{rank}", command, environment)

    def park(self, name: str, count: int = 1) -> None:
        agent = self.agents[name]
        for number in range(count):
            self._start(agent, f"spare-{number}", ["park", "--home", str(agent.home)], dict(os.environ))

    def _start(self, agent: Agent, what: str, command: list[str], environment: dict[str, str]) -> None:
        path = agent.home / f"{what}.log"
        if not self.execute:
            self.processes.append(shared().start(command, environment, path))
            return
        argv = [sys.executable, "-m", "gridagent", *command]
        with path.open("wb") as log:
            self.processes.append(subprocess.Popen(argv, stdout=log, stderr=log, env=environment))

    def controller(self) -> Client:
        """A client of the home's controller, which is started if need be."""
        self.clients.append(ensure(self.home))
        return self.clients[-1]

    def controller_pid(self) -> int:
        return int(self.home.lock.read_text())

    def kill_controller(self) -> Client:
        """kill -9, and a client of its successor."""
        pid = self.controller_pid()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return self.controller()

    def logs(self) -> str:
        """What all processes said, for a test that fails."""
        paths = [*self.root.glob("*/*.log"), self.home.log]
        return "\n".join(f"== {p}\n{p.read_text(errors='replace')[-3000:]}" for p in paths if p.exists())

    def steps(self, rank: int) -> list[int]:
        path = self.out / f"rank-{rank}.txt"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def finish_job(self) -> None:
        """Lets the job end and waits for it; the steps of every rank must be complete and in order."""
        (self.out / "stop").touch()
        for rank in range(3):
            wait_for(f"rank {rank} has finished", lambda rank=rank: self._finished(rank))
            steps = self.steps(rank)
            assert steps == list(range(len(steps))), f"rank {rank} lost or repeated a step"

    def _finished(self, rank: int) -> bool:
        found = [r for a in self.agents.values() if a.process and a.process.poll() is None
                 for r in a.client().status().ranks]  # fmt: skip
        return any(r.rank == rank and r.state == "finished" for r in found)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        with contextlib.suppress(Unanswered, OSError, ValueError):
            os.kill(self.controller_pid(), signal.SIGKILL)
        for agent in self.agents.values():
            if agent.process and agent.process.poll() is None:
                for spare in agent.client().status().spares:
                    with contextlib.suppress(OSError):
                        os.kill(spare.pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait(DEADLINE_S)
        super().close()


@contextlib.contextmanager
def swap_fleet(*, execute: bool = False) -> Iterator[SwapFleet]:
    made = SwapFleet(execute=execute)
    try:
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        made.close()


def training(client: Client, step: int = 5) -> Job:
    """The job, once all its ranks train and have done so many steps."""

    def look() -> Job | None:
        jobs = [job for job in client.view("jobs", Job) if job.state == "training"]
        return jobs[0] if jobs and min(rank.step for rank in jobs[0].ranks) >= step else None

    return wait_for("the job trains", look)


def parked(client: Client, count: int = 1) -> list[Spare]:
    def look() -> list[Spare]:
        found = [spare for spare in client.view("spares", Spare) if spare.state == "parked"]
        return found if len(found) >= count else []

    return wait_for("spares are parked", look)


def gate(plan: Plan, reason: str = "a test") -> Gate:
    return Gate(digest=plan.digest, who="ann", reason=reason, typed=plan.node)


def ended(client: Client, run: str) -> Run:
    """The run, once it has ended or is held."""
    return wait_for("the run ends", lambda: _stopped(client.one("run", run, Run)))


def _stopped(run: Run) -> Run | None:
    return run if run.state in ENDS or run.state in ("held", "interrupted") else None
