"""Small trainings of every kind. argv: FOLDER STEPS KIND [ARGUMENT ...]; kinds are functions with @kind."""

import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import data
import faults
import numpy as np
import record
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gridagent.train import Session


@dataclass
class Training:
    """What one kind sets up. `apply` is called after the backward pass(es) of a step."""

    model: nn.Module
    optimizer: Any
    forward: Callable[[Tensor], Tensor] | None = None  #: batch -> loss; else the mean square of the model
    apply: Callable[[], None] | None = None
    micro_batches: int = 1
    before_step: Callable[[Session], Tensor | None] = lambda _session: None  #: may add to the loss
    more: dict[str, Any] = field(default_factory=dict)  #: also registered
    keep_gradients: bool = False


KINDS: dict[str, Callable[..., Training]] = {}


def kind(function: Callable[..., Training]) -> Callable[..., Training]:
    KINDS[function.__name__] = function
    return function


def net(*, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(7)
    first: list[nn.Module] = [nn.Linear(data.FEATURES, 50)]
    middle: list[nn.Module] = [nn.BatchNorm1d(50)] if norm else []
    return nn.Sequential(
        *first, *middle, nn.GELU(), nn.Dropout(0.1), nn.Linear(50, 34), nn.Tanh(), nn.Linear(34, 8)
    )


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


@kind
def ddp() -> Training:
    """BatchNorm, dropout, AdamW, clipping, a cosine schedule, a buffer with infinities."""
    layers = net(norm=True)
    layers.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    model = DDP(layers)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, record.STEPS)

    def apply() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return Training(model, optimizer, apply=apply, more={"schedule": schedule})


@kind
def wide() -> Training:
    """Over 8 MiB of state, so that a transfer has several chunks; BatchNorm."""
    torch.manual_seed(7)
    layers = [nn.Linear(data.FEATURES, 900), nn.BatchNorm1d(900), nn.GELU(), nn.Linear(900, 900)]
    model = DDP(nn.Sequential(*layers))
    return Training(model, adamw(model))


@kind
def fsdp() -> Training:
    """FSDP2; no layer's rows divide by the number of ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return _sharded(init_device_mesh("cpu", (dist.get_world_size(),)))


@kind
def hsdp() -> Training:
    """A mesh of 2 x 2: sharded in one direction, replicated in the other. Four ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return _sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def _sharded(mesh: Any) -> Training:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)

    def apply() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Training(model, optimizer, apply=apply)


@kind
def ema(norm: str = "norm") -> Training:
    """An exponential moving average of the parameters; with BatchNorm it copies the rank's own buffers."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = DDP(net(norm=norm == "norm"))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = adamw(model)

    def apply() -> None:
        optimizer.step()
        average.update_parameters(model.module)

    return Training(model, optimizer, apply=apply, more={"ema": average})


@kind
def accumulate() -> Training:
    """Three micro-batches a step, then clipping. The windows lie across the ends of the data's epochs."""
    model = DDP(net())
    optimizer = adamw(model)

    def apply() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return Training(model, optimizer, apply=apply, micro_batches=3)


@kind
def scaler(dtype: str) -> Training:
    """Mixed precision with a grad scaler; two steps overflow."""
    model = DDP(net())
    optimizer = adamw(model)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    overflow = torch.ones(())

    def forward(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=getattr(torch, dtype)):
            loss = model(batch).float().square().mean() * overflow
        scaled: Tensor = scale.scale(loss)
        return scaled

    def apply() -> None:
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale.step(optimizer)
        scale.update()

    def before_step(session: Session) -> None:
        overflow.fill_(float("inf") if session.step in (10, 25) else 1.0)

    return Training(model, optimizer, forward, apply, before_step=before_step, more={"scaler": scale})


@kind
def mixed() -> Training:
    """Accumulation, clipping and a grad scaler together; BatchNorm, dropout; one step overflows."""
    model = DDP(net(norm=True))
    optimizer = adamw(model)
    scale = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    overflow = torch.ones(())

    def forward(batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).float().square().mean() * overflow
        scaled: Tensor = scale.scale(loss)
        return scaled

    def apply() -> None:
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale.step(optimizer)
        scale.update()

    def before_step(session: Session) -> None:
        overflow.fill_(float("inf") if session.step == 10 else 1.0)

    more = {"scaler": scale}
    return Training(model, optimizer, forward, apply, micro_batches=3, before_step=before_step, more=more)


