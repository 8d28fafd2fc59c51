"""What each rank keeps of another one: the small state that no replica has, sent around before each vote.

Rank r sends to its buddy, `shift` ranks further: random states, buffers, loader position and plain values.
What was sent in the vote of step T is the sender's state at the start of step T+1, provided that what
comes after the vote does not change it. `check_tail` sees to that; where it does not hold, and until it has
been seen to hold once, what is sent says that it cannot be used. What it holds for is compared with the mark
that the rank itself wrote at the end of its last step (`fingerprint.py`).
"""

import hashlib
import logging
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from gridagent.train.context import CONTEXT
from gridagent.train.errors import SessionError
from gridagent.train.fingerprint import MarkFile, fingerprint
from gridagent.train.packing import memory_of
from gridagent.train.rng import Rng
from gridagent.train.state import Entry, RankState, StateError, tree_entries
from gridagent.train.window import BufferCopy, Buffers, Kept, changed_attributes, digest_of, keep_trees

if TYPE_CHECKING:
    from gridagent.train.session import Session

_log = logging.getLogger("gridagent.train")
_encode = msgspec.msgpack.Encoder().encode
#: Tag of these messages among a script's own; the rest of a long one comes under the next.
_TAG = 0x67726964
_HEAD_BYTES = 8
_ROOM_BYTES = 16 << 10  #: of the first message; both ends raise it in the same way

_UNSEEN = "no step has ended since it began to keep the memory"


