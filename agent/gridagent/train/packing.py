"""Small state as bytes, without pickle: scalars, strings, lists, tuples, dicts, tensors, arrays.

`pack` turns a tree into msgpack and moves every tensor out of it, into a list; `unpack` is the
inverse. Anything else is refused by name, so that nothing travels that would be code on arrival.
"""

import ctypes
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class PackError(Exception):
    """A value of a kind that is not moved between nodes; the message names where it sits."""


def pack(tree: Any, tensors: list[torch.Tensor], path: str = "") -> bytes:
    """Encodes `tree`; its tensors are appended to `tensors` in order of appearance.

    The bytes are canonical: equal trees give equal bytes (dicts keep their order). Raises `PackError`.
    """
    return _encode(_to_plain(tree, tensors, path))


def unpack(data: bytes, tensors: list[torch.Tensor]) -> Any:
    """The tree again. `tensors` are those that `pack` moved out, in the same order."""
    try:
        return _from_plain(_decode(data), tensors)
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError) as error:
        raise PackError(f"not a packed tree: {error}") from None


def _to_plain(value: Any, tensors: list[torch.Tensor], path: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):  # first: numpy's float64 is also a float
        return ["s", value.dtype.str, value.tobytes()]
    if value is None or isinstance(value, bool | float | str | bytes):
        return value
    if isinstance(value, int):
        return value if -(1 << 63) <= value < 1 << 64 else ["i", str(value)]
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["T", len(tensors) - 1]
    if isinstance(value, list):
        return ["l", [_to_plain(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]]
    if isinstance(value, tuple):
        return ["t", [_to_plain(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]]
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, str | int | float | bool | tuple):
                raise PackError(f"{path}: a key of type {type(key).__name__} cannot be moved; use strings")
            plain_key = _to_plain(key, tensors, path)
            pairs.append([plain_key, _to_plain(item, tensors, f"{path}.{key}")])
        return ["d", pairs]
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.dtype.hasobject:
            raise PackError(f"{path}: a numpy array of Python objects cannot be moved")
        return ["n", value.dtype.str, list(value.shape), value.tobytes()]
    raise PackError(
        f"{path or 'state'}: {type(value).__name__} cannot be moved. Registered state may hold tensors, "
        "numpy arrays, bytes, int, float, str, bool, None, and lists, tuples and dicts of these"
    )


def _from_plain(value: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind = value[0]
    if kind == "i":
        return int(value[1])
    if kind == "T":
        return tensors[value[1]]
    if kind == "l":
        return [_from_plain(item, tensors) for item in value[1]]
    if kind == "t":
        return tuple(_from_plain(item, tensors) for item in value[1])
    if kind == "d":
        return {_from_plain(key, tensors): _from_plain(item, tensors) for key, item in value[1]}
    if kind in ("n", "s"):
        import numpy

        if kind == "s":
            return numpy.frombuffer(value[2], dtype=value[1])[0]
        return numpy.frombuffer(value[3], dtype=value[1]).reshape(value[2]).copy()
    raise ValueError(f"unknown kind {kind!r}")


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as a writable byte view (torch gives none without numpy)."""
    count = tensor.numel() * tensor.element_size()
    if count == 0:
        return memoryview(bytearray())
    array = (ctypes.c_char * count).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # the view keeps the memory alive
    return memoryview(array).cast("B")
