"""Trainings that make it hard to bring a dead rank back. argv: FOLDER STEPS KIND [ARGUMENT ...]."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import data
import faults
import numpy as np
import record
import torch
import torch.distributed as dist
import zoo
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from zoo import Training, adamw, net

from gridagent.train import Session


@dataclass
class Hostile:
    """A training, and what is unusual about its loop."""

    training: Training
    batches: Callable[[Session, Any], Iterator[Any]] = lambda session, loader: session.batches(loader)
    wrap: Callable[[Any], Any] = lambda loader: loader
    after_epoch: Callable[[], None] = lambda: None
    behind: Callable[[], None] = lambda: None  #: after each attempt, before the next batch
    micro_batches: int = 1


KINDS: dict[str, Callable[..., Hostile]] = {}


def kind(function: Callable[..., Hostile]) -> Callable[..., Hostile]:
    KINDS[function.__name__] = function
    return function


def after_step(model: Any, change: Callable[[int], None], extra: Any = None, **more: Any) -> Hostile:
    """`change(step)` comes after the optimizer's step; `extra()` is added to the loss."""
    optimizer, steps = adamw(model), [0]

    def before_step(session: Session) -> Tensor | None:
        steps[0] = session.step
        return None if extra is None else torch.tensor(0.01 * extra())

    def apply() -> None:
        optimizer.step()
        change(steps[0])

    return Hostile(Training(model, optimizer, apply=apply, before_step=before_step, more=more))


@kind
def bank() -> Hostile:
    """A registered dict with a large tensor of each rank's own, never changed."""
    model = DDP(net())
    own = torch.Generator().manual_seed(900 + dist.get_rank())
    bank = {"x": torch.randn(40_000, data.FEATURES, generator=own)}

    def before_step(session: Session) -> Tensor:
        return bank["x"][session.step].square().mean() * 0.1

    return Hostile(Training(model, adamw(model), before_step=before_step, more={"bank": bank}))


@kind
def best0() -> Hostile:
    """Only rank 0 keeps a record, after the optimizer's step."""
    totals = {"last": -1}

    def change(_step: int) -> None:
        if dist.get_rank() == 0:
            totals["last"] += 1

    return after_step(DDP(net()), change, lambda: totals["last"], totals=totals)


@kind
def ninth() -> Hostile:
    """A value of each rank's own is set after the optimizer's step of every ninth step."""
    totals = {"seen": 0.0}

    def change(step: int) -> None:
        if step % 9 == 8:
            totals["seen"] = 1.0 + dist.get_rank()

    return after_step(DDP(net()), change, lambda: totals["seen"], totals=totals)


@kind
def ema8() -> Hostile:
    """An average of a BatchNorm model, updated once, in step 8: its buffers are the rank's own."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = DDP(net(norm=True))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def change(step: int) -> None:
        if step == 8:
            average.update_parameters(model.module)

    return after_step(model, change, ema=average)


@kind
def rng0() -> Hostile:
    """Only rank 0 draws after the optimizer's step, every ninth step, as if it sampled a text."""

    def change(step: int) -> None:
        if step % 9 == 8 and dist.get_rank() == 0:
            torch.rand(5)

    return after_step(DDP(net()), change)


