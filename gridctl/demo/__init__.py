"""`gridctl demo`: a node of a live job fails, the job does not notice, and the demo proves it.

Everything is real but the hardware: agents, certificates, controller, torch job, hand-over, journal. The
second node's hardware plays a recording of a failing memory.
"""

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from gridctl.demo.errors import DemoError
from gridctl.demo.progress import Progress
from gridctl.model.plans import Gate, Plan, Request
from gridctl.model.runs import ENDS, Incident, Run

__all__ = ["DemoError", "Options", "run"]

FAULTY = "n2"
STEPS_BEFORE = 8  #: trained undisturbed before the fault begins
STEPS_AFTER = 12  #: trained after the swap


@dataclass(frozen=True)
class Options:
    """What the demo shows."""

    fsdp: bool = False
    ranks_per_node: int = 1
    evacuate: str = ""  #: "gpu:1": only this device of the faulty node is left
    sabotage: str = ""  #: bit, moment, rng, buffer, nan: spoils the transfer


def run(options: Options, confirm: Callable[[Plan], Gate]) -> dict[str, Any]:
    """Runs the demo; returns its report. Raises `DemoError`. Whatever was started is ended."""
    from gridctl.demo.fleet import DemoFleet

    root = Path(tempfile.mkdtemp(prefix="gridctl-"))
    fleet = DemoFleet(root, options.ranks_per_node)
    with Progress(sys.stderr) as progress, _interruptible():
        try:
            return _run(options, confirm, fleet, progress)
        finally:
            with _undisturbed():
                fleet.close()
                shutil.rmtree(root, ignore_errors=True)


def _run(options: Options, confirm: Callable[[Plan], Gate], fleet: Any, progress: Progress) -> dict[str, Any]:
    from gridctl.control.process import ensure_running

    if not fleet.has_room():
        raise DemoError(
            f"{fleet.root} is too long a path for the sockets below it: set TMPDIR to a shorter one"
        )
    progress.at(2, "certificates, four agents")
    fleet.found(recording())
    fleet.start_agents(drill=bool(options.sabotage))
    os.environ.update({name: fleet.environ[name] for name in ("GRIDCTL_HOME", "GRIDCTL_DEMO")})
    progress.at(8, "a warm spare and a job of three nodes")
    fleet.start_spares(options.ranks_per_node)
    fleet.start_job("demo", free_port(), fsdp=options.fsdp, damaged=FAULTY, damage=options.sabotage)
    client = ensure_running(fleet.home)
    progress.at(12, "the controller is up; the job compiles its first steps")
    fleet.wait(lambda: fleet.step("demo") >= STEPS_BEFORE, "the job's first steps")
    progress.at(25, "training; the memory of n2 begins to fail")
    fleet.trigger_fault()
    plan = _proposed(client, options, fleet)
    progress.at(38, "a finding became an incident, and a plan is proposed")
    with progress.paused():
        gate = confirm(plan)
    started_s = time.time()
    ended = _follow(client, client.apply(plan.id, gate).id, progress)
    cut = _cut_report(ended)
    ended_s = time.time()
    progress.at(62, f"the hand-over ended: {ended.state}")
    _expect(ended, options, cut)
    stop = fleet.step("demo") + STEPS_AFTER
    fleet.stop_job("demo", stop)
    incident = client.one("incident", plan.incident, Incident)
    client.stop()
    progress.at(72, "the same job again, undisturbed")
    fleet.start_job("control", free_port(), fsdp=options.fsdp)
    fleet.stop_job("control", stop)
    progress.at(98, "comparing every step")
    return _report(fleet, plan, cut, incident, (started_s, ended_s))


def _proposed(client: Any, options: Options, fleet: Any) -> Plan:
    """The plan that the controller proposed; for one device, one made for the same incident."""
    incidents: list[Incident] = []

    def seen() -> bool:
        incidents[:] = [i for i in client.view("incidents", Incident) if i.node == FAULTY and i.plans]
        return bool(incidents)

    fleet.wait(seen, "the incident and its plan", 60.0)
    if options.evacuate:
        request = Request(node=FAULTY, devices=[options.evacuate], incident=incidents[0].id, who="demo")
        plan: Plan = client.plan(request)
    else:
        plan = client.one("plan", incidents[0].plans[-1], Plan)
    return plan


def _follow(client: Any, run_id: str, progress: Progress) -> Run:
    until_s = time.monotonic() + 150.0
    while True:
        run: Run = client.one("run", run_id, Run)
        if run.state in ENDS or run.state == "held":
            return run
        if time.monotonic() > until_s:
            raise DemoError(f"run {run_id} did not end within 150 s; it is {run.state}: {run.text}")
        working = next((step.text for step in run.steps if step.state == "started"), run.state)
        progress.at(45, working)
        time.sleep(0.2)


def _cut_report(run: Run) -> dict[str, Any]:
    for step in run.steps:
        for value in step.values:
            if isinstance(value, dict) and "outcome" in value:
                return value
    return {}


def _expect(run: Run, options: Options, cut: dict[str, Any]) -> None:
    """A sound swap must commit; a spoilt one must be found and aborted. Anything else is an error."""
    outcome = cut.get("outcome", "")
    if options.sabotage and outcome == "commit":
        raise DemoError(f"the sabotage {options.sabotage} was not found: the hand-over committed")
    if not options.sabotage and outcome != "commit":
        raise DemoError(f"run {run.id} ended {run.state}: {run.text} {cut.get('reason', '')}".rstrip())
    if options.sabotage and not cut.get("found"):
        raise DemoError(f"run {run.id} ended {run.state} without a finding: {run.text}")


def _report(
    fleet: Any, plan: Plan, cut: dict[str, Any], incident: Incident, window: tuple[float, float]
) -> dict[str, Any]:
    from gridctl.demo import report

    swap, control = fleet.root / "demo", fleet.root / "control"
    boundary_s = float(cut.get("t_boundary_unix_s", 0.0))
    return {
        "ranks": report.ranks(swap, control, fleet.world_size),
        "digests": report.digests(swap, control, fleet.world_size),
        "steps": report.steps(swap, fleet.world_size),
        "pause": report.pause(swap, fleet.world_size, window, boundary_s, cut),
        "bytes": cut.get("state_bytes", 0),
        "outcome": cut.get("outcome", ""),
        "found": cut.get("found", []),
        "plan": msgspec.to_builtins(plan),
        "incident": msgspec.to_builtins(incident),
    }


def recording() -> Path:
    """The recording of the failing memory: from the source tree, or as installed with the package."""
    for folder in (Path(__file__).parents[2] / "recordings", Path(__file__).parent):
        if (file := folder / "ecc-storm.jsonl.gz").is_file():
            return file
    raise DemoError("recordings/ecc-storm.jsonl.gz is missing; make it with recordings/make_ecc_storm.py")


def free_port() -> int:
    """A port of rank 0's node that nobody listens on at the moment."""
    from gridctl.demo.fleet import address

    with socket.socket() as probe:
        probe.bind((address("n1"), 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Whoever presses Ctrl-C twice does not break off the cleaning up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: with everything cleaned up."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
