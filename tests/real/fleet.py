"""Real training jobs under real agents, and hand-overs driven over HTTPS as the controller drives them.

fleet = TrainingFleet(nodes=5)                    # agents n1..n5
run = fleet.start(Job("ddp", steps=50))      # rank r trains on node r+1, and waits at step HOLD
handover = fleet.handover(run, ranks=[1])         # spares are parked on the last node
report = handover.swap()                          # step by step: see driver.py
assert_same(run, run.finish(), fleet.control(run.job))   # every loss, and digests of the final state
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agents import DEADLINE_S, Agent, Fleet, free_port, wait_for
from driver import HOLD, Handover
from forkserver import JOBS, Process, shared


@dataclass(frozen=True)
class Job:
    """What is trained. Equal jobs share one undisturbed run."""

    kind: str = "ddp"  #: of training, see jobs/zoo.py
    args: tuple[str, ...] = ()  #: after the kind
    world: int = 3
    steps: int = 36
    env: tuple[tuple[str, str], ...] = ()
    script: str = "zoo.py"


@dataclass
class Trace:
    """All that must be equal in a disturbed and an undisturbed run."""

    losses: dict[int, list[str]] = field(default_factory=dict)  #: rank -> "STEP LOSS_HEX" of every step
    digests: dict[int, dict[str, str]] = field(default_factory=dict)  #: rank -> category -> digest at the end


@dataclass
class Holder:
    """Who has a rank, or is parked: a process below an agent."""

    agent: Agent
    process: Process
    session: str = ""


class Run:
    """One job's processes, from its start to its end."""

    def __init__(self, fleet: "TrainingFleet", job: Job, name: str) -> None:
        self.fleet, self.job, self.name = fleet, job, name
        self.folder = fleet.root / name
        self.folder.mkdir()
        self.ranks: dict[int, Holder] = {}
        self.left: list[Holder] = []  #: sources that gave their rank away, spares that were used up
        self.handovers: list[Handover] = []
        self.epoch = 0
        self.held = 0  #: the step that no rank begins

    def limit(self, step: int) -> None:
        """No rank begins this step."""
        self.held = step
        self._write("limit", str(step))

    def let_run(self) -> None:
        """From now on the job runs at full speed to its end."""
        for name in ("limit", "pace"):
            (self.folder / name).unlink(missing_ok=True)

    def pace(self, seconds: float) -> None:
        """Every step takes so much longer."""
        self._write("pace", str(seconds))

    def _write(self, name: str, text: str) -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_text(text)
        draft.rename(self.folder / name)

    def steps(self, rank: int) -> int:
        """Steps that the rank has written."""
        path = self.folder / f"rank-{rank}.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait_step(self, step: int) -> None:
        """Until every rank has done so many steps."""
        wait_for(f"{self.name} does step {step}", lambda: self._check_alive() and self._all_at(step))

    def _all_at(self, step: int) -> bool:
        return all(self.steps(rank) >= step for rank in range(self.job.world))

    def _check_alive(self) -> bool:
        for rank, holder in self.ranks.items():
            assert holder.process.poll() in (None, 0), f"rank {rank} ended\n{self.logs()}"
        return True

    def wait_sessions(self) -> None:
        """Until the agents know the session of every rank."""
        for rank, holder in self.ranks.items():
            if holder.session:
                continue

            def look(rank: int = rank, agent: Agent = holder.agent) -> str:
                self._check_alive()
                found = [r for r in agent.client().status().ranks if (r.job, r.rank) == (self.name, rank)]
                return found[0].session if found else ""

            holder.session = wait_for(f"the agent knows rank {rank} of {self.name}", look)

    def discard(self, spare: Holder) -> None:
        """Ends a spare that was parked in vain."""
        spare.process.kill()
        spare.process.wait(DEADLINE_S)
        self.left.remove(spare)

    def finish(self) -> Trace:
        """Lets the job run to its end; every process must end by itself, with status 0."""
        self.let_run()
        for holder in [*self.ranks.values(), *self.left]:
            try:
                status = holder.process.wait(DEADLINE_S)
            except (subprocess.TimeoutExpired, TimeoutError):
                raise AssertionError(f"process {holder.process.pid} has not ended\n{self.logs()}") from None
            assert status == 0, f"process {holder.process.pid} ended with {status}\n{self.logs()}"
        return self.trace()

    def trace(self) -> Trace:
        """What was written so far."""
        trace = Trace()
        for rank in range(self.job.world):
            trace.losses[rank] = (self.folder / f"rank-{rank}.txt").read_text().splitlines()
            digests = self.folder / f"digests-{rank}.json"
            trace.digests[rank] = json.loads(digests.read_text()) if digests.exists() else {}
        return trace

    def processes(self) -> list[Process]:
        return [holder.process for holder in [*self.ranks.values(), *self.left]]

    def logs(self) -> str:
        """What the processes said, for a test that fails."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-4000:]}" for path in paths)


class TrainingFleet(Fleet):
    """Agents n1..nN and everything that runs below them."""

    def __init__(self, nodes: int = 5, *options: str, config: str = "") -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(16)
        self.runs: list[Run] = []
        self.fence = 0
        self._number = 0
        self._controls: dict[Job, Trace] = {}
        made = [self.agent(f"n{number + 1}", config) for number in range(nodes)]
        list(self.pool.map(lambda agent: agent.start("--allow-damage", *options), made))

    def node(self, number: int) -> Agent:
        """The agent of node n<number>."""
        return self.agents[f"n{number}"]

    # ----------------------------------------------------------------------------------- processes

    def start(self, job: Job, *, hold: int | None = HOLD, execute: bool = False) -> Run:
        """Starts rank r on node r+1; all wait before step `hold`. `execute`: by a real `gridagent exec`."""
        run = self._new(job)
        if hold is not None:
            run.limit(hold)
        start = self._execute if execute else self._fork
        for rank, environment in enumerate(self._environments(job)):
            agent = self.node(rank + 1)
            argv = ["exec", "--home", str(agent.home), "--job", run.name, "--", *self._argv(run)]
            run.ranks[rank] = Holder(agent, start(run, f"rank-{rank}", argv, environment))
        return run

    def park(self, run: Run, node: int = 0, *, execute: bool = False) -> Holder:
        """A parked spare on a node, the last one by default."""
        agent = self.node(node or len(self.agents))
        start = self._execute if execute else self._fork
        argv = ["park", "--home", str(agent.home)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = start(run, f"spare-{len(run.left) + self._next()}", argv, environment)
        spare = Holder(agent, process)

        def look() -> str:
            assert process.poll() is None, run.logs()
            return next((s.session for s in agent.client().status().spares if s.pid == process.pid), "")

        try:
            spare.session = wait_for("the spare is parked", look)
        except AssertionError:
            print(run.logs(), agent.log, agent.client().status(), process.pid)
            raise
        return spare

    def control(self, job: Job) -> Trace:
        """The undisturbed run of the same job, without any agent. Done once a session."""
        if job not in self._controls:
            self._controls[job] = self.start_alone(job).finish()
        return self._controls[job]

    def start_alone(self, job: Job) -> Run:
        """Starts a job that knows of no agent."""
        run = self._new(job)
        for rank, environment in enumerate(self._environments(job)):
            argv = ["exec", "--home", str(self.node(1).home), "--job", run.name, "--", *self._argv(run)]
            environment["FORKSERVER_NO_AGENT"] = "1"
            run.ranks[rank] = Holder(self.node(1), self._fork(run, f"rank-{rank}", argv, environment))
        return run

    def _new(self, job: Job) -> Run:
        run = Run(self, job, f"j{self._next()}-{job.kind}")
        self.runs.append(run)
        return run

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _argv(self, run: Run) -> list[str]:
        return [
            sys.executable,
            str(JOBS / run.job.script),
            str(run.folder),
            str(run.job.steps),
            run.job.kind,
            *run.job.args,
        ]

    def _environments(self, job: Job) -> Iterator[dict[str, str]]:
        port = free_port()
        for rank in range(job.world):
            yield {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(job.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **dict(job.env),
            }

    def _fork(self, run: Run, what: str, argv: list[str], environment: dict[str, str]) -> Process:
        return shared().start(argv, environment, run.folder / f"{what}.log")

    def _execute(self, run: Run, what: str, argv: list[str], environment: dict[str, str]) -> Process:
        with (run.folder / f"{what}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gridagent", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    # ------------------------------------------------------------------------------------ operations

    def handover(self, run: Run, ranks: list[int], **options: Any) -> Handover:
        """A hand-over of these ranks to spares that are parked now. Options: see `Handover`."""
        handover = Handover(self, run, ranks, **options)
        run.handovers.append(handover)
        return handover

    def all(self, calls: list[Callable[[], Any]]) -> list[Any]:
        """Calls at once, results in order; the first error is raised after all have ended."""
        futures = [self.pool.submit(call) for call in calls]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    # ----------------------------------------------------------------------------------------- the end

    def check_and_clear(self) -> None:
        """Ends what is left of all runs; raises if a process had to be killed that should have ended."""
        runs, self.runs = self.runs, []
        for run in runs:
            for handover in run.handovers:
                handover.let_go()
        left = [process for run in runs for process in run.processes() if process.poll() is None]
        strays = [pid for run in runs for pid in _sessions_left([p.pid for p in run.processes()])]
        for pid in {*(process.pid for process in left), *strays}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in left:
            process.wait(DEADLINE_S)
        for run in runs:
            shutil.rmtree(run.folder, ignore_errors=True)
        remaining = [*(process.pid for process in left), *strays]
        assert not remaining, f"processes were left: {remaining}"

    def close(self) -> None:
        try:
            self.check_and_clear()
        finally:
            self.pool.shutdown()
            super().close()


def _sessions_left(leaders: list[int]) -> list[int]:
    """Live processes in the process sessions of these leaders, themselves excluded (loader workers)."""
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(words[3]) in leaders and int(process.name) not in leaders and words[0] not in "ZX":
                left.append(int(process.name))
    return left


def assert_same(run: Run, trace: Trace, control: Trace) -> None:
    """Every loss of every rank, every digest of the final state, no step lost or repeated."""
    for rank in range(run.job.world):
        steps = [line.split()[0] for line in trace.losses[rank]]
        assert steps == [str(step) for step in range(run.job.steps)], (
            f"rank {rank} lost or repeated a step: {steps}"
        )
        pairs = zip(trace.losses[rank], control.losses[rank], strict=True)
        differing = [pair for pair in pairs if pair[0] != pair[1]]
        assert not differing, f"rank {rank}: first differing loss {differing[0]} (disturbed, undisturbed)"
        wrong = [
            part for part, digest in control.digests[rank].items() if trace.digests[rank].get(part) != digest
        ]
        assert control.digests[rank]
        assert not wrong, f"rank {rank}: other final state in {wrong}"
