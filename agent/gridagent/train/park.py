"""A parked spare: torch imported, no rank yet. `specialise` makes it run a rank's script.

It waits for its node's agent, takes the rank's launch as it was registered by `gridagent exec`, and
runs the script in this very process, against stand-in groups, until it is warm. From the script's
`end_step` it then either takes the rank over or ends.
"""

import os
import queue
import runpy
import sys
import threading
import traceback
from typing import Any

import msgspec
import torch

from gridagent import wire
from gridagent.environment import OF_THE_JOB
from gridagent.script import script_of
from gridagent.train import CONTEXT, Session  # noqa: F401  (importing makes "grid" known and torch warm)
from gridagent.train.context import numeric_facts
from gridagent.train.handover import refuse_other
from gridagent.train.link import LinkError
from gridagent.train.standin import StandInGroup, install_rendezvous

_WARM_TIMEOUT_S = 600.0
_SETTLE_S = 2.0


def main() -> int:
    """Parks until the agent says what to become. Returns the exit status of the script that it became."""
    link = CONTEXT.connect()
    if link is None:
        print("gridagent park: GRIDAGENT_SOCKET is not set; start it with `gridagent park`", file=sys.stderr)
        return 2
    numeric_facts()
    orders: queue.SimpleQueue[wire.Specialise | None] = queue.SimpleQueue()

    def specialise(args: dict[str, Any]) -> Any:
        if CONTEXT.spare is not None:
            raise LinkError(
                f"this spare is already rank {CONTEXT.spare.launch.rank} of {CONTEXT.spare.launch.job}"
            )
        CONTEXT.spare = msgspec.convert(args, wire.Specialise)
        orders.put(CONTEXT.spare)
        CONTEXT.warm.wait(_WARM_TIMEOUT_S)
        if CONTEXT.failed or CONTEXT.session is None:
            raise LinkError(f"the script ended before it was warm: {CONTEXT.failed or 'it made no Session'}")
        report: wire.SessionReport = CONTEXT.session.at_boundary(CONTEXT.session.report)
        if report.buckets != CONTEXT.spare.buckets:
            raise LinkError(
                f"DDP's buckets are {report.buckets!r} here and {CONTEXT.spare.buckets!r} in the job: "
                "gradients would be reduced crosswise. Is the model built in the same way on every rank?"
            )
        return wire.plain(report)

    def retire(args: dict[str, Any]) -> Any:
        refuse_other(CONTEXT.spare, args)
        threading.Timer(0.2, os._exit, args=(0,)).start()
        return {}

    link.handlers |= {"specialise": specialise, "retire": retire}
    order = orders.get()
    if order is None:
        return 0
    try:
        return _become(order)
    finally:
        link.settle(_SETTLE_S)  # whoever asked hears why the script ended


def _become(order: wire.Specialise) -> int:
    launch = order.launch
    CONTEXT.take_over(launch.env)
    for name in OF_THE_JOB:
        os.environ.pop(name, None)
    # The spare has devices of its own, and its CUDA context exists already.
    os.environ.update({name: value for name, value in launch.env.items() if name != "CUDA_VISIBLE_DEVICES"})
    os.environ.update(
        RANK=str(launch.rank),
        WORLD_SIZE=str(launch.world_size),
        LOCAL_RANK=str(launch.local_rank),
        GRIDAGENT_JOB=launch.job,
    )
    if threads := launch.env.get("OMP_NUM_THREADS", ""):  # torch is imported: the variable comes too late
        torch.set_num_threads(int(threads))
    buckets = _buckets(order.buckets)
    CONTEXT.registry.standin = lambda rank, size: StandInGroup(rank, size, buckets)
    install_rendezvous(launch.world_size, launch.rank)
    try:
        os.chdir(launch.cwd)
        _run(launch)
    except SystemExit as error:
        CONTEXT.failed = f"it exited with {error.code}"
        CONTEXT.warm.set()
        raise
    except BaseException as error:
        CONTEXT.failed = f"{type(error).__name__}: {error}"
        CONTEXT.warm.set()
        if not isinstance(error, Exception):
            raise
        traceback.print_exc()  # the script's failure, not one of gridagent
        return 1
    if not CONTEXT.warm.is_set():
        CONTEXT.failed = f"it came to its end within {order.warmup_steps} steps of step {order.step}"
        CONTEXT.warm.set()
    return 0


def _run(launch: wire.LaunchSpec) -> None:
    """Runs `python [-m] script args` in this process, as `__main__`."""
    words = script_of(launch.argv)
    if words[:1] == ["-m"]:
        sys.argv = [words[1], *words[2:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if not words:
        raise LinkError(f"a spare can run `python SCRIPT ...` or `python -m MODULE ...`, not {launch.argv!r}")
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")


def _buckets(text: str) -> list[list[int]] | None:
    """The layout of one DDP ("5 4,3 2 1 0"); several cannot be told apart by their broadcasts."""
    if not text or ";" in text:
        return None
    return [[int(index) for index in bucket.split()] for bucket in text.split(",")]
