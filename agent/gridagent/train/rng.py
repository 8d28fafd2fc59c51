"""The random states of a process as one value: read once, compared, put back, packed small.

`RankState.rng_entries` gives the same states in the form in which a rank's state moves.
"""

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from gridagent.train.state import Entry, RankState, StateError, memory_of, tree_entries

#: 624 words and the position in them.
_MT19937_BYTES = 625 * 4
_encode = msgspec.msgpack.Encoder().encode


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """`Rng` on its way to another rank."""

    names: list[str]
    tensors: list[bytes]
    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, bytes, int, int, float] | None


_decode = msgspec.msgpack.Decoder(_Packed).decode


@dataclass(frozen=True, slots=True)
class Rng:
    """Every random state that is part of a rank."""

    generators: dict[str, torch.Generator]  #: the registered ones
    tensors: dict[str, Tensor]  #: name as in `RankState.rng_entries` -> state
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None

    @classmethod
    def read(cls, state: RankState) -> "Rng":
        """The random states as they are now."""
        tensors = {"rng/torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            for i, value in enumerate(torch.cuda.get_rng_state_all()):
                tensors[f"rng/cuda:{i}"] = value
        for name, generator in state.generators.items():
            tensors[f"rng/{name}"] = generator.get_state()
        return cls(state.generators, tensors, random.getstate(), _numpy_state())

    def same(self, other: "Rng") -> bool:
        """Has nobody drawn a random number between the two?"""
        return (
            self.python == other.python
            and all(torch.equal(value, other.tensors[name]) for name, value in self.tensors.items())
            and _plain(self.numpy) == _plain(other.numpy)
        )

    def put_back(self) -> None:
        """Sets every random state of the process to this."""
        torch.set_rng_state(self.tensors["rng/torch"])
        for name, value in self.tensors.items():
            kind, _, device = name.partition(":")
            if kind == "rng/cuda":
                torch.cuda.set_rng_state(value, int(device))
        for name, generator in self.generators.items():
            generator.set_state(self.tensors[f"rng/{name}"])
        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_seen.clear()
            sys.modules["numpy"].random.set_state(self.numpy)

    def pack(self) -> bytes:
        """As bytes, for `unpack` in another process of the same job."""
        tensors = [bytes(memory_of(value)) for value in self.tensors.values()]
        return _encode(_Packed(list(self.tensors), tensors, self.python, _plain(self.numpy)))


#: The bytes of numpy's generator, and its whole state, as they were last.
_numpy_seen: dict[bytes, tuple[Any, ...]] = {}


def _numpy_state() -> tuple[Any, ...] | None:
    """numpy's global random state. Reading it takes 50 us, seeing that nobody has drawn from it takes 1."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    legacy: Any = numpy.random
    generator: Any = legacy.get_bit_generator() if hasattr(legacy, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":
        return tuple(legacy.get_state())
    data = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
    told = _numpy_seen.get(data)
    # A second normal number waits beside the generator's bytes: its use would not show in them.
    if told is None or told[3]:
        told = tuple(legacy.get_state())
        _numpy_seen.clear()
        _numpy_seen[data] = told
    return told


def _plain(numpy: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return None if numpy is None else (numpy[0], numpy[1].tobytes(), *numpy[2:])


def entries_of(packed: bytes) -> list[Entry]:
    """What `RankState.rng_entries` would have given where `packed` was made. Raises `StateError`."""
    try:
        told = _decode(packed)
    except msgspec.MsgspecError as error:
        raise StateError(f"packed random states are damaged: {error}") from None
    tensors = {
        name: Entry(name, "rng", torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for name, data in zip(told.names, told.tensors, strict=True)
    }
    devices = [name for name in tensors if name == "rng/torch" or name.startswith("rng/cuda:")]
    entries = [*(tensors.pop(name) for name in devices), *tree_entries("rng/python", "rng", told.python)]
    if told.numpy is not None:
        import numpy

        key = numpy.frombuffer(told.numpy[1], dtype=numpy.uint32).copy()
        entries += tree_entries("rng/numpy", "rng", (told.numpy[0], key, *told.numpy[2:]))
    return [*entries, *tensors.values()]
