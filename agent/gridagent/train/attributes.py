"""Plain values that hang on modules beside parameters and buffers: `training`, a dropout's `p`, a counter.

They decide what a step computes, so they are part of a rank's state as far as training has changed them. A
value that is still what it was when the module was registered stays where it is: it may belong to the place
(the index of a device, a folder), and a new process makes its own.
"""

import math
from typing import Any

from torch import nn

#: A flag of each module that scripts switch at will; it belongs to no place and always moves.
_TRAINING = "training"
_PLAIN = (bool, int, float, str, type(None))


class _Absent:
    """Where there is no such value."""


_ABSENT = _Absent()


class Attributes:
    """The plain values of one registered module and of all modules in it, by "path.name"."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = {path: vars(child) for path, child in module.named_modules()}
        #: These tell of themselves what counts.
        self._tell = {path for path, its in module.named_modules() if _has_extra_state(its)}
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._shapes: list[tuple[int, str]] = []
        self._look()
        self._first = {where: place[key] for where, (place, key) in self._places.items()}

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
        return [place.get(key, _ABSENT) for place, key in self._places.values()]

    def put_back(self, values: list[Any]) -> None:
        """Sets what `read` gave, and takes away what came later."""
        self._look()
        later: list[Any] = [_ABSENT] * (len(self._places) - len(values))
        for (place, key), value in zip(self._places.values(), values + later, strict=True):
            _set(place, key, value)

    def changed(self, values: list[Any]) -> dict[str, Any]:
        """What training has changed, of `values` as `read` gave them; and every `training`."""
        found = {}
        for (where, (_, key)), value in zip(self._places.items(), values, strict=False):
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
        for where, value in changed.items():
            path, _, key = where.rpartition(".")
            self._modules[path][key] = value


def _has_extra_state(module: nn.Module) -> bool:
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
