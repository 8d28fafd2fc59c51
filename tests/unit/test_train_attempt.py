"""The parts of a repeatable step by themselves: random states, window, memory, the deputy's state."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gridagent.train.deputy import assemble, entries_of, of_boundary
from gridagent.train.errors import SessionError
from gridagent.train.memory import Keeper, shift
from gridagent.train.rng import Rng
from gridagent.train.state import Entry, RankState, StateError, digests
from gridagent.train.tolerance import called_by_script, fill
from gridagent.train.window import Window


class Loader:
    """A position, and no batches."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        return iter(())

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Extra(nn.Module):
    """State of its own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "tensor": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Rank:
    """One of two replicas in this process: equal parameters and optimizer, the rest its own."""

    def __init__(self, number: int) -> None:
        self.number = number
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), Extra(), nn.Linear(9, 2))
        self.model[0].register_buffer("mask", torch.full((200, 200), float(number)))
        del self.model[2]  # an extra state needs no forward
        self.model.add_module("extra", Extra())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.own: dict[str, Any] = {"rank": number, "small": torch.full((3,), float(number))}
        self.noise = torch.Generator().manual_seed(number)
        self.loader = Loader()
        self.state = RankState()
        objects = {
            "model": self.model, "opt": self.optimizer, "schedule": self.schedule, "own": self.own,
            "noise": self.noise, "loader": self.loader,
        }  # fmt: skip
        for name, value in objects.items():
            self.state.register(name, value)
        self.window = Window(self.state)
        self.keeper = Keeper(self.state)

    def forward_backward(self, step: int) -> None:
        """Gradients are equal on both ranks, all else differs."""
        self.loader.at += 1
        self.model[1](torch.randn(8, 9, generator=self.noise))
        self.model.get_submodule("extra").seen += 1 + self.number
        generator = torch.Generator().manual_seed(step)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    def tail(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.keeper.check_tail(loaders=True)
        self.window.ended()


def step_of(ward: Rank, deputy: Rank, step: int, tail: Callable[[], None] = lambda: None) -> Rng:
    """Both do a step; the ward's letter goes to its deputy. Returns the ward's random states at the vote."""
    for rank in (ward, deputy):
        rank.window.begin()
        rank.forward_backward(step)
    torch.manual_seed(step)
    random.seed(step)
    rng = Rng.read(ward.state.generators)
    letter = ward.keeper.write(step)
    torch.manual_seed(99)
    own = Rng.read(deputy.state.generators)
    deputy.keeper.write(step)
    deputy.keeper.take(step, letter)
    deputy.keeper.applied(step)
    own.put_back()
    deputy.tail()
    rng.put_back()
    tail()
    ward.tail()
    return rng


def assembled(deputy: Rank, step: int) -> list[Entry]:
    entries, live_rng = assemble(deputy.state, deputy.window, deputy.keeper, deputy.keeper.wards[step])
    assert digests(live_rng())["rng"] == digests(entries)["rng"]
    return entries


def test_a_deputy_tells_the_state_of_its_ward_to_the_last_name_and_bit() -> None:
    ward, deputy = Rank(0), Rank(1)
    for step in range(4):
        rng = step_of(ward, deputy, step)
        if step == 0:
            continue
        entries = assembled(deputy, step + 1)
        rng.put_back()
        truth = ward.state.inventory()
        assert sorted(e.name for e in entries) == sorted(e.name for e in truth)
        assert digests(entries) == digests(truth)
        assert digests(entries)["buffers"] != digests(deputy.state.inventory())["buffers"]


def test_also_in_the_middle_of_a_void_step_and_after_the_script_has_stepped_its_schedule() -> None:
    """The next window has begun, after an epoch's end: the ward's target will do that once more."""
    ward, deputy = Rank(0), Rank(1)
    for step in range(3):
        rng = step_of(ward, deputy, step)
    rng.put_back()
    truth = digests(ward.state.inventory())
    deputy.schedule.step()
    rate = deputy.optimizer.param_groups[0]["lr"]
    deputy.window.begin()
    deputy.forward_backward(3)
    deputy.own["rank"] = 77
    deputy.window.rewind()
    assert digests(assembled(deputy, 3)) == truth
    assert deputy.optimizer.param_groups[0]["lr"] == rate


def test_a_rank_tells_its_own_state_in_the_middle_of_a_void_step() -> None:
    """Whatever its tail changes, and although its loader has gone on."""
    rank, other = Rank(0), Rank(1)

    def tail() -> None:
        torch.randn(1)
        rank.model[1].running_mean.add_(1)
        rank.own["best"] = 3

    for step in range(2):
        step_of(rank, other, step, tail)
    truth = rank.state.inventory()
    wanted = digests(truth)
    rank.schedule.step()
    rank.window.begin()
    rank.forward_backward(2)
    rank.window.rewind()
    assert rank.keeper.ended is not None
    entries, _ = of_boundary(rank.state, rank.window, rank.keeper, rank.keeper.ended)
    assert sorted(e.name for e in entries) == sorted(e.name for e in truth)
    assert digests(entries) == wanted


def test_until_a_step_has_ended_the_memory_cannot_be_used() -> None:
    ward, deputy = Rank(0), Rank(1)
    step_of(ward, deputy, 0)
    with pytest.raises(StateError, match="no step has ended"):
        assembled(deputy, 1)
    step_of(ward, deputy, 1)
    assert deputy.keeper.wards.keys() == {1, 2}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda rank: torch.randn(1), "random states"),
        (lambda rank: random.random(), "random states"),
        (lambda rank: np.random.rand(), "random states"),
        (lambda rank: torch.randn(1, generator=rank.noise), "random states"),
        (lambda rank: setattr(rank.loader, "at", 9), "a loader"),
        (lambda rank: setattr(rank.model.get_submodule("extra"), "seen", 9), "extra state"),
    ],
)
def test_a_tail_that_changes_what_was_sent_is_named(change: Callable[[Rank], Any], named: str) -> None:
    ward, deputy = Rank(0), Rank(1)
    for step in range(2):
        step_of(ward, deputy, step, lambda: change(ward))
    with pytest.raises(StateError, match=f"changes {named}.* between the vote and end_step"):
        assembled(deputy, 2)


@pytest.mark.parametrize("name", ["model/0.mask", "model/1.running_mean"])
def test_a_buffer_that_is_rank_local_and_changes_in_the_tail_cannot_be_recovered(name: str) -> None:
    ward, deputy = Rank(0), Rank(1)

    def tail() -> None:
        for rank in (ward, deputy):
            rank.keeper.buffers.live(rank.keeper.buffers.names.index(name)).add_(1)

    for step in range(2):
        step_of(ward, deputy, step, tail)
    with pytest.raises(StateError, match=f"{name} is rank-local and changed after the vote"):
        assembled(deputy, 2)


def test_a_buffer_that_all_change_alike_in_the_tail_is_the_deputys() -> None:
    """The counter of an exponential moving average, say."""
    ward, deputy = Rank(0), Rank(1)

    def tail() -> None:
        for rank in (ward, deputy):
            rank.model[1].num_batches_tracked.add_(1)

    for step in range(3):
        rng = step_of(ward, deputy, step, tail)
    rng.put_back()
    assert digests(assembled(deputy, 3)) == digests(ward.state.inventory())


def test_parameters_that_change_between_a_steps_end_and_the_next_batch_are_named() -> None:
    """The ward's target would change them once more."""
    ward, deputy = Rank(0), Rank(1)
    for step in range(2):
        step_of(ward, deputy, step)
    nn.init.zeros_(deputy.model[0].weight)
    with pytest.raises(StateError, match="parameters were changed between end_step and the next batch"):
        assembled(deputy, 2)


