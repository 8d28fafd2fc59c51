"""Whether the steps of a session can be attempts: on this rank, and on all."""

import logging
import time
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from gridagent.train.context import CONTEXT
from gridagent.train.errors import SessionError
from gridagent.train.state import RankState, StateError
from gridagent.train.window import Buffers

if TYPE_CHECKING:
    from gridagent.train.session import Session

_log = logging.getLogger("gridagent.train")
#: So long the ranks may come one after the other to the first attempt before that is told.
_MEET_S = 20.0
#: Buffers are compared in every step; more than this in large ones would be felt.
_LARGE_BUFFERS_BYTES_MAX = 16 << 20


def all_fit(session: "Session", fit: bool) -> bool:
    """Are all ranks fit? One that votes alone would wait for ever.

    Asked over the store and not by a collective: a rank whose script does not call `attempt` would meet that
    with a collective of its own. Raises `SessionError` if a rank does not come within the group's time-out.
    """
    store, world = c10d._get_default_store(), cast(Any, dist.group.WORLD)
    keys = {rank: f"gridagent/attempt/{rank}" for rank in range(session.world_size)}
    store.set(keys[session.rank], str(int(fit)))
    begun_s, told = time.monotonic(), False
    while missing := [rank for rank, key in keys.items() if not store.check([key])]:
        waited_s = time.monotonic() - begun_s
        late = f"after {waited_s:.0f} s rank {', '.join(map(str, missing))} did not come to session.attempt()"
        if waited_s > world.timeout.total_seconds():
            raise SessionError(f"{late}: it must enclose the step on every rank")
        if waited_s > _MEET_S and not told:
            told = True
            _log.warning("%s: is it slow, or does the script not call it on every rank?", late)
        time.sleep(0.005)
    return all(store.get(key) == b"1" for key in keys.values())


def unfit(session: "Session") -> str:
    """Why a step of this session cannot be repeated; "" if it can."""
    if CONTEXT.link is None:
        return "there is no agent here"
    if session.world_size < 2:
        return "there is only one rank"
    if not session.feeds.used:
        return "no batch comes through session.batches(): a repeated step would get another one"
    if sharded := _sharded(session.state):
        return f"{sharded} is sharded: only replicas can stand in for each other"
    ddp = [m for m in session.state.modules.values() if isinstance(m, nn.parallel.DistributedDataParallel)]
    if not ddp:
        return "no DistributedDataParallel is registered"
    if any(module.process_group.size() != session.world_size for module in ddp):
        return "a DistributedDataParallel does not span all ranks"
    if alone := _alone(session.state):
        return (
            f"{alone} is trained outside of DistributedDataParallel: nobody knows whether ranks have it alike"
        )
    if hidden := wrapped(session.state):
        return f"{hidden} is a wrapper around another optimizer: register that one"
    try:
        session.state.inventory(loaders=False)
    except StateError as error:
        return str(error)
    large_bytes = Buffers(session.state).large_bytes
    if large_bytes > _LARGE_BUFFERS_BYTES_MAX:
        return f"{large_bytes >> 20} MiB of large buffers are too much to compare in each step"
    return ""


def wrapped(state: RankState) -> str:
    """An optimizer that was never made as one, and so has no hook before its step."""
    return next(
        (n for n, its in state.optimizers.items() if not hasattr(its, "_optimizer_step_pre_hooks")), ""
    )


def _alone(state: RankState) -> str:
    """A parameter that an optimizer trains and no DistributedDataParallel keeps equal on all ranks."""
    alike = {
        id(parameter)
        for module in state.modules.values()
        if isinstance(module, nn.parallel.DistributedDataParallel)
        for parameter in module.parameters()
    }
    names = {id(p): f"{name}/{key}" for name, m in state.modules.items() for key, p in m.named_parameters()}
    return next(
        (
            names.get(id(parameter), f"a parameter of {name}")
            for name, optimizer in state.optimizers.items()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad and id(parameter) not in alike
        ),
        "",
    )


def _sharded(state: RankState) -> str:
    """A module or an optimizer of which every rank holds another part."""
    for name, module in state.modules.items():
        if any(hasattr(parameter, "_local_tensor") for parameter in module.parameters()) or any(
            type(child).__name__ == "FullyShardedDataParallel" for child in module.modules()
        ):
            return name
    kinds = {name: type(optimizer).__name__ for name, optimizer in state.optimizers.items()}
    return next((name for name, kind in kinds.items() if kind == "ZeroRedundancyOptimizer"), "")
