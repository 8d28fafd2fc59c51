"""A rank's state: what it consists of, where each part lives, and its digest.

`RankState` knows the registered objects. `inventory()` lists every part with the live tensor (or the
packed bytes) behind it, without copying; a source streams from it, a target lands into it.

Categories: parameters, optimizer, buffers, rng, other (scheduler, scaler, loader, what the user adds).
A digest is SHA-256 over "name dtype shape sha256(bytes)" of a category's entries, in order of name.
"""

import gc
import hashlib
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gridagent.train.attributes import Attributes, derived, has_extra_state, unwrap
from gridagent.train.optimizers import further, kept_elsewhere, set_further
from gridagent.train.packing import PackError, memory_of, pack, put_back, unpack
from gridagent.train.rng import Rng, scramble

CATEGORIES = ("parameters", "optimizer", "buffers", "rng", "other")


class StateError(Exception):
    """The state cannot be captured or restored; the message says which part and why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One part of the state. `data` is a live local tensor, or packed bytes."""

    name: str
    category: str
    data: Tensor | bytes

    @property
    def dtype(self) -> str:
        return "packed" if isinstance(self.data, bytes) else str(self.data.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.data),) if isinstance(self.data, bytes) else tuple(self.data.shape)

    @property
    def nbytes(self) -> int:
        return (
            len(self.data) if isinstance(self.data, bytes) else self.data.numel() * self.data.element_size()
        )


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is. Detached, sharing memory.

    Raises `StateError` for a sparse one.
    """
    inner = getattr(tensor, "_local_tensor", tensor)
    result: Tensor = inner.detach()
    if result.layout != torch.strided:
        raise StateError(f"a tensor of the kind {result.layout} is part of it, which cannot be moved")
    return result


def flat_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as one-dimensional uint8, sharing memory."""
    return tensor.reshape(-1).view(torch.uint8)


