"""Whether a value of any kind is still what it was, also one that can be neither moved nor compared itself.

Values are judged by their content: plain ones, arrays, random generators by their state, containers and
objects by all that they hold. What shows no content (functions, classes, objects of C libraries) is what it
was while it is the same object. Larger tensors are judged by identity and version, as everywhere: a write
through `.data` to them is not seen.
"""

import hashlib
import io
import logging
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from gridagent.train.packing import memory_of

#: So much is looked at in one value; a vocabulary of 90,000 words is within it.
_PARTS_MAX = 200_000
_DEPTH_MAX = 100
_SMALL_BYTES = 64 << 10
_LARGE_BYTES = 256 << 20
_ITSELF = (
    type,
    types.FunctionType,
    types.ModuleType,
    logging.Logger,
    logging.Handler,
    io.IOBase,
    threading.Thread,
)
#: Machinery of these packages is no state of the script's: its own counters change at each step.
_MACHINERY = ("torch._", "torch.distributed.", "gridagent.")
_TEXT = (float, complex, PurePath, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _TooMuch(Exception):
    """The value is too large or too deep to be looked at."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """What a value was at one moment."""

    digest: bytes
    selves: list[Callable[[], Any]]  #: objects in it that are judged by identity; None once they are gone
    whole: bool  #: all of it was looked at

    def same(self, other: "Likeness") -> bool:
        """Has nothing changed, as far as can be told?"""
        return (self.digest, self.whole, len(self.selves)) == (
            other.digest, other.whole, len(other.selves)
        ) and all(
            one() is not None and one() is two() for one, two in zip(self.selves, other.selves, strict=True)
        )  # fmt: skip


def likeness(value: Any, known: Set[int] = frozenset()) -> Likeness:
    """What `value` is now. `known`: ids of objects that move by themselves; they are judged by identity."""
    reader = _Reader(known)
    try:
        reader.read(value)
    except (_TooMuch, RuntimeError, RecursionError):  # RuntimeError: another thread changes it just now
        return Likeness(b"", [_weak(value)], whole=False)
    return Likeness(reader.sum.digest(), reader.selves, whole=True)


class _Reader:
    def __init__(self, known: Set[int]) -> None:
        self.sum = hashlib.blake2b(digest_size=16)
        self.selves: list[Callable[[], Any]] = []
        self._known = known
        self._left = _PARTS_MAX
        self._above: dict[int, int] = {}

    def read(self, value: Any) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMuch
        self._put(f"{type(value).__module__}.{type(value).__qualname__}".encode())
        if id(value) in self._known:
            self.selves.append(_weak(value))
        elif (plain := _plain(value)) is not None:
            self._put(plain)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif id(value) in self._above:
            self._put(b"above %d" % (len(self._above) - self._above[id(value)]))
        elif (parts := _parts(value)) is None:
            self.selves.append(_weak(value))
        elif len(self._above) >= _DEPTH_MAX:
            raise _TooMuch
        else:
            self._above[id(value)] = len(self._above)
            self._put(b"%d" % len(parts))
            for part in parts:
                self.read(part)
            del self._above[id(value)]

    def _put(self, data: bytes | memoryview) -> None:
        self.sum.update(b"%d " % len(data))
        self.sum.update(data)

    def _tensor(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        self._put(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad} {tensor.device}".encode())
        try:
            if local.numel() * local.element_size() <= _SMALL_BYTES:
                self._put(memory_of(local.detach().cpu().contiguous()))
                return
            version = local._version
        except (RuntimeError, TypeError):  # sparse, meta, of inference mode
            version = 0
        self._put(b"%d" % version)
        self.selves.append(_weak(tensor))


def _weak(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _plain(value: Any) -> bytes | None:
    """A value without others inside, as bytes."""
    if isinstance(value, Enum):
        return f"{value._name_} {value._value_!r}".encode("utf-8", "surrogatepass")
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, int):
        return b"%x" % int(value)
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if value is None or isinstance(value, _TEXT):
        return str(value).encode("utf-8", "surrogatepass")
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic) or value.dtype.hasobject:
        return None
    if value.nbytes <= _LARGE_BYTES:
        content = hashlib.blake2b(numpy.ascontiguousarray(value).reshape(-1).view("u1"))
        return f"{value.dtype} {value.shape} {content.hexdigest()}".encode()
    if value.flags.writeable:
        raise _TooMuch
    return None  # a mapped file, say: itself


def _parts(value: Any) -> list[Any] | None:
    """What a value holds; None where it is judged by identity."""
    kind = type(value)
    module = f"{kind.__module__}."
    if isinstance(value, _ITSELF) or kind is object or isinstance(value, weakref.ref):
        return None
    try:
        if (state := _random_state(value)) is not None:
            return [state]
        if module.startswith(_MACHINERY) and not module.startswith("torch.distributed.algorithms."):
            return None
        if isinstance(value, types.MethodType | types.BuiltinMethodType):
            return [value.__name__, value.__self__]
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            return [] if frame is None else [frame.f_lasti, dict(frame.f_locals)]
        return _contained(value, module.partition(".")[0])
    except Exception:  # the script's own objects may raise anything
        return None


def _random_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    return value.state if isinstance(value, numpy.random.BitGenerator) else None


def _contained(value: Any, package: str) -> list[Any] | None:
    """What containers and objects hold."""
    numpy = sys.modules.get("numpy")
    found: list[Any] = []
    if isinstance(value, dict):
        items: Any = OrderedDict.items if isinstance(value, OrderedDict) else dict.items
        found = [part for pair in items(value) for part in pair]
    elif isinstance(value, list | tuple):
        found = list(value)
    elif isinstance(value, deque):
        found = [value.maxlen, *value]
    elif isinstance(value, set | frozenset):
        found = sorted(value, key=lambda item: (str(type(item)), _plain(item) or b"", id(item)))
    elif numpy is not None and isinstance(value, numpy.ndarray):
        found = value.ravel().tolist()
    elif not hasattr(value, "__dict__") and package in sys.stdlib_module_names:
        return _reduced(value)
    elif not (attributes := _attributes(value)):
        return [] if hasattr(value, "__dict__") else None
    else:
        return attributes
    return found + _attributes(value)


def _reduced(value: Any) -> list[Any] | None:
    """An object of the standard library as it would be copied: a date, an iterator with its position."""
    told = value.__reduce_ex__(4)
    return [list(part) if i > 2 and part is not None else part for i, part in enumerate(told)]


def _attributes(value: Any) -> list[Any]:
    """Names and values of an object's attributes, in `__dict__` and in slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                found[name] = slot.__get__(value)
    return [part for name in sorted(found, key=str) for part in (name, found[name])]