@kind
def optimizers(name: str) -> Training:
    """Several parameter groups under one optimizer of each family that torch has for CPU."""
    model = DDP(net())
    layers = [layer for layer in model.module.children() if isinstance(layer, nn.Linear)]
    groups = [{"params": list(layer.parameters()), "lr": 0.01 / (i + 1)} for i, layer in enumerate(layers)]
    made: torch.optim.Optimizer
    match name:
        case "sgd":
            made = torch.optim.SGD(groups, momentum=0.9, nesterov=True, weight_decay=1e-3)
        case "adam":
            made = torch.optim.Adam(groups, amsgrad=True, foreach=True)
        case "fused":
            made = torch.optim.AdamW(groups, fused=True)
        case "tensor_lr":
            made = torch.optim.AdamW([{**g, "lr": torch.tensor(g["lr"])} for g in groups], foreach=False)
        case _:
            made = torch.optim.RMSprop(groups, momentum=0.5, centered=True)
    return Training(model, made)


@kind
def buckets() -> Training:
    """DDP with several buckets, rebuilt after the first iteration."""
    model = DDP(net(norm=True), bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    return Training(model, adamw(model))


@kind
def two_ddp() -> Training:
    """Two DDP modules, each with several buckets."""
    one, two = DDP(net(), bucket_cap_mb=0.004), DDP(net(norm=True), bucket_cap_mb=0.004)
    optimizer = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=1e-2)
    return Training(one, optimizer, lambda x: (one(x) - two(x)).square().mean(), more={"second": two})


@kind
def reduced() -> Training:
    """The script reduces something of its own after the optimizer's step."""
    model = DDP(net(norm=True))
    optimizer = adamw(model)

    def apply() -> None:
        optimizer.step()
        dist.all_reduce(torch.ones(1))

    return Training(model, optimizer, apply=apply)


class Branches(nn.Module):
    """Uses one of two branches, by its input; the other's parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(data.FEATURES, 24)
        self.branches = nn.ModuleList(nn.Linear(24, 8) for _ in range(2))

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.branches[int(batch[0, 0] > 0)](self.stem(batch).tanh())
        return output


@kind
def unused() -> Training:
    """find_unused_parameters: which ones are unused differs from rank to rank and step to step."""
    torch.manual_seed(7)
    model = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=0.001)
    return Training(model, adamw(model))


@kind
def static() -> Training:
    """static_graph."""
    model = DDP(net(), static_graph=True, bucket_cap_mb=0.004)
    return Training(model, adamw(model))


@kind
def late_group(*steps: str) -> Training:
    """A group of ranks 0 and 2 is made before each of these steps, and used from then on."""
    model = DDP(net())
    due = [int(step) for step in steps]
    groups: list[Any] = []

    def before_step(session: Session) -> Tensor | None:
        while due and session.step >= due[0]:
            due.pop(0)
            groups.append(dist.new_group([0, 2]))
        extra = torch.full((1,), 0.001 * session.step * (1 + session.rank))
        for group in groups:
            if session.rank in (0, 2):
                dist.all_reduce(extra, group=group)
        return extra.sum()

    return Training(model, adamw(model), before_step=before_step)


@kind
def functional() -> Training:
    """DTensor and functional collectives, which find their group by name, from C++."""
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = DDP(net())

    def forward(batch: Tensor) -> Tensor:
        output = model(batch)
        whole = DTensor.from_local(output.detach(), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        peers = funcol.all_reduce(output.detach().sum(), "sum", mesh)
        loss: Tensor = output.square().mean() + 0.01 * whole.to_local().mean() + 0.001 * peers
        return loss

    return Training(model, adamw(model), forward)


class Counting(torch.optim.SGD):
    """An optimizer with a counter of its own, which decides the learning rate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1e-2, momentum=0.9)
        self._pace = 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._pace *= 0.98
        for group in self.param_groups:
            group["lr"] = 1e-2 * self._pace
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pace": self._pace}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pace = state_dict["pace"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "pace"})


@kind
def attributes() -> Training:
    """What modules and optimizers keep beside tensors decides what they compute, and changes."""
    model = DDP(net(norm=True))
    norm, drop = model.module[1], model.module[3]
    drop.rate = np.float64(1.0)
    model.temperature = 1.0

    def before_step(session: Session) -> Tensor:
        if session.step == 5:
            norm.eval()
        drop.p *= 0.97
        drop.rate = max(0.3, drop.rate * np.exp(-0.03))
        model.temperature *= 1.01
        drop.calls = getattr(drop, "calls", 0) + 1
        return torch.tensor(0.01 * drop.calls * drop.rate * model.temperature)

    return Training(model, Counting(model), before_step=before_step)


