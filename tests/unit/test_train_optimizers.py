"""Optimizers of one's own: what they keep beside groups and state moves, is told, or forbids a swap."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from gridagent.train.fitness import wrapped
from gridagent.train.state import RankState, StateError


class Counting(torch.optim.SGD):
    """Its own counter is an attribute, and stands in its state dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count, self._seen, self.past = 0, 0, []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count, self._seen = self.count + 1, self._seen + 2
        self.state["shared"] = {"k": self.count}  # type: ignore[index]
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})


class Slow(torch.optim.SGD):
    """Keeps tensors in an object of its own, which only its state dict tells."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.slow = {"weights": torch.zeros(2)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.slow["weights"] = self.slow["weights"] + 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow["weights"].clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.slow["weights"] = state_dict.pop("slow").clone()
        super().load_state_dict(state_dict)


class Wrapper(torch.optim.Optimizer):
    """Another optimizer inside does the work."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


def trained(kind: Any, steps: int) -> tuple[RankState, Any]:
    torch.manual_seed(1)
    module = nn.Linear(2, 2)
    optimizer = kind(module.parameters())
    state = RankState({"model": module, "optimizer": optimizer})
    for _ in range(steps):
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state, optimizer


def moved(source: RankState, target: RankState) -> None:
    target.apply({entry.name: entry for entry in source.inventory()})
    for one, other in zip(source.inventory(), target.inventory(), strict=True):
        assert (one.name, one.shape) == (other.name, other.shape)
        if isinstance(one.data, bytes):
            assert one.data == other.data
        elif one.category == "optimizer":
            assert torch.equal(one.data, other.data)


def test_what_an_optimizer_counts_itself_moves() -> None:
    (source, ours), (target, theirs) = trained(Counting, 5), trained(Counting, 2)
    groups, state = theirs.param_groups, theirs.state
    first = groups[0]
    moved(source, target)
    assert (theirs.count, theirs._seen, theirs.state["shared"]) == (5, 10, {"k": 5})
    assert (theirs.param_groups, groups[0], theirs.state) == (groups, first, state)
    assert all(one is two for one, two in zip(theirs.param_groups, [first], strict=True))
    assert source.blockers() == []
    ours.past.append(1)
    assert [(code, text[:22], fatal) for code, text, fatal in source.blockers()] == [
        ("changed-attribute", "optimizer/past changed", False)
    ]


def test_what_only_its_state_dict_tells_moves_and_is_told_where_it_hangs_on_an_object() -> None:
    (source, _), (target, theirs) = trained(Slow, 5), trained(Slow, 2)
    moved(source, target)
    assert torch.equal(theirs.slow["weights"], torch.full((2,), 5.0))
    assert [text[:22] for _, text, _ in source.blockers()] == ["optimizer/slow changed"]


def test_state_of_a_parameter_that_left_its_group_is_told() -> None:
    state, optimizer = trained(torch.optim.Adam, 2)
    assert state.blockers() == []
    optimizer.param_groups[0]["params"].pop()
    ((_, text, fatal),) = state.blockers()
    assert (text[:46], fatal) == ("optimizer/state of what is in no group changed", False)


def test_a_state_that_is_kept_elsewhere_forbids_a_swap() -> None:
    state, _ = trained(lambda p: Wrapper(torch.optim.Adam(p)), 2)
    with pytest.raises(StateError, match=r"optimizer: Wrapper keeps its parameters' state where it is not"):
        state.inventory()


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_optimizer_forbids_a_swap() -> None:
    state, _ = trained(lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.1), 1)
    with pytest.raises(StateError, match="ZeroRedundancyOptimizer keeps its parameters' state where"):
        state.inventory()


class Bare(torch.optim.Optimizer):
    """A wrapper that was never made as an optimizer, as torch's PostLocalSGDOptimizer is."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_a_wrapper_that_was_never_made_as_an_optimizer_moves_but_makes_no_attempts() -> None:
    model = nn.Linear(2, 2)
    inner = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    inner.step()
    inner.zero_grad()
    state = RankState({"model": model, "optimizer": Bare(inner)})
    assert "optimizer/0/exp_avg" in {entry.name for entry in state.inventory()}
    assert state.blockers() == []
    assert wrapped(state) == "optimizer"
    assert wrapped(RankState({"model": model, "optimizer": inner})) == ""
