"""The state of a rank that died, put together by a replica that holds the memory of it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gridagent.train.memory import Keeper, Packed, Ward
from gridagent.train.rng import entries_of
from gridagent.train.state import Entry, RankState, StateError
from gridagent.train.window import Kept, Window

if TYPE_CHECKING:
    from gridagent.train.session import Session


def deputy_state(session: "Session", step: int) -> tuple[list[Entry], Callable[[], list[Entry]]]:
    """The whole state of this rank's ward at the start of `step`, for `transfer.send_state`.

    Returns (entries, a reader of the random states among them). Call it in the training thread, at the
    boundary before `step` or in the void step `step`, which can then only be repeated. Raises `StateError`.
    """
    attempts = session.attempts
    window, keeper = attempts.window, attempts.memory.keeper
    whose = (session.rank - attempts.memory.shift) % session.world_size
    ward = keeper.wards.get(step) if keeper is not None else None
    if keeper is None or ward is None:
        raise StateError(
            f"rank {session.rank} holds no memory of rank {whose} for step {step}: the first is sent in the"
            " first vote after the start"
        )
    if step != session.step:
        raise StateError(f"rank {session.rank} is at step {session.step} and cannot tell the state of {step}")
    try:
        if attempts.void:
            attempts.rewind()
        return assemble(session.state, window, keeper, ward)
    except StateError as error:
        raise StateError(f"rank {whose} at step {step}: {error}") from None


def assemble(
    state: RankState, window: Window, keeper: Keeper, ward: Ward
) -> tuple[list[Entry], Callable[[], list[Entry]]]:
    """See `deputy_state`; `state` is a replica at the same step, its step before ended as in `window`."""
    letter = ward.letter
    if letter.unusable:
        raise StateError(f"the memory of it cannot be used: {letter.unusable}")
    if keeper.doubtful == letter.step + 1:
        raise StateError(
            f"the memory of it cannot be used: in step {letter.step} the script changed random states"
            " or a loader between the vote and end_step, here at least"
        )
    values = {keeper.buffers.names[i]: value for i, value in keeper.buffers.parts(ward.copy)}
    for index in keeper.tail.union(letter.tail):
        name = keeper.buffers.names[index]
        if index in keeper.differing:
            raise StateError(f"{name} is rank-local and changed after the vote: it cannot be recovered")
        values[name] = keeper.buffers.live(index)
    entries: list[Entry] = []
    with window.as_ended():
        for entry in state.inventory(loaders=False):
            if entry.category in ("parameters", "optimizer"):
                entries.append(entry)
            elif entry.name in values:
                entries.append(Entry(entry.name, "buffers", values[entry.name]))
    for (name, _), packed in zip(keeper.buffers.extra, letter.extra, strict=True):
        entries += _unpacked(name, "buffers", packed)
    for name in state.trees:
        entries += _tree(name, ward, window.ended_trees[name])
    for name in state.loaders:
        entries += _unpacked(name, "other", letter.loaders[name])
    rng = entries_of(letter.rng)
    return [*entries, *rng], lambda: rng


def _tree(name: str, ward: Ward, now: Kept) -> list[Entry]:
    """A registered object of the ward: ours where it is replicated, else what the ward had at the vote."""
    if name in ward.alike:
        return now.entries(name)
    ours = ward.ours.get(name)
    if ours is None or not ours.same(now):
        raise StateError(f"{name} is rank-local and changed after the vote: it cannot be recovered")
    return _unpacked(name, "other", ward.letter.trees[name])


def _unpacked(name: str, category: str, packed: Packed) -> list[Entry]:
    entries = [Entry(name, category, packed.data)]
    for i, part in enumerate(packed.tensors):
        if part is None:
            raise StateError(f"{name} is rank-local and holds a large tensor: it cannot be recovered")
        entries.append(Entry(f"{name}#{i}", category, part.tensor()))
    return entries
