"""Host memory of a hand-over's transfer: peak of resident memory at both ends, against the state's size.

Two processes, one sealed loopback connection, the product's `send_state` and `receive_state` on a model with
AdamW (parameters and two moments). Both hold their state before; "peak" is what the process had resident at
most during the transfer, less what it had before its state existed. Aims: source 1.25 x state, target 1.1 x.

usage: python benchmarks/transfer_memory.py [--megabytes 1000]
"""

import argparse
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

AIMS = {"source": 1.25, "target": 1.1}
HANDOVER = "ho-memory"


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {field} in /proc/self/status")


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def end(role: str, pipe: Connection, megabytes: int) -> None:
    """One end of the transfer; sends (state bytes, bytes held before, peak bytes) back."""
    import torch
    from torch import nn

    from gridagent.train.sealed import KeyPair, Listener, connect
    from gridagent.train.state import RankState
    from gridagent.train.transfer import receive_state, send_state

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.ones(64, 64) @ torch.ones(64, 64)])  # what torch imports and allocates once
    base = resident("VmRSS")
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * (2048 * 2048 + 2048))))
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(1, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = RankState()
    state.register("model", model)
    state.register("optimizer", optimizer)
    pair = KeyPair()
    if role == "target":
        state.poison()
        listener = Listener("127.0.0.1", HANDOVER)
        pipe.send((listener.host, listener.port, listener.meet(pipe.recv(), "state")))
    else:
        pipe.send(pair.public)
        host, port, public = pipe.recv()
    before = resident("VmRSS") - base
    forget_peak()
    if role == "target":
        report = receive_state(listener.accept(60.0)[1], state)
    else:
        channel = connect(host, port, pair, public, HANDOVER, "state")
        report = send_state(channel, state.inventory(), state.rng_entries)
    pipe.send((report.nbytes, before, resident("VmHWM") - base))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    megabytes = parser.parse_args().megabytes
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for role in AIMS:
        pipes[role], far = context.Pipe()
        processes.append(context.Process(target=end, args=(role, far, megabytes)))
        processes[-1].start()
    pipes["target"].send(pipes["source"].recv())
    pipes["source"].send(pipes["target"].recv())
    for role, aim in AIMS.items():
        state, before, peak = pipes[role].recv()
        print(
            f"{role}: state {state / 1e6:.0f} MB, held before {before / state:.3f} x, "
            f"peak {peak / state:.3f} x (aim: {aim} x)"
        )
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
