"""Small state as bytes, without pickle: scalars, strings, lists, tuples, dicts, tensors, arrays.

`pack` turns a tree into msgpack and moves every tensor out of it, into a list; `unpack` is the
inverse, `put_back` puts the values into a dict that is there. Anything else is refused by name, so that
nothing travels that would be code on arrival. Of a subclass (a namedtuple, an IntEnum, a defaultdict) the
plain value travels, and the name of the type: the receiver makes it of a type of its own that has that name.
"""

import ctypes
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, MutableMapping
from enum import Enum
from typing import Any

import msgspec
import torch
from torch import nn

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode

_AS_THEY_ARE = frozenset({type(None), bool, float, str, bytes})
#: How a subclass' value becomes a plain one, whatever the subclass makes of `str()` and the like.
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, lambda value: bytes(memoryview(value))),
)
#: Types of this process by name, as it has met them in its own trees; None where two have the same name.
_types: dict[str, type | None] = {}
#: These are made where there is none yet.
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
}


#: What damaged bytes make msgspec, Python, torch and numpy raise (numpy parses the name of a dtype).
_DAMAGE = (
    msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError,
    SyntaxError,
)  # fmt: skip


class PackError(Exception):
    """A value of a kind that is not moved between nodes; the message names where it sits."""


def pack(tree: Any, tensors: list[torch.Tensor], path: str = "") -> bytes:
    """Encodes `tree`; its tensors are appended to `tensors` in order of appearance.

    The bytes are canonical: trees of equal values and types give equal bytes (dicts keep their order).
    Raises `PackError`.
    """
    try:
        return _encode(_to_plain(tree, tensors, path))
    except UnicodeEncodeError as error:
        raise PackError(f"{path or 'state'}: a string in it is no text: {error}") from None


def unpack(data: bytes, tensors: list[torch.Tensor]) -> Any:
    """The tree again. `tensors` are those that `pack` moved out, in the same order.

    A value whose type this process does not know, or could not fill without an object of that type, comes
    as the plain value. Raises `PackError`.
    """
    return _read(data, _Reader(tensors), None, "")


def put_back(
    data: bytes,
    tensors: list[torch.Tensor],
    target: dict[Any, Any],
    path: str,
    *,
    fill: bool,
    landed: frozenset[int] = frozenset(),
) -> None:
    """Makes `target`, and what it holds, what was packed: objects that fit stay the same and get the values.

    So whoever holds a dict, list, tensor or array of the tree sees them. `fill`: copy tensors into those of
    the target; otherwise `tensors` themselves are put there, unless the target's have their memory anyway.
    `landed`: addresses of storages that have their values already (parameters) and are not written to.
    Raises `PackError` where the target has no object or type that it takes.
    """
    reader = _Reader(tensors, strict=True, fill=fill, landed=landed)
    if _read(data, reader, target, path) is not target:
        raise PackError(f"{path}: it is no {type(target).__name__} where the state comes from")


def _read(data: bytes, reader: "_Reader", own: Any, path: str) -> Any:
    try:
        return reader.read(_decode(data), own, path)
    except _DAMAGE as error:
        raise PackError(f"{path + ': ' if path else ''}not a packed tree: {error}") from None


# ------------------------------------------------------------------------------------------------ packing


