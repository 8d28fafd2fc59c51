"""How a loader that is opened anew goes on: tried by a spare, whatever the loader's own code does."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from gridagent.train.feeding import Feeds
from gridagent.train.state import RankState


class Plain:
    """Batches by number. What a subclass does beside is what is tried."""

    last = 10

    def __init__(self) -> None:
        self.at = 0

    def batch(self) -> Any:
        return torch.tensor([float(self.at)])

    def opened(self) -> None:
        """As the first batch is fetched."""

    def __iter__(self) -> Iterator[Any]:
        self.opened()
        while self.at < self.last:
            self.at += 1
            yield self.batch()
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Late(Plain):
    """Draws when it is opened, as torch's DataLoader within a generator does."""

    def opened(self) -> None:
        torch.empty((), dtype=torch.int64).random_()


class Noise(Plain):
    """Draws for each batch, here and there."""

    def batch(self) -> Any:
        return {"x": torch.randn(2) + self.at, "y": [random.random()]}


class LateNoise(Noise, Late):
    """Nobody can tell the draws of opening from those of a batch."""


class Early(Plain):
    """Draws before it is read."""

    def __iter__(self) -> Iterator[Any]:
        torch.randn(3)
        return super().__iter__()


class Itself(Plain):
    """Its own iterator."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.at == self.last:
            raise StopIteration
        self.at += 1
        return self.batch()


class OneOff(Plain):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] - 1


class Forgets(Plain):
    """Shuffles by a generator of which its state_dict does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def batch(self) -> Any:
        return torch.randint(1_000_000, (2,), generator=self.own)


class Refuses(Plain):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("of another version")


@dataclass
class Sample:
    x: torch.Tensor
    name: str


class Objects(Plain):
    def batch(self) -> Any:
        return Sample(torch.full((2,), float("nan")), f"sample {self.at}")


class Opaque(Plain):
    def batch(self) -> Any:
        return object()


def stateful(**options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(list(torch.arange(40.0)), batch_size=4, num_workers=0, **options)


def read(loader: Any, steps: int = 3, **generators: torch.Generator) -> tuple[Feeds, RankState]:
    """A script that has read so many batches."""
    state = RankState()
    state.register("loader", loader)
    for name, generator in generators.items():
        state.register(name, generator)
    feeds = Feeds(state)
    feed = feeds.open(loader)
    for _ in range(steps):
        feed.next()
    return feeds, state


@pytest.mark.parametrize(
    ("kind", "late"),
    [(Plain, False), (Late, True), (Noise, False), (Early, False), (Itself, False), (Objects, False)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_that_goes_on_alike(kind: type[Plain], late: bool) -> None:
    feeds, _ = read(kind())
    assert feeds.rehearse()
    assert not feeds.blockers()
    assert feeds._open[0].draws_late is late


@pytest.mark.parametrize("shuffle", [False, True])
def test_torchdata_goes_on_alike(shuffle: bool) -> None:
    feeds, _ = read(stateful(shuffle=shuffle))
    assert feeds.rehearse()
    assert not feeds.blockers()


def test_a_generator_that_has_given_the_order_cannot_give_it_again() -> None:
    """It stands elsewhere by now, registered or not."""
    generator = torch.Generator().manual_seed(5)
    feeds, _ = read(stateful(sampler=RandomSampler(range(40), generator=generator)), order=generator)
    feeds.rehearse()
    assert [code for code, _, _ in feeds.blockers()] == ["loader-reopened"]


@pytest.mark.parametrize("kind", [LateNoise, OneOff, Forgets, Opaque])
def test_one_that_would_read_another_batch_is_told(kind: type[Plain]) -> None:
    feeds, _ = read(kind())
    feeds.rehearse()
    ((code, text, fatal),) = feeds.blockers()
    assert (code, fatal) == ("loader-reopened", False)
    assert text.startswith("loader, opened anew on its own state_dict, gives ")


def test_one_that_cannot_be_opened_is_told_before_anything_begins() -> None:
    feeds, _ = read(Refuses())
    feeds.rehearse()
    ((code, text, fatal),) = feeds.blockers()
    assert (code, fatal) == ("loader-reopened", True)
    assert text == "loader cannot be opened anew: ValueError: of another version"


@pytest.mark.parametrize("kind", [Plain, Late, Itself])
def test_at_its_end_it_is_tried_once_more(kind: type[Plain]) -> None:
    feeds, _ = read(kind(), kind.last)
    assert not feeds.rehearse()
    assert not feeds.blockers()


@pytest.mark.parametrize("kind", [Plain, Late, Noise, Early, Itself])
def test_the_next_batch_is_that_of_the_one_who_reads_on(kind: type[Plain]) -> None:
    """As in a hand-over: the state, the loaders opened anew, the random states last."""
    torch.manual_seed(1)
    random.seed(1)
    there, at_source = read(kind(), 6)
    sent = {entry.name: entry for entry in at_source.inventory()}
    sent = {name: type(e)(name, e.category, e.data if isinstance(e.data, bytes) else e.data.clone())
            for name, e in sent.items()}  # fmt: skip
    expected, drawn = there._open[0].next(), torch.rand(1)

    here, state = read(kind(), 3)
    here.rehearse()
    state.apply(sent)
    here.reopen()
    state.apply_rng(sent)
    assert str(here._open[0].next()) == str(expected)
    assert torch.equal(torch.rand(1), drawn)


def test_each_loader_goes_on_by_itself() -> None:
    state = RankState()
    first, second = Plain(), Late()
    state.register("loader", first)
    state.register("more", second)
    feeds = Feeds(state)
    reading = [feeds.open(second), feeds.open(first)]
    second.load_state_dict({"at": 6})
    first.load_state_dict({"at": 2})
    feeds.reopen()
    assert [feed.next().item() for feed in reading] == [7.0, 3.0]


def test_what_is_read_beside_is_told() -> None:
    state = RankState()
    loader = Plain()
    state.register("loader", loader)
    feeds = Feeds(state)
    feeds.close(feeds.open(enumerate(loader)))
    found = {code: (text, fatal) for code, text, fatal in feeds.blockers()}
    assert found.keys() == {"unregistered-loader", "loader-beside"}
    assert found["unregistered-loader"][1] is True
    assert "reads something of the kind enumerate that is not registered" in found["unregistered-loader"][0]
    assert found["loader-beside"][1] is False


def test_a_loader_within_a_generator_draws_late() -> None:
    class Wrapped(Plain):
        def __iter__(self) -> Iterator[Any]:
            for index, batch in enumerate(DataLoader(list(torch.arange(40.0)), 4)):
                if index < self.at:
                    continue
                self.at += 1
                yield batch
            self.at = 0

    feeds, _ = read(Wrapped())
    assert feeds.rehearse()
    assert feeds._open[0].draws_late
