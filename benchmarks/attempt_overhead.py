"""What it costs that a step can be repeated: microseconds a step, by part, and as a share of the step.

    python benchmarks/attempt_overhead.py [RANKS]

Three ranks (or so many) of DDP over gloo on this machine, each with a session whose agent's end swallows
what comes.
Blocks of steps as attempts and blocks without alternate in the same processes. The parts are measured
inside the attempts, as time that passed and as time on the CPU: sending and voting wait for the slowest
rank, and where ranks share cores also for their turn. Aim: 1 % of the step.
"""

import importlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

AIM = 0.01
BLOCKS = 8
#: name -> (width of the layers, steps in a block, batch)
MODELS = {"small (9 k parameters)": (64, 100, 16), "5 M parameters": (1560, 12, 64)}


def swallow(server: socket.socket) -> None:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass


class Parts:
    """Times of the parts, on rank 0."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self.cpu_s: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_s, cpu_s = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s[part] += time.perf_counter() - begun_s
                self.cpu_s[part] += time.thread_time() - cpu_s

        setattr(owner, method, timed)


class Same:
    """Gives one batch for ever."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[torch.Tensor]:
        return repeat(self.batch)

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


def build(width: int, batch: torch.Tensor, session_type: Any) -> tuple[Any, ...]:
    torch.manual_seed(1)
    layers = [
        nn.Linear(width, width),
        nn.BatchNorm1d(width),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(width, width),
    ]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    session = session_type(model=model, optimizer=optimizer, schedule=schedule, loader=Same(batch))
    return model, optimizer, schedule, session


def train(name: str) -> None:
    from gridagent.train import CONTEXT, Session

    width, steps, count = MODELS[name]
    batch = torch.randn(count, width)
    model, optimizer, schedule, session = build(width, batch, Session)
    loader = session.state.loaders["loader"]

    def block(attempt: Callable[[], Any]) -> float:
        dist.barrier()
        begun_s = time.perf_counter()
        for batch in islice(session.batches(loader), steps):
            with attempt():
                model(batch).square().mean().backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                session.end_step()
        return (time.perf_counter() - begun_s) / steps

    block(nullcontext)
    with_s, without_s = [], []
    for number in range(BLOCKS + 1):
        with_s.append(block(session.attempt))
        if number == 0:
            parts = watched(session.attempts)
        session.attempts.used = False
        without_s.append(block(nullcontext))
    if dist.get_rank() == 0:
        tell(name, statistics.median(with_s[1:]), statistics.median(without_s[1:]), parts, BLOCKS * steps)
    session.close()
    CONTEXT.link = CONTEXT.registry.tolerance = None


def watched(attempts: Any) -> Parts:
    parts = Parts()
    parts.watch(attempts.window, "begin", "snapshot: window begins")
    parts.watch(attempts.window, "ended", "snapshot: step ended")
    parts.watch(attempts.memory.keeper, "write", "memory: read and written")
    parts.watch(attempts.memory, "_swap", "memory: sent and received")
    parts.watch(attempts.memory.keeper, "take", "memory: kept")
    parts.watch(attempts.memory, "check_tail", "memory: tail checked, mark written")
    parts.watch(attempts, "_failed_vote", "vote and memory together")
    return parts


def tell(name: str, with_s: float, without_s: float, parts: Parts, steps: int) -> None:
    print(f"{name}: a step takes {without_s * 1e6:.0f} us, as an attempt {with_s * 1e6:.0f} us"
          f" ({with_s / without_s - 1:+.1%})")  # fmt: skip
    wall_us, cpu_us = apart(parts.spent_s, steps), apart(parts.cpu_s, steps)
    for part in sorted(wall_us):
        share = wall_us[part] / without_s / 1e6
        print(f"  {part:34} {wall_us[part]:7.0f} us {share:6.2%}   CPU {cpu_us[part]:5.0f} us")
    share, busy = (sum(us.values()) / without_s / 1e6 for us in (wall_us, cpu_us))
    print(f"  {'together':34} {sum(wall_us.values()):7.0f} us {share:6.2%}   CPU {busy:.2%}   aim {AIM:.0%}")


def apart(spent_s: dict[str, float], steps: int) -> dict[str, float]:
    """Microseconds a step; the vote without the memory that is passed on within."""
    us = {part: spent / steps * 1e6 for part, spent in spent_s.items()}
    inside = ("memory: read and written", "memory: sent and received", "memory: kept")
    us["vote"] = us.pop("vote and memory together") - sum(us[part] for part in inside)
    return us


def rank() -> None:
    with tempfile.TemporaryDirectory(prefix="g") as folder:
        torch.set_num_threads(1)
        os.environ["GRIDAGENT_SOCKET"] = f"{folder}/agent.sock"
        importlib.import_module("gridagent.train")  # makes "grid" known
        dist.init_process_group("grid")
        for name in MODELS:
            server = socket.socket(socket.AF_UNIX)
            with server:
                server.bind(f"{folder}/agent.sock")
                server.listen()
                threading.Thread(target=swallow, args=(server,), daemon=True).start()
                train(name)
            os.unlink(f"{folder}/agent.sock")
        dist.destroy_process_group()


def main(count: int = 3) -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen([sys.executable, __file__, "rank"], env={**environment, "RANK": str(number)})
        for number in range(count)
    ]
    return max(abs(process.wait()) for process in ranks)


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank()
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