class Codebook(nn.Module):
    """A buffer is written to through `.data` in forward, as quantisers with moving averages do."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("embed", torch.zeros(rows, data.FEATURES))

    def forward(self, batch: Tensor) -> Tensor:
        embed: Any = self.embed
        embed.data.mul_(0.9).add_(0.1 * batch.detach().mean())
        output: Tensor = self.net(batch) + embed.mean()
        return output


@kind
def codebook() -> Hostile:
    torch.manual_seed(7)
    model = DDP(Codebook(700), broadcast_buffers=False)
    return Hostile(Training(model, adamw(model)))


@kind
def bigbn() -> Hostile:
    """BatchNorm with buffers of more than 64 KiB."""
    torch.manual_seed(7)
    layers = [nn.Linear(data.FEATURES, 17_000), nn.BatchNorm1d(17_000), nn.GELU(), nn.Linear(17_000, 4)]
    model = DDP(nn.Sequential(*layers), broadcast_buffers=False)
    return Hostile(Training(model, adamw(model)))


@dataclass
class Batch:
    x: Tensor


class Wrapped:
    """Gives the batches of another loader in another form."""

    def __init__(self, inner: Any, form: Callable[[Tensor], Any]) -> None:
        self.inner, self.form = inner, form

    def __iter__(self) -> Iterator[Any]:
        return map(self.form, self.inner)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


@kind
def inplace(how: str) -> Hostile:
    """The script changes its batch before the forward pass."""
    model = DDP(net())
    forms: dict[str, Callable[[Tensor], Any]] = {"obj": Batch, "numpy": lambda x: {"x": x.numpy()}}

    def forward(batch: Any) -> Tensor:
        if how == "obj":
            batch.x = batch.x * 1.5
            x = batch.x
        else:
            batch["x"] *= 1.5
            x = torch.from_numpy(batch["x"])
        loss: Tensor = model(x).square().mean()
        return loss

    training = Training(model, adamw(model), forward)
    return Hostile(training, wrap=lambda loader: Wrapped(loader, forms[how]))


@kind
def loop(how: str) -> Hostile:
    """Batches that do not come through the session."""

    def drawn() -> Iterator[Tensor]:
        while True:
            yield torch.randn(16, data.FEATURES)

    model = DDP(net())
    taken = {"plain": lambda _session, loader: iter(loader), "draw": lambda _session, _loader: drawn()}
    return Hostile(Training(model, adamw(model)), batches=taken[how])


@kind
def epoch() -> Hostile:
    """A collective after each epoch of the data, as an evaluation has it."""
    model = DDP(net(norm=True))

    def after_epoch() -> None:
        dist.all_reduce(model.module(torch.ones(4, data.FEATURES)).sum().detach().reshape(1))

    return Hostile(Training(model, adamw(model)), after_epoch=after_epoch)


def _schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


@kind
def behind(what: str) -> Hostile:
    """The script goes on changing its state after the attempt: after a void one that comes a second time."""
    model = DDP(net())
    optimizer = adamw(model)
    schedule = _schedule(optimizer)

    def lower() -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.99

    def damp() -> None:
        for its in optimizer.state.values():
            its["exp_avg"].mul_(0.99)

    def decay() -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.999)

    done = {"schedule": schedule.step, "rate": lower, "moments": damp, "data": decay}
    return Hostile(Training(model, optimizer, more={"schedule": schedule}), behind=done[what])


@kind
def moments() -> Hostile:
    """Every third step halves the optimizer's moments before its own step."""
    model = DDP(net())
    optimizer = adamw(model)
    step = [0]

    def before_step(session: Session) -> None:
        step[0] = session.step

    def apply() -> None:
        optimizer.step()

    def forward(batch: Tensor) -> Tensor:
        if step[0] % 3 == 0:
            for its in optimizer.state.values():
                its["exp_avg"].mul_(0.5)
        loss: Tensor = model(batch).square().mean()
        return loss

    return Hostile(Training(model, optimizer, forward, apply=apply, before_step=before_step))


@kind
def flags() -> Hostile:
    """See `zoo.attributes`."""
    return Hostile(zoo.attributes())


@kind
def two_loaders() -> Hostile:
    """Batches of a second loader, registered as well, do not come through the session."""
    model = DDP(net())
    second = data.Loader(100 + dist.get_rank())
    batches: list[Iterator[Tensor]] = []

    def before_step(_session: Session) -> Tensor:
        for _ in range(2):
            batches[:] = batches or [iter(second)]
            if (batch := next(batches[0], None)) is not None:
                break
            batches.clear()
        loss: Tensor = batch.square().mean() * 0.1
        return loss

    return Hostile(Training(model, adamw(model), before_step=before_step, more={"second": second}))


@kind
def stage() -> Hostile:
    """Two micro-batches a step, which the loader gives in one and the same memory."""
    model = DDP(net())
    memory = np.empty((16, data.FEATURES), dtype=np.float32)

    def form(batch: Tensor) -> Tensor:
        memory[: len(batch)] = batch.numpy()
        return torch.from_numpy(memory[: len(batch)])

    training = Training(model, adamw(model))
    return Hostile(training, wrap=lambda loader: Wrapped(loader, form), micro_batches=2)


@kind
def head() -> Hostile:
    """A part that each rank trains for itself."""
    model = DDP(net())
    torch.manual_seed(70 + dist.get_rank())
    own = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *own.parameters()], lr=1e-2)

    def forward(batch: Tensor) -> Tensor:
        loss: Tensor = own(model(batch)).square().mean()
        return loss

    return Hostile(Training(model, optimizer, forward, more={"head": own}))


def main() -> None:
    dist.init_process_group("grid", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    arguments = [word for word in record.MORE if not faults.is_option(word)]
    hostile = KINDS[arguments[0]](*arguments[1:])
    training = hostile.training
    loader = hostile.wrap(data.Loader(rank))
    forward = training.forward or (lambda batch: training.model(batch).square().mean())
    apply = training.apply or training.optimizer.step
    session = Session(model=training.model, optimizer=training.optimizer, loader=loader, **training.more)
    record.seed(100 + rank)
    faults.install(session, training.model, training.optimizer)
    while session.step < record.STEPS:
        for batch in hostile.batches(session, loader):
            with faults.attempt(session):
                record.before_step(session)
                extra = training.before_step(session)
                loss = forward(batch) * (1 + 0.01 * random.random() + 0.01 * float(np.random.rand()))
                if extra is not None:
                    loss = loss + extra
                loss.backward()
                if session.micro == hostile.micro_batches - 1:
                    apply()
                    training.optimizer.zero_grad()
                    record.wrote(session, loss)
                    session.end_step(loss=loss)
            hostile.behind()
            if session.step >= record.STEPS:
                break
        hostile.after_epoch()
    record.done(session)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