def _name(kind: type) -> str:
    """By which another process knows the type."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _types.setdefault(name, kind) is not kind:
        _types[name] = None
    return name


_name(torch.Size)  # is made as itself in any process
_PARAMETER = _name(nn.Parameter)


def _to_plain(value: Any, tensors: list[torch.Tensor], path: str) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else ["i", str(value)]
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["T", len(tensors) - 1, *_of_tensor(value)]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):  # first: float64 is a float
        return _array_to_plain(value, path)
    if isinstance(value, list):
        name = () if kind is list else (_name(kind),)
        return ["l", [_to_plain(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)], *name]
    if isinstance(value, tuple):
        name = () if kind is tuple else (_name(kind),)
        return ["t", [_to_plain(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)], *name]
    if isinstance(value, Mapping):
        name = () if kind is dict else (_name(kind),)
        return ["d", _pairs(value, tensors, path), *name]
    for base, plain in _SCALARS:
        if isinstance(value, base):
            inside = value.value if isinstance(value, Enum) else plain(value)
            return ["c", _to_plain(inside, tensors, path), _name(kind)]
    raise PackError(
        f"{path or 'state'}: {kind.__name__} cannot be moved. Registered state may hold tensors, "
        "numpy arrays, bytes, int, float, str, bool, None, and lists, tuples and dicts of these"
    )


def _pairs(value: Mapping[Any, Any], tensors: list[torch.Tensor], path: str) -> list[Any]:
    pairs = []
    for key, item in value.items():
        if not isinstance(key, str | int | float | bool | tuple):
            raise PackError(f"{path}: a key of type {type(key).__name__} cannot be moved; use strings")
        plain_key = _to_plain(key, tensors, path)
        pairs.append([plain_key, _to_plain(item, tensors, f"{path}.{key}")])
    return pairs


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor is beside its values, if anything: type, is it a leaf that needs gradients, device."""
    kind, grad = type(tensor), tensor.requires_grad and tensor.is_leaf
    if kind is torch.Tensor and not grad and tensor.is_cpu:
        return ()
    return "" if kind is torch.Tensor else _name(kind), grad, tensor.device.type


def _array_to_plain(value: Any, path: str) -> list[Any]:
    numpy = sys.modules["numpy"]
    if value.dtype.hasobject:
        raise PackError(f"{path}: a numpy array of Python objects cannot be moved")
    if value.dtype.names is not None:
        raise PackError(f"{path}: a numpy array with named fields cannot be moved; use one for each field")
    if isinstance(value, numpy.generic):
        return ["s", value.dtype.str, value.tobytes()]
    name = () if type(value) is numpy.ndarray else (_name(type(value)),)
    return ["n", value.dtype.str, list(value.shape), value.tobytes(), *name]


# ------------------------------------------------------------------------------------------------ reading


