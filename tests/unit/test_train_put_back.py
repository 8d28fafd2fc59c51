"""A registered dict is filled in place: equal values and types, and whoever holds a part of it sees them."""

import contextlib
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from enum import Enum, IntEnum, IntFlag, StrEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gridagent.train import packing
from gridagent.train.packing import PackError, pack, put_back, unpack
from gridagent.train.state import RankState, StateError
from gridagent.train.transfer import TransferError
from gridagent.train.window import Window
from tests.unit.test_train_state import move


class Phase(IntEnum):
    WARM = 1
    MAIN = 2


class Mode(StrEnum):
    WARM = "warm"
    MAIN = "main"


class Old(str, Enum):  # noqa: UP042 - as scripts have it
    WARM = "w"
    MAIN = "m"


class Parts(IntFlag):
    ONE = 1
    TWO = 2


class Name(str):
    def __str__(self) -> str:
        return "something else"


class Steps(int):
    pass


class History(list[Any]):
    pass


class Meters(dict[Any, Any]):
    pass


class Pair(tuple[Any, ...]):
    pass


class Record(NamedTuple):
    step: Any
    loss: Any


Point = namedtuple("Point", "x y")  # as scripts have it


def view(value: float) -> Tensor:
    """Lies within a larger one that somebody else holds."""
    return torch.full((3, 4), value)[1]


#: What a tree's leaf is, made of 0 at the source and of 1 at the target.
LEAVES: dict[str, Callable[[int], Any]] = {
    "none": lambda n: None if n else "set",
    "bool": bool,
    "int": lambda n: (1 << 70) + n,
    "float": lambda n: n + 0.5,
    "str": lambda n: f"text {n}",
    "bytes": lambda n: bytes([n]),
    "IntEnum": lambda n: Phase(n + 1),
    "StrEnum": lambda n: list(Mode)[n],
    "str-Enum": lambda n: list(Old)[n],
    "IntFlag": lambda n: Parts(3 - n),
    "Name": lambda n: Name(n),
    "Steps": lambda n: Steps(n),
    "Size": lambda n: torch.Size([n, 2]),
    "Counter": lambda n: Counter({"a": 5 - n, "b": n}),
    "np.float64": lambda n: np.float64(n),
    "array": lambda n: np.full((2, 2), n),
    "tensor": lambda n: torch.full((2,), float(n)),
    "bfloat16": lambda n: torch.full((2,), n, dtype=torch.bfloat16),
    "transposed": lambda n: torch.full((2, 3), n).t(),
    "view": view,
    "leaf": lambda n: torch.full((2,), float(n), requires_grad=not n),
    "parameter": lambda n: nn.Parameter(torch.full((2,), float(n)), requires_grad=bool(n)),
    "changed-shape": lambda n: torch.full((2 + n,), float(n)),
}
#: How a container is made of the items of its places; a dict's keys are another order at the target.
LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "History": History,
    "tuple": tuple,
    "Pair": Pair,
    "Record": lambda items: Record(items[:1], items[1:]),
    "Point": lambda items: Point(items, 0),
}
DICTS: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda: defaultdict(list),
    "Meters": Meters,
}
KEYS: list[Any] = ["key", 3, Phase.MAIN, Mode.MAIN, Old.WARM, Point(1, 2), (1, "a"), Name("n"), Steps(9)]

shapes = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda inner: st.tuples(st.sampled_from([*LISTS, *DICTS]), st.lists(inner, max_size=4)),
    max_leaves=10,
)


def build(shape: Any, end: int) -> Any:
    """A tree of this shape with the values of one end."""
    if isinstance(shape, str):
        return LEAVES[shape](end)
    kind, inner = shape
    items = [build(item, end) for item in inner]
    if kind in LISTS:
        return LISTS[kind](items)
    made = DICTS[kind]()
    pairs = list(zip(KEYS, items, strict=False))
    for key, item in reversed(pairs) if end else pairs:
        made[key] = item
    if end:
        made["only here"] = [1]
    return made