def test_a_tail_that_changes_something_now_and_then_is_seen_by_the_deputy_in_itself() -> None:
    """The ward says so with its next letter only, and may die before."""
    ward, deputy = Rank(0), Rank(1)
    for step in range(3):
        step_of(ward, deputy, step)
    step_of(ward, deputy, 3, lambda: torch.randn(1, generator=deputy.noise))
    deputy.keeper.check_tail(loaders=True)
    with pytest.raises(StateError, match="in step 3 the script changed"):
        assembled(deputy, 4)
    step_of(ward, deputy, 4)
    assembled(deputy, 5)


def test_what_is_rank_local_and_changes_in_the_tail_cannot_be_recovered() -> None:
    ward, deputy = Rank(0), Rank(1)

    def tail() -> None:
        for rank in (ward, deputy):
            rank.own["best"] = rank.number

    for step in range(2):
        step_of(ward, deputy, step, tail)
    assembled(deputy, 2)
    deputy.own["best"] = 5
    deputy.window.ended()
    with pytest.raises(StateError, match="own is rank-local and changed after the vote"):
        assembled(deputy, 2)


def test_other_buffers_on_the_ward_are_named() -> None:
    ward, deputy = Rank(0), Rank(1)
    ward.model[0].register_buffer("more", torch.ones(2))
    ward.keeper = Keeper(ward.state)
    ward.keeper.unusable = ""
    step_of(ward, deputy, 0)
    with pytest.raises(StateError, match="its buffers are not those of this rank"):
        assembled(deputy, 1)


