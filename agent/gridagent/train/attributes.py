"""Plain values that hang on modules and optimizers beside parameters, buffers and groups: `training`, a
dropout's `p`, a counter, and which parameters are trained at all (`requires_grad`).

They decide what a step computes, so they are part of a rank's state as far as training has changed them. A
value that is still what it was when its owner was registered stays where it is: it may belong to the place
(the index of a device, a folder), and a new process makes its own. What is of another kind does not move:
that one has changed is told.
"""

import sys
from collections.abc import Iterator, Set
from functools import cache
from typing import Any

import torch
from torch import nn

from gridagent.train.likeness import Likeness, likeness

#: A flag of each module that scripts switch at will; it belongs to no place and always moves.
_TRAINING = "training"
_GRAD = ".requires_grad"
_PLAIN = (bool, int, float, str, type(None))
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
#: Where the attributes of a DistributedDataParallel itself stand.
_WRAPPER = "(ddp)"
#: What torch keeps itself on every module.
_MODULES_OWN = frozenset(name for name in dir(nn.Module()) if name.startswith("_"))
#: torch.compile leaves its own marks on parameters.
_COMPILERS = "_dynamo"
_NOBODYS = {"torch", *sys.stdlib_module_names}
_CHANGED = (
    "changed since the Session was made, which does not move with the rank: make it before, or keep it in a"
    " registered object"
)
_TOO_LARGE = (
    "is too large to tell whether training changes it, and does not move with the rank: keep it in a"
    " registered object if it does"
)


class _Absent:
    """Where there is no such value."""


_ABSENT = _Absent()


def unwrap(module: nn.Module) -> nn.Module:
    """The user's module inside DistributedDataParallel."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        inner: nn.Module = module.module
        return inner
    return module


class Attributes:
    """The plain values of one registered module and of all modules in it, by "path.name"; or an optimizer's.

    `known`: ids of the objects that are registered and of their parts, which move by themselves.
    """

    def __init__(self, owner: nn.Module | torch.optim.Optimizer, known: Set[int] = frozenset()) -> None:
        self._owner, self._known = owner, known
        self._owners = dict(self._parts())
        self._modules = {path: vars(its) for path, its in self._owners.items()}
        #: These tell of themselves what counts.
        self._tell = {
            p for p, its in self._owners.items() if isinstance(its, nn.Module) and has_extra_state(its)
        }
        self._classes = {path: _classes(its) for path, its in self._owners.items()}
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._shapes: list[tuple[int, str]] = []
        self._look()
        self._first = {where: place[key] for where, (place, key) in self._places.items()}
        named = unwrap(owner).named_parameters() if isinstance(owner, nn.Module) else ()
        self._named = dict(named)
        self._parameters = {f"{name}{_GRAD}": its for name, its in self._named.items()}
        self._trained = [parameter.requires_grad for parameter in self._parameters.values()]
        self._held = {where: self._like(value) for where, value in self._values()}
        self._hooked = dict(self._hooks())

    def _parts(self) -> Iterator[tuple[str, Any]]:
        """Whatever has attributes, by its path."""
        if not isinstance(self._owner, nn.Module):
            yield "", self._owner
            return
        if unwrap(self._owner) is not self._owner:
            yield _WRAPPER, self._owner
        yield from unwrap(self._owner).named_modules()

    def _counts(self, path: str, key: str) -> bool:
        """Is it the script's, and not torch's own business?"""
        if isinstance(self._owner, nn.Module):
            if (path in self._tell and key != _TRAINING) or derived(self._owners[path], key):
                return False
            return not key.startswith("_") or (bool(self._classes[path]) and key not in _MODULES_OWN)
        return key not in _optimizers_own() and (not key.startswith("_") or bool(self._classes[path]))

    def _values(self) -> Iterator[tuple[str, Any]]:
        """Everything that training might change: of modules, of the script's classes, of parameters."""
        for path, place in self._modules.items():
            for key, value in place.items():
                if self._counts(path, key):
                    yield f"{path}.{key}", value
        for kind in {kind: None for kinds in self._classes.values() for kind in kinds}:
            for key, value in vars(kind).items():
                if not key.startswith("__"):
                    yield f"class {kind.__qualname__}.{key}", value
        for name, parameter in self._named.items():
            for key, value in vars(parameter).items():
                if key.startswith(_COMPILERS):
                    continue
                yield f"parameter {name}.{key}", value
        if isinstance(self._owner, torch.optim.Optimizer):
            groups = {id(parameter) for group in self._owner.param_groups for parameter in group["params"]}
            others = [key for key in self._owner.state if not isinstance(key, str) and id(key) not in groups]
            yield "state of what is in no group", len(others)

    def _like(self, value: Any) -> Any:
        return value if type(value) in _PLAIN else likeness(value, self._known)

    def _hooks(self) -> Iterator[tuple[str, list[Any]]]:
        """The hooks of each part. Not those of parameters: in a void step torch has some of its own there."""
        kinds = _MODULE_HOOKS if isinstance(self._owner, nn.Module) else _OPTIMIZER_HOOKS
        for path, place in self._modules.items():
            hooks = [hook for kind in kinds for hook in (place.get(kind) or {}).values()]
            yield f"{path}'s hooks" if path else "hooks", [hook for hook in hooks if not _ours(hook)]
        if isinstance(self._owner, nn.parallel.DistributedDataParallel):
            yield "communication hooks", [hook for hook, _ in self._owner._comm_hooks]

    def strayed(self) -> dict[str, str]:
        """What training has changed and does not move, and what nobody can tell of: place -> what to say."""
        parts = {path: vars(its) for path, its in self._parts()}
        came_or_went = sorted(
            path for path in parts.keys() | self._modules.keys()
            if parts.get(path) is not self._modules.get(path)
        )  # fmt: skip
        moved, now = self.now(), dict(self._values())
        found = dict.fromkeys(came_or_went, _CHANGED)
        for where in {**self._held, **now}:
            if where not in moved:
                first, value = self._held.get(where, _ABSENT), now.get(where, _ABSENT)
                found[where.lstrip(".")] = self._verdict(first, value)
        for where, hooks in self._hooks():
            if not _identical(self._hooked[where], hooks):
                found[where] = _CHANGED
        return {where: why for where, why in found.items() if why}

    def _verdict(self, first: Any, value: Any) -> str:
        now = self._like(value)
        if not isinstance(first, Likeness) or not isinstance(now, Likeness):
            return "" if _same(first, now) else _CHANGED
        return _CHANGED if not first.same(now) else "" if now.whole else _TOO_LARGE

    def _look(self) -> None:
        """Takes up values that have come since."""
        self._shapes = self._shape()
        for path, place in self._modules.items():
            for key, value in place.items():
                if _moves(value) and self._counts(path, key):
                    self._places.setdefault(f"{path}.{key}", (place, key))

    def _shape(self) -> list[tuple[int, str]]:
        """Another one if a value has come since: how many each module has, and the newest."""
        return [(len(place), next(reversed(place), "")) for place in self._modules.values()]

    def read(self) -> list[Any]:
        """All of them, for `put_back` and `changed`."""
        if self._shapes != self._shape():
            self._look()
        trained = [parameter.requires_grad for parameter in self._parameters.values()]
        return [*trained, *(place.get(key, _ABSENT) for place, key in self._places.values())]

    def first(self) -> Iterator[tuple[str, float]]:
        """What the numbers were that the script has set beside what its classes take, at registration."""
        for where, value in self._first.items():
            path = where.rpartition(".")[0]
            if (
                self._classes[path]
                and isinstance(value, float | bool)
                and not where.endswith(f".{_TRAINING}")
            ):
                yield f".{where.lstrip('.')}", value

    def put_back(self, values: list[Any]) -> None:
        """Sets what `read` gave, and takes away what came later."""
        self._look()
        count = len(self._parameters)
        for parameter, trained in zip(self._parameters.values(), values[:count], strict=True):
            _train(parameter, trained)
        for where, (place, key) in list(self._places.items())[len(values) - count :]:
            if where not in self._held:
                place.pop(key, None)
        for (place, key), value in zip(self._places.values(), values[count:], strict=False):
            _set(place, key, value)

    def changed(self, values: list[Any]) -> dict[str, Any]:
        """What training has changed, of `values` as `read` gave them; and every `training`."""
        count = len(self._parameters)
        trained = zip(self._parameters, values[:count], self._trained, strict=True)
        found = {where: value for where, value, first in trained if value is not first}
        for (where, (_, key)), value in zip(self._places.items(), values[count:], strict=False):
            first = self._first.get(where, _ABSENT)
            moves = key == _TRAINING or (value is not first and not _same(value, first))
            if moves and _moves(value):
                found[where] = value
        return dict(sorted(found.items()))

    def now(self) -> dict[str, Any]:
        """What training has changed so far."""
        return self.changed(self.read())

    def put(self, changed: dict[str, Any]) -> None:
        """Makes the values what they were where `changed` was read. Raises `KeyError`: no such module."""
        self._look()
        for where, (place, key) in self._places.items():
            if where not in changed and (where in self._first or where not in self._held):
                _set(place, key, self._first.get(where, _ABSENT))
        for (where, parameter), first in zip(self._parameters.items(), self._trained, strict=True):
            _train(parameter, changed.get(where, first))
        for where, value in changed.items():
            if where not in self._parameters:
                path, _, key = where.rpartition(".")
                self._modules[path][key] = value