def same(one: Any, other: Any) -> bool:
    """Equal in value and type all the way down, keys and their order too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        return alike and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return factories and same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return bool(one == other)


def held(tree: Any, place: str = "") -> dict[str, Any]:
    """Whatever in a tree can be changed and be held by another name too, by place."""
    found = {place: tree} if isinstance(tree, dict | list | Tensor | np.ndarray) else {}
    items: Any = []
    if isinstance(tree, dict):
        items = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    for key, item in items:
        found |= held(item, f"{place}/{key!r}")
    return found


def fill(target: dict[str, Any], source: dict[str, Any]) -> None:
    tensors: list[Tensor] = []
    data = pack(source, tensors, "own")
    put_back(data, [tensor.detach().clone() for tensor in tensors], target, "own", fill=True)


@given(st.lists(shapes, max_size=4))
def test_values_types_and_aliases(inner: list[Any]) -> None:
    source, target = build(("dict", inner), 0), build(("dict", inner), 1)
    aliases = held(target)
    fill(target, source)
    assert same(target, source)
    assert pack(target, [], "own") == pack(source, [], "own")
    for place, now in held(target).items():
        if not (isinstance(now, Tensor) and aliases[place].shape != now.shape):
            assert now is aliases[place]


@given(st.lists(shapes, max_size=4))
def test_types_that_this_process_knows_come_back(inner: list[Any]) -> None:
    """As an object's own load_state_dict gets them; those of the script's own containers come plain."""
    tensors: list[Tensor] = []
    source = build(
        ("dict", [item for item in inner if not {"History", "Meters", "defaultdict"} & names(item)]), 0
    )
    assert same(unpack(pack(source, tensors), tensors), source)


def names(shape: Any) -> set[str]:
    return {shape} if isinstance(shape, str) else {shape[0]}.union(*map(names, shape[1]))


def test_what_holds_a_view_sees_it_and_a_graph_is_no_part_of_it() -> None:
    base, weight = torch.zeros(3, 4), torch.ones(4, requires_grad=True)
    target: dict[str, Any] = {"row": base[1], "out": weight * 2, "pair": (base[2], 1)}
    fill(target, {"row": torch.ones(4), "out": (weight * 3), "pair": (torch.full((4,), 2.0), 1)})
    assert base.sum(1).tolist() == [0, 4, 8]
    assert target["out"].tolist() == [3.0] * 4
    assert weight.grad is None


@pytest.mark.parametrize("inference", [False, True])
def test_a_tensor_of_inference_mode(inference: bool) -> None:
    with torch.inference_mode(inference):
        mean = torch.zeros(2)
    fill({"mean": mean}, {"mean": torch.ones(2)})
    assert mean.tolist() == [1, 1]


def test_what_stands_at_two_places_is_parted_only_where_it_must_be() -> None:
    tensor, items, array = torch.zeros(2), [0], np.zeros(2)
    target = {"a": [tensor, items, array], "b": [tensor, items, array]}
    other: dict[str, Any] = {"a": [torch.ones(2), [1], np.ones(2)], "b": [torch.zeros(2), [2], np.zeros(2)]}
    fill(target, other)
    assert same(target, other)
    assert all(now is alias for now, alias in zip(target["a"], [tensor, items, array], strict=True))
    target = {"a": [tensor, items, array], "b": [tensor, items, array]}
    fill(target, {"a": other["b"], "b": other["b"]})
    assert same(target["a"], other["b"])
    assert all(one is two for one, two in zip(target["a"], target["b"], strict=True))


def test_more_than_the_target_has_is_made_as_the_script_makes_it() -> None:
    """A history that has grown, and a nested defaultdict with keys that the warm-up never saw."""

    def counts() -> defaultdict[str, Any]:
        return defaultdict(lambda: defaultdict(int))

    source: dict[str, Any] = {
        "log": [Record(0, 1.0), Record(1, 0.5)],
        "m": counts(),
        "n": {"new": Counter("a")},
    }
    source["m"]["train"]["seen"] += 3
    target: dict[str, Any] = {"log": [], "m": counts(), "n": {}}
    fill(target, source)
    assert same(target["log"], source["log"])
    assert same(target["n"], source["n"])
    target["m"]["train"]["other"] += 1
    target["m"]["val"]["seen"] += 1
    assert target["m"] == {"train": {"seen": 3, "other": 1}, "val": {"seen": 1}}


@pytest.mark.parametrize("value", [defaultdict(int, a=1), Meters(a=1), History([1])], ids=repr)
def test_a_container_without_its_counterpart_is_named(value: Any) -> None:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(
        PackError, match=rf"own\.m\[1\]: a {name} comes and there is none here.*put one there"
    ):
        fill({"m": [0]}, {"m": [0, value]})


@pytest.mark.parametrize("value", [Phase.MAIN, Old.MAIN, Record(1, 2), Name("a"), Pair([1])], ids=repr)
def test_a_type_that_the_process_never_met_is_named(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pack({"m": value}, [], "own")
    monkeypatch.setattr(packing, "_types", {})
    with pytest.raises(PackError, match=rf"own\.m: a \S*{type(value).__name__} comes and there is none here"):
        put_back(data, [], {"m": 0}, "own", fill=True)
    plain = unpack(data, [])["m"]
    assert type(plain) in (int, str, tuple)
    assert plain == (value.value if isinstance(value, Enum) else value)


def test_two_types_of_one_name_are_told_apart_by_their_place() -> None:
    def local(name: str) -> Any:
        return namedtuple("Twin", name)

    one, other = local("a"), local("b")
    target = {"one": one(1), "other": other(2)}
    fill(target, {"one": one(3), "other": other(4)})
    assert (target["one"].a, target["other"].b) == (3, 4)
    with pytest.raises(PackError, match="Twin comes and there is none here"):
        fill({}, {"one": one(1)})


def test_a_value_that_the_type_refuses_is_named() -> None:
    data = pack({"phase": Phase.MAIN}, []).replace(b"\x02", b"\x07")
    with pytest.raises(PackError, match=r"own\.phase: .*Phase cannot be made again: ValueError"):
        put_back(data, [], {"phase": Phase.WARM}, "own", fill=True)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=3))
def test_damaged_bytes_never_do_more_than_fail(spoilt: list[tuple[int, int]]) -> None:
    tensors: list[Tensor] = []
    shape = ("dict", [("list", sorted(LEAVES)), *((kind, ["int", "array"]) for kind in [*LISTS, *DICTS])])
    data = bytearray(pack(build(shape, 0), tensors))
    for at, byte in spoilt:
        data[at % len(data)] = byte
    tensors = [tensor.detach() for tensor in tensors]
    with contextlib.suppress(PackError):
        unpack(bytes(data), tensors)
    with contextlib.suppress(PackError):
        put_back(bytes(data), tensors, build(shape, 1), "own", fill=True)


# ----------------------------------------------------------------------------------- as part of a rank


def registered(**objects: Any) -> RankState:
    state = RankState()
    for name, value in objects.items():
        state.register(name, value)
    return state


def test_a_transfer_fills_what_the_script_holds() -> None:
    running, seen = torch.zeros(1), [0]
    counts: defaultdict[str, float] = defaultdict(float)
    own: dict[str, Any] = {
        "running": running,
        "seen": seen,
        "counts": counts,
        "phase": Phase.WARM,
        "pair": Point(0, 0),
    }
    source: dict[str, Any] = {
        "running": torch.ones(1), "seen": [1, 2], "counts": defaultdict(float, a=1.0), "phase": Phase.MAIN,
        "pair": Point(1, 2),
    }  # fmt: skip
    sent, received = move(registered(own=source), registered(own=own))
    assert sent.digests == received.digests
    assert (running.tolist(), seen, dict(counts)) == ([1.0], [1, 2], {"a": 1.0})
    assert own["running"] is running
    assert own["phase"] is Phase.MAIN
    assert own["pair"].y == 2
    counts["b"] += 1


@pytest.mark.parametrize("followed", [True, False], ids=["names-the-parameter", "a-copy-of-before"])
def test_a_parameter_in_a_dict_is_not_written_over(followed: bool) -> None:
    def rank(value: float) -> tuple[nn.Linear, dict[str, Any]]:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, value)
        return model, {"best": model.weight.detach()}

    (model, own), (other, its) = rank(0.0), rank(1.0)
    if not followed:
        its["best"] = torch.full((2, 2), 0.5)
    expected = its["best"].clone()
    move(registered(model=other, own=its), registered(model=model, own=own))
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    assert torch.equal(own["best"], expected)
    assert (own["best"].data_ptr() == model.weight.data_ptr()) == followed


def test_a_restore_without_the_counterpart_fails() -> None:
    entries = {entry.name: entry for entry in registered(own={"m": Meters()}).inventory()}
    with pytest.raises(StateError, match=r"own\.m: a \S*Meters comes"):
        registered(own={}).apply(entries)


class Schedule:
    """Makes its own types again, or does not."""

    def __init__(self, phase: Any, *, own: bool) -> None:
        self.phase, self.meters, self._own = phase, Meters(), own

    def state_dict(self) -> dict[str, Any]:
        return {"phase": self.phase, "meters": self.meters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.phase = Phase(state["phase"])
        self.meters = Meters(state["meters"]) if self._own else state["meters"]


def test_an_object_that_makes_its_own_types_again_moves_and_one_that_does_not_is_told() -> None:
    target = Schedule(Phase.WARM, own=True)
    move(registered(s=Schedule(Phase.MAIN, own=True)), registered(s=target))
    assert target.phase is Phase.MAIN
    assert type(target.meters) is Meters
    source, other = Schedule(Phase.MAIN, own=False), Schedule(Phase.WARM, own=False)
    _, error = move(registered(s=source), registered(s=other))
    assert isinstance(error, TransferError)
    assert "s (other) reads back differently" in str(error)


def test_what_torch_makes_moves_as_before() -> None:
    def objects(steps: int) -> dict[str, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        its: dict[str, Any] = {
            "multi": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            "plateau": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        }
        for _ in range(steps):
            optimizer.step()
            its["multi"].step()
            its["cosine"].step()
            its["plateau"].step(1.0)
        return {**its, "scaler": torch.amp.GradScaler("cpu", growth_interval=5), "ema": Ema(steps)}

    source, target = objects(3), objects(1)
    sent, received = move(registered(**source), registered(**target))
    assert sent.digests == received.digests
    assert same(target["multi"].state_dict(), source["multi"].state_dict())
    assert target["ema"].weights["bias"].item() == 3


class Ema:
    """Keeps a module's state_dict, an OrderedDict, and copies into it."""

    def __init__(self, value: int) -> None:
        self.weights = nn.Linear(1, 1).state_dict()
        self.weights["bias"].fill_(value)

    def state_dict(self) -> Any:
        return self.weights

    def load_state_dict(self, state: Any) -> None:
        for name, value in state.items():
            self.weights[name].copy_(value)


def test_a_rewind_leaves_objects_where_they_are() -> None:
    """Also of what the void step has replaced, or taken out."""
    running, seen, meters = torch.zeros(1), [0], Meters(a=1)
    own: dict[str, Any] = {
        "running": running,
        "seen": seen,
        "meters": meters,
        "last": Record(1, 2),
        "phase": Phase.WARM,
    }
    window = Window(registered(own=own))
    window.begin()
    running += 1
    seen.append(1)
    meters["b"] = 2
    own["running"] = running * 2
    own["phase"] = own["phase"] + 1
    del own["last"]
    window.rewind()
    assert (running.tolist(), seen, meters) == ([0.0], [0], {"a": 1})
    assert own["seen"] is seen
    assert own["meters"] is meters
    assert own["phase"] is Phase.WARM
    assert same(own["last"], Record(1, 2))
    own["running"] += 1
    assert running.item() == 1
