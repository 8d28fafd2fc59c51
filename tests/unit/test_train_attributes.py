"""What training changes on modules and optimizers: plain values move, all else that has changed is told."""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gridagent.train.attributes import Attributes
from gridagent.train.fingerprint import fingerprint
from gridagent.train.state import RankState


class Part(nn.Module):
    def __init__(self, device: int) -> None:
        super().__init__()
        self.device, self.rate, self.mode, self._private = device, 0.5, "warm", 0


def model(device: int = 0) -> Any:
    return nn.Sequential(Part(device), nn.Dropout(0.1))


def test_what_has_changed_moves_and_what_belongs_to_the_place_stays() -> None:
    source, target = model(device=0), model(device=3)
    ours, theirs = Attributes(source), Attributes(target)
    source[0].rate, source[0].mode, source[1].p, source[0].calls = 0.25, "hot", 0.05, 7
    source[0].eval()
    target[1].inplace, target[0].stray = True, 1  # its warm-up did that
    theirs.put(ours.now())
    assert (target[0].rate, target[0].mode, target[1].p, target[0].calls) == (0.25, "hot", 0.05, 7)
    assert (target[0].device, target[1].inplace, target[0].training, target[1].training) == (
        3, False, False, True
    )  # fmt: skip
    assert not hasattr(target[0], "stray")
    assert theirs.now() == ours.now()


def test_what_came_in_a_void_step_is_taken_away_again() -> None:
    module = model()
    attributes = Attributes(module)
    module[0].seen = 1
    kept = attributes.read()
    module[0].seen, module[0].new, module[1].p = 2, 3, 0.0
    attributes.put_back(kept)
    assert (module[0].seen, module[1].p, hasattr(module[0], "new")) == (1, 0.1, False)
    del module[0].seen
    attributes.put_back(kept)
    assert module[0].seen == 1


def test_a_part_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError):
        Attributes(model()).put({"9.rate": 1.0})


PLAIN = st.one_of(
    st.booleans(), st.integers(-3, 3), st.floats(), st.sampled_from(["a", "b"]), st.none(),
    st.builds(np.float32, st.floats(width=32)), st.builds(np.int64, st.integers(-3, 3)),
)  # fmt: skip
NAMES = ("rate", "mode", "later", "more", "_private", "_late")
CHANGES = st.lists(st.tuples(st.sampled_from(NAMES), PLAIN), max_size=6)


@given(CHANGES, CHANGES)
def test_the_target_is_what_the_source_is(ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> None:
    source, target = model(), model()
    one, two = Attributes(source), Attributes(target)
    for module, changes in ((source, ours), (target, theirs)):
        for name, value in changes:
            setattr(module[0], name, value)
    two.put(one.now())
    assert not one.strayed()
    for name in NAMES:
        here, there = (getattr(module[0], name, "absent") for module in (source, target))
        both_nan = all(
            isinstance(value, float | np.floating) and math.isnan(value) for value in (here, there)
        )
        assert both_nan or (type(here), here) == (type(there), there)


@given(CHANGES)
def test_what_moves_has_a_fingerprint(changes: list[tuple[str, Any]]) -> None:
    """Each step ends with one where steps are attempts."""
    prints = []
    for more in (1, 2):
        module = model()
        attributes = Attributes(module)
        for name, value in [*changes, ("large", more << 90), ("scale", np.float32(0.5))]:
            setattr(module[0], name, value)
        prints.append([fingerprint(b"", b"", [], [now]) for now in (attributes.now(), attributes.now())])
    assert prints[0][0] == prints[0][1] != prints[1][0]


def test_which_parameters_are_trained_moves() -> None:
    source, target = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    ours, theirs = Attributes(source), Attributes(target)
    source[0].weight.requires_grad_(False)
    target[1].bias.requires_grad_(False)
    kept = ours.read()
    theirs.put(ours.now())
    assert [p.requires_grad for p in target.parameters()] == [False, True, True, True]
    assert theirs.now() == ours.now()
    source[0].weight.requires_grad_(True)
    source[1].weight.requires_grad_(False)
    ours.put_back(kept)
    assert [p.requires_grad for p in source.parameters()] == [False, True, True, True]


def test_a_list_that_has_changed_is_told() -> None:
    module = model()
    module[0].same, module[0].grows, module[0].odd, module[0].names = [1], {"a": (1, 2)}, [object()], {"x"}
    module[0].cache = [torch.zeros(2)]
    attributes = Attributes(module)
    assert not attributes.strayed()
    module[0].cache[0].add_(1)
    module[0].grows["b"] = 1
    module[0].new = [2]
    module[0].names.add("y")
    assert [*attributes.strayed()] == ["0.grows", "0.names", "0.cache", "0.new"]


def test_hooks_that_came_in_training_are_told() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    module[1].register_forward_hook(lambda *_: None)
    attributes = Attributes(module)
    assert not attributes.strayed()
    module[1].register_forward_hook(lambda *_: None)
    module[0].register_forward_pre_hook(lambda *_: None)
    assert [*attributes.strayed()] == ["0's hooks", "1's hooks"]


def test_modules_that_came_or_went_are_told() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.1)), nn.GELU())
    attributes = Attributes(module)
    module[1][0] = nn.Dropout(0.2)
    del module[2]
    module.add_module("gate", nn.Identity())
    assert [*attributes.strayed()] == ["1.0", "2", "gate"]


