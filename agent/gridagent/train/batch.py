"""What a batch holds, so that a change in place is seen: a batch of a void step is given out once more."""

import hashlib
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

from torch import Tensor

from gridagent.train.packing import memory_of

#: Values that nothing changes in place.
_PLAIN = (str, bytes, int, float, complex, bool, type(None), range, slice, type)
_DEPTH_MAX = 32

Mark = tuple[Any, ...]


class Opaque(Exception):
    """A batch holds something of which nobody can say whether it was changed."""


def marks(batch: Any) -> list[Mark]:
    """Equal before and after, unless the batch was changed in place.

    Tensors are judged by identity and version (a write through `.data` is not seen), numpy arrays by content,
    objects by their attributes. Raises `Opaque` where something of another kind is in the batch.
    """
    return list(_marks(batch, 0, _where))


def contents(batch: Any) -> list[Mark]:
    """Equal for batches that hold the same. Raises `Opaque` as `marks` does."""
    return list(_marks(batch, 0, _what))


def places(found: list[Mark]) -> set[int]:
    """Where in memory the tensors of a batch lie, from its marks."""
    return {mark[1] for mark in found if len(mark) == 3 and mark[0] == "tensor" and mark[1]}


def _where(tensor: Tensor) -> Mark:
    return ("tensor", tensor.data_ptr(), tensor._version)


def _what(tensor: Tensor) -> Mark:
    data = memory_of(tensor.detach().cpu().contiguous())
    return ("tensor", str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data).digest())


def _marks(value: Any, depth: int, of_tensor: Callable[[Tensor], Mark]) -> Iterator[Mark]:
    if depth > _DEPTH_MAX:
        raise Opaque("a nest too deep, or one that holds itself")
    own = of_tensor(value) if isinstance(value, Tensor) else _own(value)
    if own is not None:
        yield own
        return
    head, items = _inside(value)
    yield head
    for item in items:
        yield from _marks(item, depth + 1, of_tensor)


def _own(value: Any) -> Mark | None:
    """The mark of a value without others inside."""
    if isinstance(value, _PLAIN):
        return (value,)
    if isinstance(value, bytearray):
        return (bytes(value),)
    if isinstance(value, Set):
        return ("set", *sorted(map(repr, value)))
    return _array(value)


def _inside(value: Any) -> tuple[Mark, list[Any]]:
    """What a value is, and what it holds."""
    if isinstance(value, Mapping):
        return ("mapping", *map(repr, value)), list(value.values())
    if isinstance(value, list | tuple):
        return (type(value).__name__, len(value)), list(value)
    if attributes := _attributes(value):
        return ("object", *(name for name, _ in attributes)), [item for _, item in attributes]
    raise Opaque(f"a value of type {type(value).__module__}.{type(value).__qualname__}")


def _array(value: Any) -> Mark | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        return (value.dtype.str, value.tobytes())
    if not isinstance(value, numpy.ndarray):
        return None
    if value.dtype.hasobject:
        raise Opaque("a numpy array of objects")
    return (value.dtype.str, value.shape, zlib.crc32(numpy.ascontiguousarray(value).data.cast("B")))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Of an object with a `__dict__` or `__slots__`, a dataclass say."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return sorted(found.items())
