"""Plain values that hang on modules beside parameters and buffers: `training`, a dropout's `p`, a counter,
and which parameters are trained at all (`requires_grad`).

They decide what a step computes, so they are part of a rank's state as far as training has changed them. A
value that is still what it was when the module was registered stays where it is: it may belong to the place
(the index of a device, a folder), and a new process makes its own. Lists and the like do not move; that one
has changed is told.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import Tensor, nn

from gridagent.train.packing import PackError, pack

#: A flag of each module that scripts switch at will; it belongs to no place and always moves.
_TRAINING = "training"
_GRAD = ".requires_grad"
_PLAIN = (bool, int, float, str, type(None))
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, tuple, deque, Mapping, Set)


class _Absent:
    """Where there is no such value."""


_ABSENT = _Absent()


class Attributes:
    """The plain values of one registered module and of all modules in it, by "path.name"."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._modules = {path: vars(child) for path, child in module.named_modules()}
        #: These tell of themselves what counts.
        self._tell = {path for path, its in module.named_modules() if has_extra_state(its)}
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._shapes: list[tuple[int, str]] = []
        self._look()
        self._first = {where: place[key] for where, (place, key) in self._places.items()}
        self._parameters = {f"{name}{_GRAD}": its for name, its in module.named_parameters()}
        self._trained = [parameter.requires_grad for parameter in self._parameters.values()]
        self._held = dict(self._containers())
        self._hooked = dict(self._hooks())

    def _containers(self) -> Iterator[tuple[str, Any]]:
        """What lists and the like hold, where that can be told."""
        for path, place in self._modules.items():
            for key, value in place.items():
                if not isinstance(value, _CONTAINERS) or key.startswith("_") or path in self._tell:
                    continue
                tensors: list[Tensor] = []
                try:
                    items = sorted(value) if isinstance(value, Set) else value
                    held = pack(list(items) if isinstance(items, deque) else items, tensors)
                except (PackError, TypeError):
                    continue
                yield f"{path}.{key}", (held, [(tensor.data_ptr(), tensor._version) for tensor in tensors])

    def _hooks(self) -> Iterator[tuple[str, list[int]]]:
        """How many hooks each module has."""
        for path, place in self._modules.items():
            yield path, [len(place.get(kind) or ()) for kind in _MODULE_HOOKS]

    def strayed(self) -> list[str]:
        """What training has changed and does not move: lists and the like, hooks, and modules themselves."""
        now = {path: vars(child) for path, child in self._module.named_modules()}
        parts = now.keys() | self._modules.keys()
        found = [path for path in sorted(parts) if now.get(path) is not self._modules.get(path)]
        lists = [where.lstrip(".") for where, held in self._containers() if self._held.get(where) != held]
        hooks = [f"{path}'s hooks" for path, count in self._hooks() if self._hooked[path] != count]
        return found + lists + hooks

    def _look(self) -> None:
        """Takes up values that have come since."""
        self._shapes = self._shape()
        for path, place in self._modules.items():
            for key, value in place.items():
                told = key != _TRAINING and path in self._tell
                if type(value) in _PLAIN and not key.startswith("_") and not told:
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

    def put_back(self, values: list[Any]) -> None:
        """Sets what `read` gave, and takes away what came later."""
        self._look()
        count = len(self._parameters)
        for parameter, trained in zip(self._parameters.values(), values[:count], strict=True):
            _train(parameter, trained)
        later: list[Any] = [_ABSENT] * (len(self._places) + count - len(values))
        for (place, key), value in zip(self._places.values(), values[count:] + later, strict=True):
            _set(place, key, value)

    def changed(self, values: list[Any]) -> dict[str, Any]:
        """What training has changed, of `values` as `read` gave them; and every `training`."""
        count = len(self._parameters)
        trained = zip(self._parameters, values[:count], self._trained, strict=True)
        found = {where: value for where, value, first in trained if value is not first}
        for (where, (_, key)), value in zip(self._places.items(), values[count:], strict=False):
            first = self._first.get(where, _ABSENT)
            moves = key == _TRAINING or (value is not first and not _same(value, first))
            if moves and type(value) in _PLAIN:
                found[where] = value
        return dict(sorted(found.items()))

    def now(self) -> dict[str, Any]:
        """What training has changed so far."""
        return self.changed(self.read())

    def put(self, changed: dict[str, Any]) -> None:
        """Makes the values what they were where `changed` was read. Raises `KeyError`: no such module."""
        self._look()
        for where, (place, key) in self._places.items():
            if where not in changed:
                _set(place, key, self._first.get(where, _ABSENT))
        for (where, parameter), first in zip(self._parameters.items(), self._trained, strict=True):
            _train(parameter, changed.get(where, first))
        for where, value in changed.items():
            if where not in self._parameters:
                path, _, key = where.rpartition(".")
                self._modules[path][key] = value


def _train(parameter: nn.Parameter, trained: bool) -> None:
    if parameter.requires_grad is not trained:
        parameter.requires_grad_(trained)


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
    both_nan = isinstance(one, float) and math.isnan(one) and math.isnan(two)
    return both_nan or bool(one == two)