class Part(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> "Part":
        """Reads it."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(dtype, tuple(tensor.shape), bytes(memory_of(tensor.cpu().contiguous())))

    def tensor(self) -> Tensor:
        """A tensor of its own."""
        empty = torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        memory_of(empty)[:] = self.data
        return empty


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """A registered object's state; None in the place of a large tensor, whose digest stands in `large`."""

    data: bytes
    tensors: list[Part | None] = []
    large: list[bytes] = []


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """What one rank sends to its buddy in the vote of `step`."""

    step: int
    unusable: str  #: why it must not be used; "" if it may
    tail: list[int]  #: buffers that change after the vote, so that they are not what is sent here
    layout: bytes  #: digest over the buffers' names, dtypes and shapes
    rng: bytes
    flats: list[Part]
    large: list[Part | None]  #: None: as in the letter before
    extra: list[Packed]
    trees: dict[str, Packed]
    loaders: dict[str, Packed]


_decode = msgspec.msgpack.Decoder(Letter).decode


@dataclass(frozen=True, slots=True)
class Ward:
    """The ward's state at the start of one step, and what ours was like at the same vote."""

    letter: Letter
    copy: BufferCopy
    alike: frozenset[str]  #: registered objects whose values have always equalled ours
    ours: dict[str, Kept]


@dataclass(frozen=True, slots=True)
class _Own:
    """Our own small state at a vote."""

    step: int
    rng: Rng
    buffers: BufferCopy
    extra: list[Kept]
    trees: dict[str, Kept]
    loaders: dict[str, Packed]
    drawn: bool  #: reading a loader's state drew random numbers


@dataclass(frozen=True, slots=True)
class Boundary:
    """Our own small state at the end of a step."""

    step: int  #: the one that begins there
    rng: Rng
    buffers: BufferCopy
    extra: list[Kept]
    trees: dict[str, Kept]
    loaders: dict[str, Packed]
    attributes: dict[str, dict[str, Any]]


class Keeper:
    """Writes letters about one `RankState` and keeps those that come. Sends nothing itself."""

    def __init__(self, state: RankState) -> None:
        self.buffers = Buffers(state)
        self.wards: dict[int, Ward] = {}  #: step -> the ward's state at its start
        self.tail: set[int] = set()  #: our buffers that change after the vote
        self.differing: set[int] = set()  #: buffers that were once other than the ward's
        self.unusable = _UNSEEN  #: why what we send must not be used
        self.doubtful = -1  #: the step at whose start the ward may be other than it said: we are
        self._state = state
        self._layout = hashlib.sha256("\n".join(self.buffers.describe()).encode()).digest()
        self.ended: Boundary | None = None  #: our own, where the last step ended
        self._own: _Own | None = None
        self._own_kind: set[str] = set()  #: objects that were once different on the ward: its own kind
        self._sent: list[Tensor] = []  #: large buffers as they were sent last
        self._large: list[Tensor] = []  #: the ward's

    def forget_sent(self) -> None:
        """The other ends are new: whole letters again."""
        self._sent, self._large = [], []

    def write(self, step: int) -> bytes:
        """The letter about us, in the vote of `step`. If we cannot read our state, it only says so."""
        try:
            own = self._own = self._read(step)
        except Exception as error:  # also of a registered object's own state_dict
            self._own, self._sent = None, []
            why = f"a registered object cannot say its state: {type(error).__name__}: {error}"
            return _encode(Letter(step, why, [], b"", b"", [], [], [], {}, {}))
        sent: list[Tensor | None] = [*self._sent] or [None] * len(own.buffers.large)
        letter = Letter(
            step,
            "reading a loader's state draws random numbers" if own.drawn else self.unusable,
            sorted(self.tail),
            self._layout,
            own.rng.pack(),
            [Part.of(flat) for flat in own.buffers.flats],
            [None if one is two else Part.of(one) for one, two in zip(own.buffers.large, sent, strict=True)],
            [packed(kept) for kept in own.extra],
            {name: packed(kept) for name, kept in own.trees.items()},
            own.loaders,
        )
        self._sent = own.buffers.large
        return _encode(letter)

    def take(self, step: int, data: bytes) -> None:
        """Keeps the letter of our ward as its state at the start of `step` + 1. Raises `StateError`,

        and `SessionError` if the ranks are at different steps.
        """
        try:
            letter = _decode(data)
        except msgspec.MsgspecError as error:
            raise StateError(f"the memory of another rank is damaged: {error}") from None
        if letter.step != step:
            raise SessionError(
                f"this rank is at step {step}, another one at {letter.step}: call session.end_step() equally"
                " often on every rank"
            )
        if letter.layout != self._layout:
            why = letter.unusable or "its buffers are not those of this rank"
            self._large = []
            self.wards[step + 1] = Ward(
                msgspec.structs.replace(letter, unusable=why), BufferCopy([], []), frozenset(), {}
            )
            return
        before = self._large or [torch.empty(0)] * len(letter.large)
        self._large = [
            old if part is None else part.tensor() for part, old in zip(letter.large, before, strict=True)
        ]
        copy = BufferCopy([part.tensor() for part in letter.flats], self._large)
        ours: dict[str, Kept] = {}
        if self._own is not None:
            ours = self._own.trees
            self._own_kind.update(
                name for name, kept in ours.items() if letter.trees.get(name) != packed(kept)
            )
            self.differing |= self.buffers.changed(copy, self._own.buffers, self.differing)
        self.wards[step + 1] = Ward(letter, copy, frozenset(ours.keys() - self._own_kind), ours)

    def applied(self, step: int) -> None:
        """The vote of `step` succeeded: memories of steps before it serve nobody."""
        self.wards = {at: ward for at, ward in self.wards.items() if at >= step}

    def check_tail(self, *, loaders: bool) -> None:
        """Did what came after the vote leave alone what was sent? `loaders`: look at those too."""
        own, self.ended = self._own, None
        if own is None:
            return
        at_end = read_loaders(self._state.loaders) if loaders else own.loaders
        rng, copy = Rng.read(self._state.generators), self.buffers.copy()
        trees, attributes = keep_trees(self._state), changed_attributes(self._state)
        now = Boundary(own.step + 1, rng, copy, self._read_extra(), trees, at_end, attributes)
        self.ended = now
        changed = [] if own.rng.same(now.rng) else ["random states"]
        self.tail |= self.buffers.changed(own.buffers, now.buffers, self.tail)
        if any(not kept.same(after) for kept, after in zip(own.extra, now.extra, strict=True)):
            changed.append("extra state of modules")
        if own.loaders != now.loaders:
            changed.append("a loader")
        own_kind = sorted(self._own_kind & own.trees.keys() & now.trees.keys())
        changed += [name for name in own_kind if not own.trees[name].same(now.trees[name])]
        if self.unusable == _UNSEEN:
            self.unusable = ""
        if changed:
            # The ward runs the same script. It dies perhaps before it can tell what it has seen itself.
            self.doubtful = own.step + 1
        if changed and not self.unusable:
            self.unusable = f"its script changes {' and '.join(changed)} between the vote and end_step"
            _log.warning(
                "if this rank dies, its step cannot be repeated: the script changes %s after the optimizer's"
                " step and before session.end_step(). Do that before the optimizer's step",
                " and ".join(changed),
            )

    def _read(self, step: int) -> _Own:
        rng = Rng.read(self._state.generators)
        loaders = read_loaders(self._state.loaders)
        drawn = bool(loaders) and not torch.equal(torch.get_rng_state(), rng.tensors["rng/torch"])
        if drawn:
            rng.put_back()
        extra, trees = self._read_extra(), keep_trees(self._state)
        return _Own(step, rng, self.buffers.copy(), extra, trees, loaders, drawn)

    def _read_extra(self) -> list[Kept]:
        return [Kept.of(name, module.get_extra_state()) for name, module in self.buffers.extra]

    def fingerprint(self) -> str:
        """Of our own state at the end of the step that `check_tail` looked at last; "" if it did not."""
        if (now := self.ended) is None:
            return ""
        objects = [*map(packed, now.extra), *map(packed, now.trees.values()), *now.loaders.values()]
        return self.digest(now.rng.pack(), now.buffers, [*objects, now.attributes])

    def digest(self, rng: bytes, copy: BufferCopy, objects: list[Any]) -> str:
        """Equal for equal states of two ranks. `objects`: extra states, registered objects, loaders, and what
        was changed of the modules' plain values."""
        return fingerprint(self._layout, rng, copy.flats, [*map(digest_of, copy.large), *objects])


def read_loaders(loaders: dict[str, Any]) -> dict[str, Packed]:
    """Where loaders are. Raises `StateError`, and whatever their own code raises."""
    return {
        name: _packed_entries(tree_entries(name, "other", loader.state_dict()))
        for name, loader in loaders.items()
    }


def packed(kept: Kept) -> Packed:
    """As it goes into letters and fingerprints."""
    parts = [None if copy is None else Part.of(copy) for copy in kept.copies]
    return Packed(kept.packed, parts, kept.large_digests())


def _packed_entries(entries: list[Entry]) -> Packed:
    plain, *rest = [entry.data for entry in entries]
    assert isinstance(plain, bytes)
    return Packed(plain, [Part.of(tensor) for tensor in rest if isinstance(tensor, Tensor)])


class Memory:
    """The memory of one session: sends our letter to the buddy and receives the ward's."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        self._sending: list[Any] = []
        self.keeper: Keeper | None = None
        self.shift = shift(session.world_size)
        self._group: weakref.ref[Any] | None = None  #: over which the last letter went
        self._room = [_ROOM_BYTES, _ROOM_BYTES]  #: of the message that we send, of the one that comes
        self._marks: MarkFile | None = None

    @property
    def ward(self) -> int:
        """The rank whose memory this one keeps; -1 while it has none."""
        if self.keeper is None or not self.keeper.wards:
            return -1
        return (self._session.rank - self.shift) % self._session.world_size

    def exchange(self, step: int) -> None:
        """Returns once the ward's letter is here. Raises `RuntimeError` of the group if a peer is gone.

        Whether ours has arrived does not matter to us: the buddy does not vote before.
        """
        session = self._session
        if self.keeper is None:
            self.keeper = Keeper(session.state)
        inner = dist.group.WORLD.inner  # type: ignore[union-attr]
        if self._group is None or self._group() is not inner:
            self._group = weakref.ref(inner)  # weak: whoever holds it holds its sockets
            self._room = [_ROOM_BYTES, _ROOM_BYTES]
            self.keeper.forget_sent()
        del inner
        letter = self.keeper.write(step)
        try:
            self.keeper.take(step, self._swap(letter))
        except StateError as error:
            _log.warning("rank %s: %s", session.rank, error)

    def sent(self) -> None:
        """Waits until our letter is away. Raises `RuntimeError` of the group."""
        while self._sending:
            self._sending.pop().wait()

    def let_go(self) -> None:
        """Drops what is being sent: it holds the group's sockets."""
        self._sending.clear()

    def applied(self, step: int) -> None:
        """The vote of `step` succeeded."""
        if self.keeper is not None:
            self.keeper.applied(step)

    def check_tail(self, *, loaders: bool) -> None:
        """See `Keeper`. Writes the mark of the boundary that is reached."""
        if self.keeper is None:
            return
        self.keeper.check_tail(loaders=loaders)
        if self._marks is None:
            self._marks = MarkFile(os.environ.get("GRIDAGENT_SOCKET", ""), CONTEXT.session_id)
        if self.keeper.ended is not None:
            self._marks.write(self.keeper.ended.step, self.keeper.fingerprint())

    @property
    def ended(self) -> Boundary | None:
        """The boundary that is reached, as `check_tail` has read it; None if it did not."""
        return self.keeper.ended if self.keeper is not None else None

    def close(self) -> None:
        """This process holds its rank no longer."""
        if self._marks is not None:
            self._marks.remove()

    def _swap(self, letter: bytes) -> bytes:
        """Sends `letter` to the buddy and returns the ward's. One message where the room suffices."""
        session = self._session
        buddy = (session.rank + self.shift) % session.world_size
        ward = (session.rank - self.shift) % session.world_size
        out, came = (torch.empty(_HEAD_BYTES + room, dtype=torch.uint8) for room in self._room)
        first = letter[: self._room[0]]
        memory_of(out)[: _HEAD_BYTES + len(first)] = len(letter).to_bytes(_HEAD_BYTES, "little") + first
        self._pass(out, buddy, came, ward, _TAG)
        size = int.from_bytes(memory_of(came)[:_HEAD_BYTES], "little")
        data = bytes(memory_of(came)[_HEAD_BYTES : _HEAD_BYTES + size])
        more = [max(0, total - room) for total, room in zip((len(letter), size), self._room, strict=True)]
        if any(more):
            out, came = (torch.empty(count, dtype=torch.uint8) for count in more)
            memory_of(out)[:] = letter[self._room[0] :]
            self._pass(out, buddy, came, ward, _TAG + 1)
            data += bytes(memory_of(came))
        self._room = [
            max(room, 1 << (total - 1).bit_length())
            for room, total in zip(self._room, (len(letter), size), strict=True)
        ]
        return data

    def _pass(self, out: Tensor, buddy: int, came: Tensor, ward: int, tag: int) -> None:
        """Begins to send, and receives, where there is something to send and to receive."""
        inner = cast(Any, dist.group.WORLD).inner
        work = inner.recv([came], ward, tag) if came.numel() else None
        if out.numel():
            self._sending.append(inner.send([out], buddy, tag))
        if work is not None:
            work.wait()


def shift(world_size: int) -> int:
    """By how many ranks a buddy is further: on another node, where the ranks are spread evenly."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return on_node if 0 < on_node < world_size and world_size % on_node == 0 else 1
