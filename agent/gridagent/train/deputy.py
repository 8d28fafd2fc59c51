"""A rank's state at the start of a void step: a dead one's, from a replica's memory of it, or our own."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from gridagent.train.memory import Boundary, Keeper, Packed, Ward, packed
from gridagent.train.rng import Rng
from gridagent.train.state import Entry, RankState, StateError, attribute_entries, rng_entries_of
from gridagent.train.window import Kept, Window

if TYPE_CHECKING:
    from gridagent.train.session import Session

_CALLED_BEFORE = (
    "the script used collectives between the end of the step before and this one's batch, which a new process"
    " would call alone"
)


def deputy_state(
    session: "Session", step: int, mark: str = ""
) -> tuple[list[Entry], Callable[[], list[Entry]]]:
    """The whole state of this rank's ward at the start of `step`, for `transfer.send_state`.

    Returns (entries, a reader of the random states among them). Call it in the training thread, at the
    boundary before `step` or in the void step `step`, which can then only be repeated. `mark`: what the dead
    process wrote down last ("STEP DIGEST"), "" where nobody knows. Raises `StateError`, also if that is of
    this step and of another state.
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
        if attempts.void and attempts.calls_before > 0:
            raise StateError(_CALLED_BEFORE)
        if attempts.void:
            attempts.rewind()
        put_together = assemble(session.state, window, keeper, ward)
        if digest_at(mark, step) not in ("", ward_digest(window, keeper, ward)):
            raise StateError(
                "what is known of it here is not what it had: after its last vote the script changed"
                " there what it did not change here"
            )
        return put_together
    except StateError as error:
        raise StateError(f"rank {whose} at step {step}: {error}") from None


def objection(session: "Session") -> str:
    """Why this rank, which stands, cannot speak for its ward, as far as that is known now; "" if it may."""
    attempts = session.attempts
    keeper = attempts.memory.keeper
    ward = keeper.wards.get(session.step) if keeper is not None else None
    if ward is None:
        return ""  # it is not asked for
    if why := attempts.spoilt() or attempts.window.moved_on():
        return why
    if attempts.calls_before > 0:
        return _CALLED_BEFORE
    return ward.letter.unusable and f"the memory of it cannot be used: {ward.letter.unusable}"


def digest_at(mark: str, step: int) -> str:
    """The digest in a mark, if it is of the start of `step`; else ""."""
    at, _, digest = mark.partition(" ")
    return digest.strip() if at == str(step) else ""


def ward_digest(window: Window, keeper: Keeper, ward: Ward) -> str:
    """The fingerprint of what `assemble` makes of a ward."""
    letter, live = ward.letter, {}
    for index in keeper.tail.union(letter.tail):
        live[index] = keeper.buffers.live(index)
    trees = [
        packed(window.ended_trees[name]) if name in ward.alike else letter.trees[name]
        for name in window.ended_trees
    ]
    objects = [*letter.extra, *trees, *letter.loaders.values(), window.ended_attributes]
    return keeper.digest(letter.rng, keeper.buffers.replaced(ward.copy, live), objects)


def own_state(session: "Session", step: int) -> tuple[list[Entry], Callable[[], list[Entry]]]:
    """This rank's own state at the start of the void step `step`, which can then only be repeated.

    In a void step the live objects do not tell it, even after `rewind`: the loader has given out the
    window's batches. As `deputy_state`.
    """
    attempts = session.attempts
    keeper = attempts.memory.keeper
    if keeper is None or keeper.ended is None or keeper.ended.step != step:
        raise StateError(f"rank {session.rank} did not keep its state at the start of step {step}")
    attempts.rewind()
    return of_boundary(session.state, attempts.window, keeper, keeper.ended)


def of_boundary(
    state: RankState, window: Window, keeper: Keeper, ended: Boundary
) -> tuple[list[Entry], Callable[[], list[Entry]]]:
    """See `own_state`; `state` has been put back to where the window began."""
    values = {keeper.buffers.names[i]: value for i, value in keeper.buffers.parts(ended.buffers)}
    entries = _replica(state, window, values)
    for (name, _), kept in zip(keeper.buffers.extra, ended.extra, strict=True):
        entries += [replace(entry, category="buffers") for entry in kept.entries(name)]
    entries += _attributes(window)
    for name in state.trees:
        entries += window.ended_trees[name].entries(name)
    for name in state.loaders:
        entries += _unpacked(name, "other", ended.loaders[name])
    rng = rng_entries_of(ended.rng)
    return [*entries, *rng], lambda: rng


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
    entries = _replica(state, window, values)
    for (name, _), extra in zip(keeper.buffers.extra, letter.extra, strict=True):
        entries += _unpacked(name, "buffers", extra)
    entries += _attributes(window)
    for name in state.trees:
        entries += _tree(name, ward, window.ended_trees[name])
    for name in state.loaders:
        entries += _unpacked(name, "other", letter.loaders[name])
    rng = entries_of(letter.rng)
    return [*entries, *rng], lambda: rng


def _replica(state: RankState, window: Window, buffers: dict[str, Tensor]) -> list[Entry]:
    """Parameters and optimizer as they are here, with these buffers."""
    entries: list[Entry] = []
    with window.as_ended():
        for entry in state.inventory(loaders=False):
            if entry.category in ("parameters", "optimizer"):
                entries.append(entry)
            elif entry.name in buffers:
                entries.append(Entry(entry.name, "buffers", buffers[entry.name]))
    return entries


def _attributes(window: Window) -> list[Entry]:
    """The modules' plain values as they are here: of a dead rank the mark says whether they were the same."""
    return [e for name, its in window.ended_attributes.items() for e in attribute_entries(name, its)]


def _tree(name: str, ward: Ward, now: Kept) -> list[Entry]:
    """A registered object of the ward: ours where it is replicated, else what the ward had at the vote."""
    if name in ward.alike:
        return now.entries(name)
    ours = ward.ours.get(name)
    if ours is None or not ours.same(now):
        raise StateError(f"{name} is rank-local and changed after the vote: it cannot be recovered")
    return _unpacked(name, "other", ward.letter.trees[name])


def entries_of(packed: bytes) -> list[Entry]:
    """What `RankState.rng_entries` would have given where this was packed. Raises `StateError`."""
    try:
        return rng_entries_of(Rng.unpack(packed))
    except msgspec.MsgspecError as error:
        raise StateError(f"packed random states are damaged: {error}") from None


def _unpacked(name: str, category: str, packed: Packed) -> list[Entry]:
    entries = [Entry(name, category, packed.data)]
    for i, part in enumerate(packed.tensors):
        if part is None:
            raise StateError(f"{name} is rank-local and holds a large tensor: it cannot be recovered")
        entries.append(Entry(f"{name}#{i}", category, part.tensor()))
    return entries