class RankState:
    """The registered objects of one rank. `objects`: by name, None for one that there is not.

    Raises `StateError` as `register` does.
    """

    def __init__(self, objects: Mapping[str, Any] | None = None) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.attributes: dict[str, Attributes] = {}  #: of modules and optimizers
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.trees: dict[str, Any] = {}  #: objects with state_dict/load_state_dict, or dicts
        self.loaders: dict[str, Any] = {}  #: same, but reading their state may have side effects
        self.generators: dict[str, torch.Generator] = {}
        given = {name: value for name, value in (objects or {}).items() if value is not None}
        #: ids of all that moves by itself wherever else it hangs
        self._known = {its for value in given.values() for its in _ids(value)}
        for name, value in given.items():
            self.register(name, value)

    def register(self, name: str, value: Any) -> None:
        """Adds one object under a name that must be the same on every rank. Raises `StateError`."""
        if name in {*self.modules, *self.optimizers, *self.trees, *self.loaders, *self.generators}:
            raise StateError(f"two objects are registered as {name!r}")
        self._known.update(_ids(value))
        if isinstance(value, nn.Module):
            self.modules[name] = value
            self.attributes[name] = Attributes(value, self._known)
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers[name] = value
            self.attributes[name] = Attributes(value, self._known)
        elif isinstance(value, torch.Generator):
            self.generators[name] = value
        elif isinstance(value, dict) or (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            (
                self.loaders
                if name == "loader" or (hasattr(value, "__iter__") and not isinstance(value, dict))
                else self.trees
            )[name] = value
        else:
            raise StateError(
                f"{name}: a {type(value).__name__} cannot be registered. Give a module, an optimizer, a "
                "torch.Generator, a dict, or an object with state_dict() and load_state_dict()"
            )

    # ---------------------------------------------------------------------------------------- reading

    @cached_property
    def replicas(self) -> list[nn.parallel.DistributedDataParallel]:
        """Every DistributedDataParallel of registered parameters, in a fixed order.

        Whoever holds one may have given us the module inside; so all objects are looked through, once.
        """
        parameters = (p for module in self.modules.values() for p in module.parameters())
        order = {id(parameter): place for place, parameter in enumerate(parameters)}
        kind = nn.parallel.DistributedDataParallel
        found = {
            min(order[id(parameter)] for parameter in its.parameters()): its
            for its in gc.get_objects()
            if issubclass(type(its), kind) and all(id(parameter) in order for parameter in its.parameters())
        }
        return [its for _, its in sorted(found.items())]

    def values(self) -> dict[str, str]:
        """Short digests of the numbers that the script has set on its modules before they were registered.

        Two processes of a rank that have others would compute something else: such a number came from a
        collective, say, which a spare's stand-in answers in its own way.
        """
        return {
            f"value {name}{where}": hashlib.sha256(repr(value).encode()).hexdigest()[:8]
            for name, its in self.attributes.items()
            for where, value in its.first()
        }

    def inventory(self, *, loaders: bool = True) -> list[Entry]:
        """Every part of the state, in a fixed order. Raises `StateError` for a value that cannot move."""
        entries: list[Entry] = []
        for name, module in self.modules.items():
            entries += _module_entries(name, unwrap(module))
        for name, attributes in self.attributes.items():
            entries += attribute_entries(name, attributes.now())
        for name, optimizer in self.optimizers.items():
            entries += _optimizer_entries(name, optimizer)
        for name, tree in self.trees.items():
            entries += tree_entries(name, "other", tree if isinstance(tree, dict) else tree.state_dict())
        if loaders:
            for name, loader in self.loaders.items():
                entries += tree_entries(name, "other", loader.state_dict())
        entries += self.rng_entries()  # last: reading a loader's state may draw random numbers
        return entries

    def rng_entries(self) -> list[Entry]:
        """Every random state of the process that is part of the rank."""
        return rng_entries_of(Rng.read(self.generators))

    def blockers(self) -> list[tuple[str, str, bool]]:
        """(code, text, fatal) for what forbids a swap, or bit identity; `inventory` raises the rest."""
        found: list[tuple[str, str, bool]] = []
        loose = set()
        for name, module in self.modules.items():
            for path in _loose_tensors(name, unwrap(module)):
                loose.add(path)
                text = f"{path} is a tensor that is neither parameter nor buffer: register_buffer() it"
                found.append(("unregistered-tensor", text, True))
            for parameter_name, parameter in unwrap(module).named_parameters():
                if parameter.grad is not None and bool(local(parameter.grad).any()):
                    where = f"{name}/{parameter_name} has a gradient at the boundary"
                    text = f"{where}: call optimizer.zero_grad() before session.end_step()"
                    found.append(("gradient-at-boundary", text, True))
                    break
        found += self._unregistered()
        for name, its in self.attributes.items():
            told = {f"{name}/{where}": why for where, why in its.strayed().items()}
            found += [("changed-attribute", f"{p} {why}", False) for p, why in told.items() if p not in loose]
        found += self._communication()
        for name, loader in self.loaders.items():
            if getattr(loader, "num_workers", 0):
                text = f"{name} has workers with random state: seed each sample, or use num_workers=0"
                found.append(("loader-workers", text, False))
        return found

    def _communication(self) -> list[tuple[str, str, bool]]:
        """What DDP's communication hooks keep for themselves."""
        found = []
        for hook, state in (pair for module in self.replicas for pair in module._comm_hooks):
            if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
                kind = getattr(hook, "__name__", type(hook).__name__)
                text = f"DDP's communication hook {kind} keeps a {type(state).__name__}"
                found.append(("comm-hook", f"{text}, which does not move with the rank", False))
        return found

    def _unregistered(self) -> list[tuple[str, str, bool]]:
        """What must be somewhere and was not given: nobody would move it, and nothing else would say so."""
        known = {id(parameter) for m in self.modules.values() for parameter in m.parameters()}
        found = []
        for name, optimizer in self.optimizers.items():
            strange = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
            if strange:
                text = (
                    f"{strange} parameters of {name} belong to no registered module: give Session the model"
                )
                found.append(("unregistered-model", text, True))
        trained = any(p.requires_grad for m in self.modules.values() for p in m.parameters())
        if trained and not self.optimizers:
            text = "no optimizer is registered: give Session the optimizer, too"
            found.append(("unregistered-optimizer", text, True))
        return found

    # ---------------------------------------------------------------------------------------- writing

    def poison(self) -> None:
        """Spoils all that a restore must overwrite, so that whatever the capture missed shows."""
        for entry in self.inventory(loaders=False):
            if isinstance(entry.data, Tensor) and entry.category in ("parameters", "optimizer", "buffers"):
                if entry.data.is_floating_point():
                    entry.data.fill_(float("nan"))
                elif entry.data.dtype != torch.bool:
                    entry.data.fill_(77)
        scramble(self.generators)

    def apply(self, received: dict[str, Entry]) -> None:
        """Puts received parts that did not land in place where they belong; RNG states go in last.

        `received` maps names to entries with landed tensors or bytes. Raises `StateError`.
        """
        try:
            for name, module in self.modules.items():
                _apply_extra_state(name, unwrap(module), received)
            for name, optimizer in self.optimizers.items():
                set_further(optimizer, received_tree(f"{name}#further", received))
                _apply_optimizer(name, optimizer, received)
            for name, attributes in self.attributes.items():
                attributes.put(received_tree(f"{name}#attributes", received))
            for name, tree in {**self.trees, **self.loaders}.items():
                if isinstance(tree, dict):
                    put_back(*_packed(name, received), tree, name, fill=True, landed=_landed(received))
                else:
                    tree.load_state_dict(received_tree(name, received))
        except Exception as error:  # the script's own load_state_dict may raise anything
            raise StateError(f"the received state does not fit: {type(error).__name__}: {error}") from error

    def apply_rng(self, received: dict[str, Entry]) -> None:
        """Sets every random state; the very last act of a restore. Raises `StateError`."""
        try:
            torch.set_rng_state(_tensor(received["rng/torch"]))
            if torch.cuda.is_available():
                for i in range(torch.cuda.device_count()):
                    torch.cuda.set_rng_state(_tensor(received[f"rng/cuda:{i}"]), i)
            random.setstate(received_tree("rng/python", received))
            if (numpy := sys.modules.get("numpy")) is not None and "rng/numpy" in received:
                numpy.random.set_state(received_tree("rng/numpy", received))
            for name, generator in self.generators.items():
                generator.set_state(_tensor(received[f"rng/{name}"]))
        except (PackError, KeyError, RuntimeError, ValueError, TypeError) as error:
            raise StateError(f"a random state does not fit: {type(error).__name__}: {error}") from error


def _ids(value: Any) -> Iterable[int]:
    """Of a registered object and of its parts."""
    yield id(value)
    if isinstance(value, nn.Module):
        yield from map(id, value.modules())
        yield from map(id, value.parameters())
        yield from map(id, value.buffers())
    elif isinstance(value, torch.optim.Optimizer):
        yield from (id(value.state), id(value.param_groups), *map(id, value.param_groups))


def _tensor(entry: Entry) -> Tensor:
    if isinstance(entry.data, bytes):
        raise StateError(f"{entry.name} should be a tensor")
    return entry.data


# ------------------------------------------------------------------------------------ modules and trees


def _module_entries(name: str, module: nn.Module) -> list[Entry]:
    entries = [Entry(f"{name}/{key}", "parameters", local(value)) for key, value in module.named_parameters()]
    entries += [Entry(f"{name}/{key}", "buffers", local(value)) for key, value in module.named_buffers()]
    for path, child in with_extra_state(module):
        entries += tree_entries(f"{name}/{path}#extra", "buffers", child.get_extra_state())
    return entries


def attribute_entries(name: str, changed: dict[str, Any]) -> list[Entry]:
    """The plain values of a registered module in the form in which a rank's state moves."""
    return tree_entries(f"{name}#attributes", "other", changed)


def with_extra_state(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """(path, module) of every module inside that has state of its own kind."""
    for path, child in module.named_modules():
        if has_extra_state(child):
            yield path, child


def _apply_extra_state(name: str, module: nn.Module, received: dict[str, Entry]) -> None:
    for path, child in with_extra_state(module):
        child.set_extra_state(received_tree(f"{name}/{path}#extra", received))


def _loose_tensors(name: str, module: nn.Module) -> list[str]:
    """Tensors that hang on a module outside its parameters and buffers; nobody would move them."""
    found = []
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            if not key.startswith("_") and isinstance(value, Tensor) and not derived(child, key):
                found.append(f"{name}/{path}.{key}" if path else f"{name}/{key}")
    return found


def rng_entries_of(rng: Rng) -> list[Entry]:
    """Random states in the form in which a rank's state moves."""
    tensors = {name: Entry(name, "rng", value) for name, value in rng.tensors.items()}
    devices = [name for name in tensors if name == "rng/torch" or name.startswith("rng/cuda:")]
    entries = [*(tensors.pop(name) for name in devices), *tree_entries("rng/python", "rng", rng.python)]
    if rng.numpy is not None:
        entries += tree_entries("rng/numpy", "rng", rng.numpy)
    return [*entries, *tensors.values()]


def tree_entries(name: str, category: str, tree: Any) -> list[Entry]:
    """A tree as one packed entry and one entry for each tensor in it. Raises `StateError`."""
    tensors: list[Tensor] = []
    try:
        packed = pack(tree, tensors, name)
    except PackError as error:
        raise StateError(str(error)) from None
    entries = [Entry(name, category, packed)]
    entries += [Entry(f"{name}#{i}", category, local(tensor)) for i, tensor in enumerate(tensors)]
    return entries


def _landed(received: dict[str, Entry]) -> frozenset[int]:
    """Where the memory of parameters and the like begins: a dict may name a part of it, now or then."""
    tensors = [entry.data for entry in received.values() if entry.category not in ("rng", "other")]
    return frozenset(data.untyped_storage().data_ptr() for data in tensors if isinstance(data, Tensor))


def _packed(name: str, received: dict[str, Entry]) -> tuple[bytes, list[Tensor]]:
    """A received tree as `pack` made it."""
    data = received[name].data
    if isinstance(data, Tensor):
        raise StateError(f"{name} should be packed")
    tensors: list[Tensor] = []
    while (entry := received.get(f"{name}#{len(tensors)}")) is not None:
        tensors.append(_tensor(entry))
    return data, tensors


def received_tree(name: str, received: dict[str, Entry]) -> Any:
    """What `tree_entries` made parts of. Raises `StateError`, `PackError`."""
    return unpack(*_packed(name, received))


# -------------------------------------------------------------------------------------------- optimizers


def _indexed(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters in the order of the optimizer's own state_dict numbering."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "_local_tensor")


def _optimizer_entries(name: str, optimizer: torch.optim.Optimizer) -> list[Entry]:
    """Tensors of the per-parameter state one by one; everything else in one packed entry.

    The packed tree says for every state value whether it is a tensor, so that a tensor which did not
    arrive is missed. Raises `StateError` if the state is kept elsewhere.
    """
    if why := kept_elsewhere(optimizer):
        raise StateError(f"{name}: {why}")
    entries: list[Entry] = []
    states: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(_indexed(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                entries.append(Entry(f"{name}/{index}/{key}", "optimizer", local(value)))
                value = ("sharded" if _is_sharded(value) else "tensor",)
            states.setdefault(index, {})[key] = value
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for key, value in plain.items():
            if isinstance(value, Tensor):
                entries.append(Entry(f"{name}/group{number}/{key}", "optimizer", local(value)))
                plain[key] = ("tensor",)
        groups.append(plain)
    shared = {key: value for key, value in optimizer.state.items() if isinstance(key, str)}
    scalars = {"state": states, "groups": groups, "shared": shared}
    entries += tree_entries(f"{name}#scalars", "optimizer", scalars)
    return entries + tree_entries(f"{name}#further", "optimizer", further(optimizer))


def _apply_optimizer(name: str, optimizer: torch.optim.Optimizer, received: dict[str, Entry]) -> None:
    scalars = received_tree(f"{name}#scalars", received)
    for key in [key for key in optimizer.state if isinstance(key, str)]:
        del optimizer.state[key]
    optimizer.state.update(scalars["shared"])
    for index, parameter in enumerate(_indexed(optimizer)):
        wanted = scalars["state"].get(index, {})
        state = optimizer.state[parameter] if wanted or parameter in optimizer.state else {}
        for key in [key for key in state if key not in wanted]:
            del state[key]
        for key, value in wanted.items():
            if _is_reference(value):
                landed = _tensor(received[f"{name}/{index}/{key}"])
                if key not in state or local(state[key]).data_ptr() != landed.data_ptr():
                    state[key] = _like_parameter(landed, parameter) if value == ("sharded",) else landed
            else:
                state[key] = value
    for number, group in enumerate(optimizer.param_groups):
        for key, value in scalars["groups"][number].items():
            if _is_reference(value):
                landed = _tensor(received[f"{name}/group{number}/{key}"])
                if not isinstance(group.get(key), Tensor) or group[key].data_ptr() != landed.data_ptr():
                    group[key] = landed
            else:
                group[key] = value


def _is_reference(value: Any) -> bool:
    return isinstance(value, tuple) and value in (("tensor",), ("sharded",))


def _like_parameter(shard: Tensor, parameter: Tensor) -> Tensor:
    """A DTensor laid out as `parameter` (itself a DTensor), with `shard` as its local part."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        raise StateError("a sharded optimizer state belongs to a parameter that is not sharded here")
    sharded: Tensor = DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return sharded


# ------------------------------------------------------------------------------------------------ digests


def entry_bytes(entry: Entry) -> memoryview:
    """The bytes of an entry; a copy where the tensor is not contiguous CPU memory."""
    if isinstance(entry.data, bytes):
        return memoryview(entry.data)
    return memory_of(entry.data.cpu().contiguous())


def category_digests(hashed: Iterable[tuple[Entry, str]]) -> dict[str, str]:
    """Category -> SHA-256, from (entry, hex SHA-256 of its bytes)."""
    sums = {category: hashlib.sha256() for category in CATEGORIES}
    for entry, digest in sorted(hashed, key=lambda pair: pair[0].name):
        sums[entry.category].update(f"{entry.name} {entry.dtype} {entry.shape} {digest}\n".encode())
    return {category: total.hexdigest() for category, total in sums.items()}


def digests(entries: list[Entry]) -> dict[str, str]:
    """Category -> SHA-256 of the state as it is now."""
    return category_digests((entry, hashlib.sha256(entry_bytes(entry)).hexdigest()) for entry in entries)


def inventory_digest(entries: list[Entry]) -> str:
    """Digest over names, dtypes and shapes of all state tensors: equal if two ranks hold the same parts."""
    lines = sorted(f"{e.name} {e.dtype} {e.shape}" for e in entries if not isinstance(e.data, bytes))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