class Phase(enum.IntEnum):
    WARM, MAIN = 0, 1


@dataclasses.dataclass
class Meter:
    count: int = 0
    inner: Any = None


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


Point = collections.namedtuple("Point", "x y")


def draws(rate: float) -> Iterator[float]:
    while True:
        yield rate


def become(value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module, "it", value)


TOLD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "array in place": (lambda: np.ones(3), lambda m: m.it.__iadd__(1)),
    "array of objects": (lambda: np.array([[1], "a"], dtype=object), lambda m: m.it[0].append(2)),
    "numpy's generator": (lambda: np.random.default_rng(0), lambda m: m.it.random()),
    "numpy's old one": (lambda: np.random.RandomState(0), lambda m: m.it.rand()),
    "Python's": (lambda: random.Random(0), lambda m: m.it.random()),
    "a method of it": (lambda: random.Random(0).random, lambda m: m.it()),
    "torch's": (torch.Generator, lambda m: torch.randn(1, generator=m.it)),
    "IntEnum": (lambda: Phase.WARM, become(Phase.MAIN)),
    "field": (Meter, lambda m: setattr(m.it, "count", 2)),
    "slot": (Slots, lambda m: setattr(m.it, "count", 2)),
    "field in a list": (lambda: [{"a": Meter(0, Meter())}], lambda m: m.it[0]["a"].inner.__init__(1)),
    "function": (lambda: torch.tanh, become(torch.relu)),
    "function that came": (lambda: None, become(torch.relu)),
    "object that came": (lambda: "x", become(Meter())),
    "Path": (lambda: Path("a"), become(Path("b"))),
    "dtype": (lambda: torch.float32, become(torch.bfloat16)),
    "Decimal": (lambda: decimal.Decimal(1), become(decimal.Decimal(2))),
    "date": (lambda: datetime.date(2020, 1, 1), become(datetime.date(2021, 1, 1))),
    "range": (lambda: range(3), become(range(4))),
    "bytes": (lambda: b"a", become(b"b")),
    "complex": (lambda: 1j, become(2j)),
    "bytearray": (lambda: bytearray(b"a"), lambda m: m.it.append(1)),
    "array.array": (lambda: array.array("f", [1.0]), lambda m: m.it.append(2.0)),
    "partial": (lambda: functools.partial(min, 1), become(functools.partial(min, 2))),
    "list with an object": (lambda: [Meter()], lambda m: m.it.append(Meter())),
    "dict with a function": (lambda: {"a": 1, "f": torch.relu}, lambda m: m.it.update(a=2)),
    "list that went": (lambda: [1], become(None)),
    "attribute that went": (lambda: [1], lambda m: delattr(m, "it")),
    "set": (lambda: {1, "a", (1, 2)}, lambda m: m.it.add(2)),
    "Counter": (collections.Counter, lambda m: m.it.update("a")),
    "deque of tensors": (collections.deque, lambda m: m.it.append(torch.ones(1))),
    "order": (lambda: collections.OrderedDict(a=1, b=2), lambda m: m.it.move_to_end("a")),
    "named tuple": (lambda: Point(1, 2), become(Point(2, 2))),
    "small tensor's .data": (lambda: [torch.ones(2)], lambda m: m.it[0].data.mul_(2)),
    "large tensor": (lambda: [torch.ones(1 << 15)], lambda m: m.it[0].mul_(2)),
    "hidden state": (lambda: None, become((torch.ones(2), torch.ones(2)))),
    "iterator": (lambda: iter(range(10)), lambda m: next(m.it)),
    "generator": (lambda: draws(0.5), lambda m: next(m.it)),
    "teacher in a list": (lambda: [nn.Linear(300, 300)], lambda m: m.it[0].weight.detach().mul_(0.9)),
    "cycle": (lambda: itself(Meter()), lambda m: setattr(m.it, "count", 1)),
    "attribute of a parameter": (lambda: None, lambda m: setattr(m.layer.weight, "lr_scale", 0.5)),
    "forward": (lambda: None, lambda m: setattr(m, "forward", lambda x: x)),
}  # fmt: skip