def test_large_buffers_travel_only_when_they_change() -> None:
    ward, deputy = Rank(0), Rank(1)
    sizes = []
    for step in range(4):
        if step == 2:
            ward.model[0].mask.add_(1)
        for rank in (ward, deputy):
            rank.window.begin()
        letter = ward.keeper.write(step)
        deputy.keeper.write(step)
        deputy.keeper.take(step, letter)
        sizes.append(len(letter) > 160_000)
    assert sizes == [True, False, True, False]
    names = deputy.keeper.buffers.names
    kept = dict(deputy.keeper.buffers.parts(deputy.keeper.wards[4].copy))
    assert torch.equal(kept[names.index("model/0.mask")], ward.model[0].mask)


def test_an_object_that_cannot_say_its_state_ends_no_training() -> None:
    ward, deputy = Rank(0), Rank(1)
    for step in range(3):
        if step == 1:
            ward.own["odd"] = {1, 2}
        step_of(ward, deputy, step)
    with pytest.raises(StateError, match=r"cannot say its state: StateError: own\.odd: set cannot be moved"):
        assembled(deputy, 3)
    with pytest.raises(StateError, match="cannot say its state"):
        ward.window.rewind()
    del ward.own["odd"]
    rng = step_of(ward, deputy, 3)
    rng.put_back()
    assert digests(assembled(deputy, 4)) == digests(ward.state.inventory())


def test_a_damaged_letter_is_refused() -> None:
    rank = Rank(0)
    letter = rank.keeper.write(3)
    with pytest.raises(StateError, match="damaged"):
        rank.keeper.take(3, letter[:-5])
    with pytest.raises(SessionError, match="this rank is at step 4, another one at 3"):
        rank.keeper.take(4, letter)


# ------------------------------------------------------------------------------------------ the window


def test_a_window_comes_back_whole() -> None:
    rank = Rank(0)
    rank.forward_backward(0)
    rank.tail()
    before = digests(rank.state.inventory())
    rank.window.begin()
    rank.forward_backward(1)
    rank.own["rank"], rank.own["new"] = 5, [1]
    rank.own["small"].add_(1)
    rank.loader.at -= 1  # a loader is not put back: its batches are kept
    rank.optimizer.param_groups[0]["lr"] = 0.3
    torch.randn(3), random.random(), np.random.rand()
    assert digests(rank.state.inventory()) != before
    rank.window.rewind()
    assert digests(rank.state.inventory()) == before
    assert all(parameter.grad is None for parameter in rank.model.parameters())