class Phase(IntEnum):
    WARM = 1
    MAIN = 2


class Ema(NamedTuple):
    value: float
    count: int


@kind
def held() -> Training:
    """Parts of a registered dict that the script also holds by names of its own; values of its own types."""
    model = DDP(net())
    running = torch.zeros(data.FEATURES)
    seen: list[float] = []
    counts: defaultdict[str, list[int]] = defaultdict(list)
    own: dict[str, Any] = {"running": running, "seen": seen, "counts": counts}
    own |= {"phase": Phase.WARM, "ema": Ema(0.0, 0)}

    def forward(batch: Tensor) -> Tensor:
        running.mul_(0.9).add_(batch.mean(0), alpha=0.1)
        seen.append(float(running.mean()))
        counts[f"of {len(seen) // 4}"].append(len(seen))
        own["ema"] = Ema(0.5 * own["ema"].value + seen[-1], own["ema"].count + 1)
        own["phase"] = Phase.MAIN if len(seen) > 4 else Phase.WARM
        factor = 0.5 if own["phase"] is Phase.MAIN else 1.0
        loss: Tensor = model(batch - running).square().mean()
        return loss * factor + own["ema"].value + 0.01 * len(counts)

    return Training(model, adamw(model), forward=forward, more={"own": own})


@kind
def side_thread() -> Training:
    """A collective per run in a thread beside; rank 2 takes part only once it has begun step 18."""
    model = DDP(net())
    side = dist.new_group()

    def reduce(session: Session) -> None:
        while session.rank == 2 and session.step < 18:
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1), group=side)

    def before_step(session: Session) -> None:
        if session.is_owner and session.step == 5:
            threading.Thread(target=reduce, args=(session,)).start()

    return Training(model, adamw(model), before_step=before_step)


class Stubborn:
    """Cannot be restored."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError("not in this room")


@kind
def stubborn() -> Training:
    """The script's own code fails in the restore."""
    model = DDP(net())
    return Training(model, adamw(model), more={"own": Stubborn()})


@kind
def takeover() -> Training:
    """Of two take-over callbacks the first fails; the second writes down whose the rank is."""
    model = DDP(net())
    told: list[bool] = []

    def fails() -> None:
        raise FileNotFoundError("no folder for logs on this node")

    def before_step(session: Session) -> None:
        if told:
            return
        told.append(True)
        session.on_takeover(fails)
        path = record.FOLDER / f"owner-{session.rank}"
        session.on_takeover(lambda: path.write_text(f"{os.getpid()} {session.is_owner} {session.epoch}"))

    return Training(model, adamw(model), before_step=before_step)


@kind
def blocked() -> Training:
    """All that a pre-flight must find."""
    model = DDP(net())
    model.module.anchor = torch.ones(3)
    dist.new_group(backend="gloo")
    return Training(model, adamw(model), keep_gradients=True, more={"own": {"seen": {1, 2}}})


def main() -> None:
    dist.init_process_group("grid", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    arguments = [word for word in record.MORE if not faults.is_option(word)]
    training = KINDS[arguments[0]](*arguments[1:])
    loader: Any = data.loader(rank, record.MORE)
    forward = training.forward or (lambda batch: training.model(batch).square().mean())
    apply = training.apply or training.optimizer.step
    registered = None if "loose" in record.MORE else loader
    session = Session(model=training.model, optimizer=training.optimizer, loader=registered, **training.more)
    record.seed(100 + rank)
    faults.install(session, training.model, training.optimizer)
    micro = -1
    while session.step < record.STEPS:
        for batch in session.batches(loader):
            with faults.attempt(session):
                micro = session.micro if session.attempts.used else (micro + 1) % training.micro_batches
                if micro == 0:
                    record.before_step(session)
                    extra = training.before_step(session)
                noise = 1 + 0.01 * random.random() + 0.01 * float(np.random.rand())
                loss = forward(batch) * noise
                if extra is not None:
                    loss = loss + extra
                loss.backward()
                if micro + 1 < training.micro_batches:
                    continue
                apply()
                if not training.keep_gradients:
                    training.optimizer.zero_grad()
                record.wrote(session, loss)
                session.end_step(loss=loss)
            if session.step >= record.STEPS:
                break
    record.done(session)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
