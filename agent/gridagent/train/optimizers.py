"""What optimizers of another kind keep beside the groups and the state of each parameter."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gridagent.train.packing import pack

_USUAL = ("state", "param_groups")


def kept_elsewhere(optimizer: Optimizer) -> str:
    """Why an optimizer's state cannot be read where it ought to be; "" if it can.

    Raises whatever the optimizer's own `state_dict` raises.
    """
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    own = not _is_torchs(optimizer) and not optimizer.state
    if "ZeroRedundancyOptimizer" not in kinds and not (own and optimizer.state_dict().get("state")):
        return ""
    return (
        f"{type(optimizer).__name__} keeps its parameters' state where it is not found (optimizer.state is"
        " empty), so that it cannot move: register the optimizer inside; for sharded state use FSDP2"
    )


def further(optimizer: Optimizer) -> dict[str, Any]:
    """What its own `state_dict` tells beside state and groups."""
    if _is_torchs(optimizer):
        return {}
    return {key: value for key, value in optimizer.state_dict().items() if key not in _USUAL}


def set_further(optimizer: Optimizer, wanted: dict[str, Any]) -> None:
    """Gives an optimizer what `further` told of another one. State and groups stay the objects they are."""
    tensors: list[Tensor] = []
    if pack(wanted, tensors) == pack(further(optimizer), []) and not tensors:
        return
    held = {key: vars(optimizer)[key] for key in _USUAL if key in vars(optimizer)}
    optimizer.load_state_dict({**optimizer.state_dict(), **wanted})
    vars(optimizer).update(held)


def _is_torchs(optimizer: Optimizer) -> bool:
    """Does its `state_dict` tell no more than state and groups?"""
    told = getattr(optimizer.state_dict, "__func__", None) is Optimizer.state_dict
    return told and not optimizer._optimizer_state_dict_post_hooks