def test_gradients_that_were_there_are_zeros_again() -> None:
    rank = Rank(0)
    rank.forward_backward(0)
    rank.optimizer.zero_grad(set_to_none=False)
    rank.window.begin()
    rank.forward_backward(1)
    rank.window.rewind()
    assert all(parameter.grad is not None for parameter in rank.model.parameters())
    assert not any(bool(parameter.grad.any()) for parameter in rank.model.parameters())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda rank: nn.init.zeros_(rank.model[0].weight), "parameters were changed"),
        (lambda rank: rank.own["large"].add_(1), "own changed a large tensor"),
        (lambda rank: rank.own.update(large=torch.ones(200, 200)), "own changed a large tensor"),
    ],
)
def test_what_cannot_be_put_back_is_named(change: Callable[[Rank], Any], named: str) -> None:
    rank = Rank(0)
    rank.own["large"] = torch.zeros(200, 200)
    rank.window.begin()
    change(rank)
    with pytest.raises(StateError, match=named):
        rank.window.rewind()


def test_a_scaler_may_unscale_again() -> None:
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    state = RankState()
    for name, value in (("model", model), ("opt", optimizer), ("scaler", scaler)):
        state.register(name, value)
    window = Window(state)
    for _ in range(2):
        window.begin()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.unscale_(optimizer)
        window.rewind()


# ----------------------------------------------------------------------------------------- random states


@given(st.integers(0, 1000), st.integers(0, 5), st.booleans())
def test_random_states_come_back_and_travel(seed: int, draws: int, gauss: bool) -> None:
    state = RankState()
    state.register("noise", torch.Generator().manual_seed(seed))
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    if gauss:
        random.gauss(), np.random.standard_normal()
    rng = Rng.read(state.generators)
    assert rng.same(Rng.read(state.generators))
    told = state.rng_entries()
    assert digests(entries_of(rng.pack())) == digests(told)
    assert [entry.name for entry in entries_of(rng.pack())] == [entry.name for entry in told]
    for _ in range(draws):
        torch.randn(1), random.random(), np.random.rand(), torch.randn(1, generator=state.generators["noise"])
    assert rng.same(Rng.read(state.generators)) == (draws == 0)
    rng.put_back()
    assert digests(state.rng_entries()) == digests(told)


def test_packed_random_states_that_are_damaged_are_refused() -> None:
    with pytest.raises(StateError, match="damaged"):
        entries_of(Rng.read({}).pack()[:-1])


# --------------------------------------------------------------------------------------------- tolerance


def _caller(path: str) -> Callable[[Callable[[], Any]], Any]:
    """A function that calls, compiled as if it stood in `path`."""
    names: dict[str, Any] = {}
    exec(compile("def call(function):\n    return function()", path, "exec"), names)
    call: Callable[[Callable[[], Any]], Any] = names["call"]
    return call


@pytest.mark.parametrize("inside", ["nn/parallel/distributed.py", "autograd/graph.py"])
def test_who_called_is_told_by_the_frames(inside: str) -> None:
    import sys

    torch_at = Path(torch.__file__).parent
    collective = _caller(str(torch_at / "distributed" / "distributed_c10d.py"))
    machinery = _caller(str(torch_at / inside))

    def look() -> bool:
        return called_by_script(sys._getframe())

    assert look()
    assert collective(look)
    assert not machinery(lambda: collective(look))


def test_what_no_peer_sent_is_zeros_and_what_we_had_stays() -> None:
    ours, outputs = torch.ones(2), [torch.ones(2), torch.ones(2)]
    fill("allreduce", ([ours],))
    fill("broadcast", ([ours],))
    assert bool(ours.all())
    fill("allgather", ([outputs], [ours]))
    fill("_allgather_base", (whole := torch.ones(4), ours))
    assert not any(bool(t.any()) for t in (*outputs, whole))
    assert bool(ours.all())


@pytest.mark.parametrize(
    ("on_node", "world", "expected"), [("", 4, 1), ("2", 4, 2), ("4", 4, 1), ("3", 4, 1), ("1", 4, 1)]
)
def test_a_buddy_is_on_another_node_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch, on_node: str, world: int, expected: int
) -> None:
    monkeypatch.setitem(os.environ, "LOCAL_WORLD_SIZE", on_node)
    assert shift(world) == expected
