"""What the step boundary costs when there is nothing to do: microseconds per `end_step`.

One rank with a session whose agent's end is a socket that swallows what comes (so that steps are
reported, as under an agent), and one without an agent. The peer beside them: an empty Python call.
Aim: 50 us.
"""

import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

AIM_US = 50.0
CALLS, ROUNDS = 2000, 25


def measure(call: Callable[[], None]) -> tuple[float, float]:
    """(median, 95th percentile) over rounds of the mean cost of one call, in microseconds."""
    rounds = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - begun_s) / CALLS * 1e6)
    return statistics.median(rounds), statistics.quantiles(rounds, n=20)[-1]


def swallow(server: socket.socket) -> None:
    connection, _ = server.accept()
    while connection.recv(1 << 16):
        pass


def session_cost(path: str) -> tuple[float, float]:
    """One process group and one session, `path` being the agent's socket or ""."""
    os.environ["GRIDAGENT_SOCKET"] = path
    from gridagent.train import CONTEXT, Session

    CONTEXT.link = None
    model = nn.Linear(8, 8)
    session = Session(model=model, optimizer=torch.optim.AdamW(model.parameters()))
    loss = torch.tensor(1.5)
    cost = measure(lambda: session.end_step(loss=loss))
    session.close()
    return cost


def main() -> None:
    from gridagent import train  # noqa: F401  (makes "grid" known)

    dist.init_process_group("grid", store=dist.HashStore(), rank=0, world_size=1)
    folder = tempfile.mkdtemp(prefix="g")
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"{folder}/agent.sock")
    server.listen()
    threading.Thread(target=swallow, args=(server,), daemon=True).start()
    rows = {
        "an empty call": measure(lambda: None),
        "end_step, no agent": session_cost(""),
        "end_step, reporting to an agent": session_cost(f"{folder}/agent.sock"),
    }
    for name, (median_us, high_us) in rows.items():
        print(f"{name:34} median {median_us:7.2f} us   95 % of rounds below {high_us:7.2f} us")
    print(f"aim: {AIM_US:.0f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