class _Reader:
    """Makes values of what `_to_plain` gave. `own` is always what the receiver has at that place, or None."""

    def __init__(
        self,
        tensors: list[torch.Tensor],
        *,
        strict: bool = False,
        fill: bool = False,
        landed: frozenset[int] = frozenset(),
    ) -> None:
        self._tensors = tensors
        self._strict = strict
        self._fill = fill
        self._landed = landed
        self._taken: dict[int, tuple[Any, Any]] = {}  #: by id: what was filled, and with what

    def read(self, told: Any, own: Any, path: str) -> Any:
        if not isinstance(told, list):
            return told
        kind = told[0]
        if kind == "i":
            return int(told[1])
        if kind == "T":
            return self._tensor(told[1], told[2:], own, path)
        if kind == "s":
            import numpy

            return numpy.frombuffer(told[2], dtype=told[1])[0]
        if kind == "n":
            return self._array(told, own, path)
        name = told[2] if len(told) > 2 else ""
        if kind == "l":
            return self._list(told[1], name, own, path)
        if kind == "t":
            return self._tuple(told[1], name, own, path)
        if kind == "d":
            return self._dict(told[1], name, own, path)
        if kind == "c":
            return self._typed(self.read(told[1], None, path), name, own, path)
        raise ValueError(f"unknown kind {kind!r}")

    def _list(self, told: list[Any], name: str, own: Any, path: str) -> Any:
        fits = _fits(own, name, list) and self._free(own, told)
        olds = own if fits else []
        items = [self.read(item, _at(olds, i), f"{path}[{i}]") for i, item in enumerate(told)]
        if fits:
            own[:] = items
            return own
        return self._unknown(items, name, path) if name else items

    def _free(self, own: Any, told: Any) -> bool:
        """Not if it stands at another place as well, which has got other values: it cannot have both."""
        before = self._taken.setdefault(id(own), (own, told))[1]
        return before is told or (isinstance(told, list) and before == told)

    def _tuple(self, told: list[Any], name: str, own: Any, path: str) -> Any:
        olds = own if _fits(own, name, tuple) else ()
        items = [self.read(item, _at(olds, i), f"{path}[{i}]") for i, item in enumerate(told)]
        if olds and len(olds) == len(items) and all(map(_is, olds, items)):
            return own
        return self._typed(tuple(items), name, own, path) if name else tuple(items)

    def _dict(self, told: list[Any], name: str, own: Any, path: str) -> Any:
        fits = _fits(own, name, dict) and isinstance(own, MutableMapping) and self._free(own, told)
        made = {}
        for told_key, item in told:
            key = self.read(told_key, None, path)
            made[key] = self.read(item, _of_key(own, key, item) if fits else None, f"{path}.{key}")
        if fits:
            own.clear()
            for key, value in made.items():  # not update(): a Counter's adds
                own[key] = value
            return own
        if not name:
            return made
        return _MAPPINGS[name](made) if name in _MAPPINGS else self._unknown(made, name, path)

    def _tensor(self, index: int, more: list[Any], own: Any, path: str) -> torch.Tensor:
        given = self._tensors[index]
        name, grad, device = more or ("", False, "cpu")
        if _fits(own, name, torch.Tensor) and (own.is_leaf or not grad) and self._filled(own, given, device):
            if own.is_leaf and own.requires_grad != grad:
                own.requires_grad_(grad)
            result: torch.Tensor = own
            return result
        if not more:
            return given
        made = given.detach().to(device)
        if name == _PARAMETER:
            return nn.Parameter(made, grad)
        made.requires_grad_(grad)
        return self._unknown(made, name, path) if name else made

    def _filled(self, own: torch.Tensor, given: torch.Tensor, device: str) -> bool:
        """Has a tensor of the receiver the value now? Not if it is unlike, or what must not be written to."""
        inner = getattr(own, "_local_tensor", own)  # a DTensor's
        if (inner.shape, inner.dtype, inner.device.type) != (given.shape, given.dtype, device):
            return False
        if (inner.data_ptr(), inner.stride()) == (given.data_ptr(), given.stride()):
            return True
        if not self._fill:
            return False
        if not self._free(own, given) or inner.untyped_storage().data_ptr() in self._landed:
            return torch.equal(inner, given.to(inner.device))
        with torch.inference_mode(inner.is_inference()), torch.no_grad():
            inner.copy_(given)
        return True

    def _array(self, told: list[Any], own: Any, path: str) -> Any:
        import numpy

        name = told[4] if len(told) > 4 else ""
        array = numpy.frombuffer(told[3], dtype=told[1]).reshape(told[2])
        fits = _fits(own, name, numpy.ndarray) and (own.dtype, own.shape) == (array.dtype, array.shape)
        if fits and own.flags.writeable and self._free(own, told):
            own[...] = array
            return own
        return self._unknown(array.copy(), name, path) if name else array.copy()

    def _typed(self, plain: Any, name: str, own: Any, path: str) -> Any:
        """A value that does not change, as one of the type of this name."""
        kind = type(own) if _fits(own, name, object) else _types.get(name)
        if kind is None or not issubclass(kind, (type(plain), Enum)):
            return self._unknown(plain, name, path)
        make = getattr(kind, "_make", kind) if isinstance(plain, tuple) else kind
        try:
            return make(plain)
        except Exception as error:  # the script's own type may raise anything
            raise PackError(f"{path}: {name} cannot be made again: {type(error).__name__}: {error}") from None

    def _unknown(self, plain: Any, name: str, path: str) -> Any:
        if self._strict:
            raise PackError(
                f"{path}: a {name} comes and there is none here to take its value: put one there before the"
                " Session is made, or keep a plain value"
            )
        return plain


def _fits(own: Any, name: str, plain: type) -> bool:
    """Is `own` of the type of this name? "" is that of the plain type itself."""
    return _name(type(own)) == name if name else type(own) is plain


def _is(one: Any, other: Any) -> bool:
    return one is other


def _at(olds: Any, index: int) -> Any:
    return olds[index] if index < len(olds) else None


def _of_key(own: Any, key: Any, told: Any) -> Any:
    """What a dict has by this key; what it would make of its own, if a container comes."""
    if key in own:
        return own[key]
    container = isinstance(told, list) and told[0] in ("l", "d")
    if container and isinstance(own, defaultdict) and own.default_factory is not None:
        return own.default_factory()
    return None


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as a writable byte view (torch gives none without numpy)."""
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(bytearray())
    array = (ctypes.c_char * count).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # the view keeps the memory alive
    return memoryview(array).cast("B")