@cache
def _optimizers_own() -> frozenset[str]:
    """What torch keeps on every optimizer, and what schedulers and scalers set on one.

    Late, for making an optimizer brings half of torch in.
    """
    own = vars(torch.optim.SGD([torch.zeros(1)])).keys() - {"defaults"}
    return frozenset(own | {"step", "_opt_called", "grad_scale", "found_inf"})


def _classes(owner: Any) -> list[type]:
    """The classes of the script, or of a library, that make it."""
    return [kind for kind in type(owner).__mro__ if kind.__module__.partition(".")[0] not in _NOBODYS]


def _moves(value: Any) -> bool:
    """Is it of a kind that moves?"""
    if type(value) in _PLAIN:
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.number | numpy.bool_)


def _ours(hook: Any) -> bool:
    """One that a session has set itself."""
    return str(getattr(hook, "__module__", "")).startswith("gridagent.")


def _identical(one: list[Any], two: list[Any]) -> bool:
    return len(one) == len(two) and all(a is b for a, b in zip(one, two, strict=True))


def _train(parameter: nn.Parameter, trained: bool) -> None:
    if parameter.requires_grad is not trained:
        parameter.requires_grad_(trained)


def derived(module: nn.Module, key: str) -> bool:
    """Does a hook of torch make the tensor anew before each forward, out of parameters that move?

    torch.nn.utils.weight_norm, spectral_norm and prune keep it under the name of the parameter that it was.
    """
    names = module._parameters
    return f"{key}_orig" in names or (f"{key}_g" in names and f"{key}_v" in names)


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module has state of its own kind."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _set(place: dict[str, Any], key: str, value: Any) -> None:
    if value is _ABSENT:
        place.pop(key, None)
    else:
        place[key] = value


def _same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    return bool(one == two) or bool(one != one and two != two)  # NaN is what it was, too
