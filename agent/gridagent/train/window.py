"""What a step changes before its parameters do, kept as the step's window begins, put back if it is void.

Random states, buffers, plain values of the registered objects and of the optimizers' groups. Parameters,
optimizer state and large tensors of other objects are not kept: before the vote nothing may change them,
and `rewind` refuses if something did.
"""

import hashlib
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gridagent.train.attributes import unwrap
from gridagent.train.packing import PackError, memory_of, put_back, unpack
from gridagent.train.rng import Rng
from gridagent.train.state import Entry, RankState, StateError, local, tree_entries, with_extra_state

#: Buffers and small tensors up to this size are copied each time. Larger buffers are looked at each time and
#: copied if they changed; larger tensors of other objects are judged by identity and version.
SMALL_BYTES = 64 << 10


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor._version


@dataclass(frozen=True, slots=True)
class BufferCopy:
    """The values of all buffers at one moment."""

    flats: list[Tensor]  #: small ones, side by side, one tensor for each dtype and device
    large: list[Tensor]


class Buffers:
    """All buffers of the registered modules, and what modules have as extra state.

    Judged by content: batch norm, and whatever writes through `.data`, changes them without a new version.
    """

    def __init__(self, state: RankState) -> None:
        self.names: list[str] = []
        self.extra: list[tuple[str, nn.Module]] = []
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._small: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        self._large: list[int] = []
        self._clones: dict[int, Tensor] = {}
        for name, wrapped in state.modules.items():
            module = unwrap(wrapped)
            self.extra += [(f"{name}/{path}#extra", child) for path, child in with_extra_state(module)]
            for path, buffer in module.named_buffers():
                owner, _, key = path.rpartition(".")
                index = len(self.names)
                self.names.append(f"{name}/{path}")
                self._places.append((module.get_submodule(owner)._buffers, key))
                if buffer.numel() * buffer.element_size() <= SMALL_BYTES:
                    self._small.setdefault((buffer.dtype, buffer.device), []).append(index)
                else:
                    self._large.append(index)

    def live(self, index: int) -> Tensor:
        """The buffer itself, which the script may have replaced by another tensor."""
        place, key = self._places[index]
        buffer = place.get(key)
        if buffer is None:
            raise StateError(f"{self.names[index]} is no buffer any more")
        return local(buffer)

    def copy(self) -> BufferCopy:
        """The values as they are now."""
        flats = [
            torch.cat([self.live(index).reshape(-1) for index in indices]) for indices in self._small.values()
        ]
        return BufferCopy(flats, [self._clone(index) for index in self._large])

    def _clone(self, index: int) -> Tensor:
        buffer, known = self.live(index), self._clones.get(index)
        if known is None or not _equal(known, buffer):
            known = self._clones[index] = buffer.clone()
        return known

    @property
    def large_bytes(self) -> int:
        """How much is looked at each time because it is too large to be copied each time."""
        return sum(self.live(index).numel() * self.live(index).element_size() for index in self._large)

    def put_back(self, copy: BufferCopy) -> None:
        """Sets every buffer to the value that it had."""
        with torch.no_grad():
            for index, value in self.parts(copy):
                buffer = self.live(index)
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    def replaced(self, copy: BufferCopy, values: dict[int, Tensor]) -> BufferCopy:
        """The same copy with other values for some buffers."""
        if not values:
            return copy
        merged = {**dict(self.parts(copy)), **values}
        flats = [
            torch.cat([merged[index].reshape(-1) for index in indices]) for indices in self._small.values()
        ]
        return BufferCopy(flats, [merged[index] for index in self._large])

    def parts(self, copy: BufferCopy) -> Iterator[tuple[int, Tensor]]:
        """(index, value) of every buffer in a copy."""
        for indices, flat in zip(self._small.values(), copy.flats, strict=True):
            yield from self._parts(indices, flat)
        yield from zip(self._large, copy.large, strict=True)

    def _parts(self, indices: list[int], flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        at = 0
        for index in indices:
            like = self.live(index)
            yield index, flat[at : at + like.numel()].view(like.shape)
            at += like.numel()

    def changed(self, one: BufferCopy, two: BufferCopy, known: set[int]) -> set[int]:
        """Buffers that differ, besides the known ones. Large ones of one process that are the same do not."""
        found: set[int] = set()
        for indices, before, after in zip(self._small.values(), one.flats, two.flats, strict=True):
            if not known.issuperset(indices) and not torch.equal(before, after):
                parts = zip(self._parts(indices, before), self._parts(indices, after), strict=True)
                found |= {index for (index, a), (_, b) in parts if not torch.equal(a, b)}
        for index, before, after in zip(self._large, one.large, two.large, strict=True):
            if (
                before is not after
                and index not in known
                and not torch.equal(before, after.to(before.device))
            ):
                found.add(index)
        return found - known

    def describe(self) -> list[str]:
        """One line for each buffer: equal on two ranks whose copies fit each other."""
        return [
            f"{name} {self.live(i).dtype} {tuple(self.live(i).shape)}" for i, name in enumerate(self.names)
        ]


@dataclass(frozen=True, slots=True)
class Kept:
    """A registered object's state at one moment: packed values, and small tensors as copies."""

    packed: bytes
    tensors: list[Tensor]  #: the live ones
    copies: list[Tensor | None]  #: None for a large one
    marks: list[tuple[int, int]]

    def large_digests(self) -> list[bytes]:
        """Of the large tensors as they are now; read anew only where a version says that one changed."""
        return [digest_of(t) for t, copy in zip(self.tensors, self.copies, strict=True) if copy is None]

    @classmethod
    def of(cls, name: str, value: Any) -> "Kept":
        """Of a state dict, say. Raises `StateError`."""
        packed, *rest = tree_entries(name, "other", value)
        assert isinstance(packed.data, bytes)
        tensors = [entry.data for entry in rest if isinstance(entry.data, Tensor)]
        copies = [
            tensor.clone() if tensor.numel() * tensor.element_size() <= SMALL_BYTES else None
            for tensor in tensors
        ]
        return cls(packed.data, tensors, copies, [_mark(tensor) for tensor in tensors])

    def same(self, other: "Kept") -> bool:
        """No value differs; large tensors are judged by identity and version."""
        return self.packed == other.packed and self.copies_equal(other) and not self.large_changed(other)

    def copies_equal(self, other: "Kept") -> bool:
        """The small tensors are equal."""
        return len(self.copies) == len(other.copies) and all(
            one is two or (one is not None and two is not None and _equal(one, two))
            for one, two in zip(self.copies, other.copies, strict=True)
        )

    def large_changed(self, other: "Kept") -> bool:
        """A large tensor is another one, or was written to."""
        pairs = zip(self.copies, self.marks, other.marks, strict=False)
        return any(copy is None and mark != now for copy, mark, now in pairs)

    def values(self) -> list[Tensor]:
        """The tensors as they were; large ones live."""
        pairs = zip(self.copies, self.tensors, strict=True)
        return [live if copy is None else copy for copy, live in pairs]

    def entries(self, name: str) -> list[Entry]:
        """As `RankState.inventory` gives them."""
        tensors = [Entry(f"{name}#{i}", "other", value) for i, value in enumerate(self.values())]
        return [Entry(name, "other", self.packed), *tensors]


#: id of a large tensor -> itself, its version and its digest then
_digests: dict[int, tuple[weakref.ref[Tensor], int, bytes]] = {}
_DIGESTS_MAX = 1024


def digest_of(tensor: Tensor) -> bytes:
    """Of a tensor's content; read anew only where its version says that it changed."""
    known = _digests.get(id(tensor))
    if known is None or known[0]() is not tensor or known[1] != tensor._version:
        if len(_digests) >= _DIGESTS_MAX:
            _digests.clear()
        content = hashlib.sha256(memory_of(local(tensor).detach().cpu().contiguous())).digest()
        known = _digests[id(tensor)] = (weakref.ref(tensor), tensor._version, content)
    return known[2]


def keep_trees(state: RankState) -> dict[str, Kept]:
    """The registered objects' states as they are now."""
    return {
        name: Kept.of(name, tree if isinstance(tree, dict) else tree.state_dict())
        for name, tree in state.trees.items()
    }


def changed_attributes(state: RankState) -> dict[str, dict[str, Any]]:
    """What training has changed of the modules' plain values."""
    return {name: its.now() for name, its in state.attributes.items()}


def _equal(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)


class Window:
    """One rank's state as the window of the step that runs began."""

    def __init__(self, state: RankState) -> None:
        self.rngs: list[Rng] = []  #: as each batch of the window was given out
        self.buffers = Buffers(state)
        self._state = state
        self._parameters = _parameters(state)
        self._copy = BufferCopy([], [])
        self._extra: list[Kept] = []
        self._trees: dict[str, Kept] = {}
        self._attributes: list[list[Any]] = []
        self._optimizers: list[Any] = []
        self._groups: list[list[dict[str, Any]]] = []
        self.ended_trees: dict[str, Kept] = {}  #: as the step before ended
        self.ended_attributes: dict[str, dict[str, Any]] = {}  #: the same, see `Attributes.changed`
        self._ended_groups: list[list[dict[str, Any]]] = []
        self._ended_versions: list[int] = []
        self._ended_optimizers: list[Any] = []
        self.trouble = ""  #: why nothing was kept as this window began
        self._ended_trouble = ""
        self._versions: list[int] = []
        self._without: list[bool] = []  #: which parameters had no gradient

    def begin(self) -> None:
        """A window begins: keeps everything. `rewind` tells what could not be read."""
        self.trouble = _trouble(self._keep)

    def ended(
        self,
        trees: dict[str, Kept] | None = None,
        attributes: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """The step ended: keeps the plain values of this boundary, at which a rank's state moves.

        The next window begins later, with the next batch: meanwhile a script may step a scheduler, say.
        `trees`, `attributes`: the registered objects' states and `changed_attributes`, where they were read
        just now.
        """
        self._ended_trouble = _trouble(lambda: self._keep_boundary(trees, attributes))

    def spoilt(self) -> str:
        """Why the step that runs cannot be repeated: it has changed what `rewind` does not put back."""
        if self.trouble:
            return self.trouble
        if [parameter._version for parameter in self._parameters] != self._versions:
            return "parameters were changed before the optimizers' step"
        if self._read_optimizers() != self._optimizers:
            return "the optimizers' state was changed before their step: do it after"
        now = keep_trees(self._state)
        for name, kept in self._trees.items():
            if kept.large_changed(now[name]):
                return f"{name} changed a large tensor before the optimizers' step: do it after"
        return ""

    def moved_on(self) -> str:
        """Why this rank's state at the end of the step before cannot be told any more; "" if it can."""
        if self._ended_trouble:
            return self._ended_trouble
        if self._ended_versions != [parameter._version for parameter in self._parameters]:
            return "parameters were changed between end_step and the next batch"
        if self._ended_optimizers != self._read_optimizers():
            return "the optimizers' state was changed between end_step and the next batch"
        for name, kept in keep_trees(self._state).items():
            if kept.large_changed(self.ended_trees[name]):
                return f"{name} changed a large tensor between end_step and the next batch"
        return ""

    def contents(self) -> list[int]:
        """Checksums of all that `rewind` does not put back, by content: reads every byte of it."""
        tensors = [*self._parameters]
        for optimizer in self._state.optimizers.values():
            tensors += [v for its in optimizer.state.values() for v in its.values() if isinstance(v, Tensor)]
        for kept in self._trees.values():
            pairs = zip(kept.tensors, kept.copies, strict=True)
            tensors += [tensor for tensor, copy in pairs if copy is None]
        return [zlib.crc32(memory_of(local(tensor).cpu().contiguous())) for tensor in tensors]

    def _keep(self) -> None:
        state = self._state
        self.rngs = [Rng.read(state.generators)]
        self._copy = self.buffers.copy()
        self._extra = [Kept.of(name, module.get_extra_state()) for name, module in self.buffers.extra]
        self._trees = keep_trees(state)
        self._attributes = [attributes.read() for attributes in state.attributes.values()]
        self._optimizers = self._read_optimizers()
        self._groups = self._read_groups()
        self._versions = [parameter._version for parameter in self._parameters]
        self._without = [parameter.grad is None for parameter in self._parameters]

    def _keep_boundary(
        self, trees: dict[str, Kept] | None, attributes: dict[str, dict[str, Any]] | None
    ) -> None:
        self._ended_versions = [parameter._version for parameter in self._parameters]
        self.ended_trees = keep_trees(self._state) if trees is None else trees
        self.ended_attributes = changed_attributes(self._state) if attributes is None else attributes
        self._ended_optimizers = self._read_optimizers()
        self._ended_groups = self._read_groups()

    @contextmanager
    def as_ended(self) -> Iterator[None]:
        """Within, the optimizers' groups have the values that they had as the step before ended.

        Raises `StateError` if something else has changed since.
        """
        if why := self.moved_on():
            raise StateError(why)
        now = self._read_groups()
        self._put_back_groups(self._ended_groups)
        try:
            yield
        finally:
            self._put_back_groups(now)

    def _read_groups(self) -> list[list[dict[str, Any]]]:
        return [_plain_groups(optimizer) for optimizer in self._state.optimizers.values()]

    def _read_optimizers(self) -> list[Any]:
        """What each parameter's state in the optimizers is, tensors by identity and version."""
        return [
            _mark(value) if isinstance(value, Tensor) else value
            for optimizer in self._state.optimizers.values()
            for its in optimizer.state.values()
            for value in its.values()
        ]

    def _put_back_groups(self, groups_of: list[list[dict[str, Any]]]) -> None:
        for optimizer, groups in zip(self._state.optimizers.values(), groups_of, strict=True):
            for group, plain in zip(optimizer.param_groups, groups, strict=True):
                _put_back_group(group, plain)

    def more(self) -> None:
        """Another batch of the same window."""
        self.rngs.append(Rng.read(self._state.generators))

    def rewind(self) -> None:
        """Puts everything back to where the window began. Raises `StateError` if that cannot be done."""
        state = self._state
        if why := self.spoilt():
            raise StateError(why)
        now = keep_trees(state)
        for name, kept in self._trees.items():
            if not kept.same(now[name]):
                _put_back_tree(name, state.trees[name], kept)
            if isinstance(scaler := state.trees[name], torch.amp.GradScaler):
                scaler._per_optimizer_states.clear()
        for attributes, values in zip(state.attributes.values(), self._attributes, strict=True):
            attributes.put_back(values)
        self._put_back_groups(self._groups)
        for parameter, without in zip(self._parameters, self._without, strict=True):
            if without:
                parameter.grad = None
            elif parameter.grad is not None:
                _clear(parameter.grad)
        self.buffers.put_back(self._copy)
        for (_, module), kept in zip(self.buffers.extra, self._extra, strict=True):
            module.set_extra_state(unpack(kept.packed, kept.values()))
        self.rngs[0].put_back()


def _trouble(read: Callable[[], None]) -> str:
    """What went wrong in reading state: also the script's own code may raise there, which ends nothing."""
    try:
        read()
    except Exception as error:
        return f"a registered object cannot say its state: {type(error).__name__}: {error}"
    return ""


def _parameters(state: RankState) -> list[Tensor]:
    """Every parameter of registered modules and optimizers, once."""
    found: dict[int, Tensor] = {}
    for module in state.modules.values():
        found |= {id(parameter): parameter for parameter in module.parameters()}
    for optimizer in state.optimizers.values():
        for group in optimizer.param_groups:
            found |= {id(parameter): parameter for parameter in group["params"]}
    return list(found.values())


def _clear(gradient: Tensor) -> None:
    """As `Optimizer.zero_grad(set_to_none=False)` does it: a view into DDP's bucket cannot be detached."""
    if gradient.grad_fn is not None:
        gradient.detach_()
    else:
        gradient.requires_grad_(False)
    gradient.zero_()


def _plain_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def _put_back_group(group: dict[str, Any], plain: dict[str, Any]) -> None:
    for key, value in plain.items():
        if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
            group[key].copy_(value)
        else:
            group[key] = value


def _put_back_tree(name: str, tree: Any, kept: Kept) -> None:
    with torch.no_grad():
        for live, copy in zip(kept.tensors, kept.copies, strict=True):
            if copy is not None and not torch.equal(live, copy):
                live.copy_(copy)
    if not isinstance(tree, dict):
        tree.load_state_dict(unpack(kept.packed, kept.tensors))
        return
    try:
        put_back(kept.packed, kept.tensors, tree, name, fill=False)
    except PackError as error:
        raise StateError(str(error)) from None