def itself(meter: Meter) -> Meter:
    meter.inner = [meter]
    return meter


class Holder(nn.Module):
    shared = 1.0

    def __init__(self, it: Any) -> None:
        super().__init__()
        self.layer, self.it = nn.Linear(2, 2), it


class Private(Holder):
    @property
    def it(self) -> Any:
        return self._it

    @it.setter
    def it(self, value: Any) -> None:
        self._it = value

    @it.deleter
    def it(self) -> None:
        del self._it


@pytest.mark.parametrize("holder", [Holder, Private])
@pytest.mark.parametrize("kind", TOLD)
def test_what_does_not_move_is_told_once_it_has_changed(
    kind: str, holder: Callable[[Any], nn.Module]
) -> None:
    make, change = TOLD[kind]
    module = nn.Sequential(holder(make()))
    attributes = Attributes(module)
    assert not attributes.strayed()
    change(module[0])
    assert len(attributes.strayed()) == 1
    assert all(key.endswith(".training") for key in attributes.now())


def test_a_class_attribute_that_changed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = Attributes(Holder(None))
    monkeypatch.setattr(Holder, "shared", 2.0)
    assert [*attributes.strayed()] == ["class Holder.shared"]


def test_what_is_too_large_to_be_compared_is_told() -> None:
    module = Holder(list(range(300_000)))
    told = Attributes(module).strayed()
    assert "is too large to tell whether training changes it" in told["it"]
    module.it.append(1)


def test_a_list_that_went_in_a_void_step_takes_nothing_away() -> None:
    module = Holder([1])
    attributes = Attributes(module)
    kept = attributes.read()
    module.it = None
    attributes.put_back(kept)
    assert module.it is None
    assert attributes.now()[".it"] is None


class Net(nn.Module):
    """Of all that keeps something for itself."""

    def __init__(self) -> None:
        super().__init__()
        wrapped = nn.utils.parametrizations
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)
        self.parts = nn.ModuleList(
            [wrapped.weight_norm(nn.Linear(8, 8)), wrapped.spectral_norm(nn.Linear(8, 8))]
        )
        self._all = list(self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.lstm(x.unsqueeze(1))[0][:, 0])
        for part in self.parts:
            x = self.drop(part(x))
        return x


class Shardable(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        fully_shard(self[0])
        fully_shard(self)


def compiled() -> Any:
    return torch.compile(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), backend="eager")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(module: Any, optimizer: Any = None) -> RankState:
    """After a few steps with an evaluation, under a scheduler that patches the optimizer."""
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
    state = RankState({"model": module, "optimizer": optimizer, "schedule": schedule, "none": None})
    for _ in range(3):
        module.eval()
        with torch.no_grad():
            module(torch.randn(4, 8))
        module.train()
        module(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return state


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "make",
    [Net, lambda: DistributedDataParallel(Net(), static_graph=True), Shardable, compiled],
    ids=["net", "ddp", "fsdp2", "compiled"],
)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_told_of_ordinary_training(make: Callable[[], Any]) -> None:
    state = trained(make())
    assert state.blockers() == []
    assert state.attributes["optimizer"].now() == {}


@pytest.mark.usefixtures("group")
def test_what_hangs_on_the_wrapper_moves_and_a_late_hook_is_told() -> None:
    model = DistributedDataParallel(Holder(None))
    attributes = Attributes(model)
    model.temperature = 1.5
    assert attributes.now()["(ddp).temperature"] == 1.5
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert [*attributes.strayed()] == ["communication hooks"]


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_a_communication_hook_with_a_state_is_told() -> None:
    model = DistributedDataParallel(Net())
    model.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    (found,) = trained(model).blockers()
    assert found == (
        "comm-hook",
        "DDP's communication hook powerSGD_hook keeps a PowerSGDState, which does not move with the rank",
        False,
    )


def test_an_optimizers_new_hook_is_told() -> None:
    state, module = RankState(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state.register("model", module)
    state.register("opt", optimizer)
    assert state.blockers() == []
    optimizer.register_step_post_hook(lambda *_: None)
    ((code, text, fatal),) = state.blockers()
    assert (code, fatal) == ("changed-attribute", False)
    assert text.startswith("opt/hooks changed since the Session was made")
