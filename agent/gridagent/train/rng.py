"""The random states of a process as one value: read once, compared, put back, packed small.

Which random states belong to a rank stands here alone; `state.rng_entries_of` brings them into the form in
which a rank's state moves.
"""

import ctypes
import os
import random
import sys
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from gridagent.train.packing import memory_of

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
    tensors: dict[str, Tensor]  #: name of the part of the rank's state -> random state
    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None

    @classmethod
    def read(cls, generators: dict[str, torch.Generator]) -> "Rng":
        """The random states as they are now; `generators` are those that the script has registered."""
        tensors = {"rng/torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            for i, value in enumerate(torch.cuda.get_rng_state_all()):
                tensors[f"rng/cuda:{i}"] = value
        for name, generator in generators.items():
            tensors[f"rng/{name}"] = generator.get_state()
        return cls(generators, tensors, random.getstate(), _numpy_state())

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

    @classmethod
    def unpack(cls, packed: bytes) -> "Rng":
        """What `pack` was called of, in another process: to be moved on, not to be put back here.

        Raises `msgspec.MsgspecError` for damaged bytes.
        """
        told = _decode(packed)
        tensors = {
            name: torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for name, data in zip(told.names, told.tensors, strict=True)
        }
        numpy_state: tuple[Any, ...] | None = None
        if told.numpy is not None:
            import numpy

            key = numpy.frombuffer(told.numpy[1], dtype=numpy.uint32).copy()
            numpy_state = (told.numpy[0], key, *told.numpy[2:])
        return cls({}, tensors, told.python, numpy_state)


def scramble(generators: dict[str, torch.Generator]) -> None:
    """Sets every random state of the process, and of these generators, to what nobody can foretell."""
    torch.manual_seed(_seed())
    random.seed(_seed())
    for generator in generators.values():
        generator.manual_seed(_seed())
    if (numpy := sys.modules.get("numpy")) is not None:
        _numpy_seen.clear()
        numpy.random.seed(_seed() % (1 << 32))


def _seed() -> int:
    return int.from_bytes(os.urandom(7))


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
