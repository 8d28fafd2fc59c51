"""Plain values of modules: what training has changed moves, what belongs to the place stays."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gridagent.train.attributes import Attributes
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


PLAIN = st.one_of(st.booleans(), st.integers(-3, 3), st.floats(), st.sampled_from(["a", "b"]), st.none())
CHANGES = st.lists(st.tuples(st.sampled_from(["rate", "mode", "later", "more"]), PLAIN), max_size=6)


@given(CHANGES, CHANGES)
def test_the_target_is_what_the_source_is(ours: list[tuple[str, Any]], theirs: list[tuple[str, Any]]) -> None:
    source, target = model(), model()
    one, two = Attributes(source), Attributes(target)
    for module, changes in ((source, ours), (target, theirs)):
        for name, value in changes:
            setattr(module[0], name, value)
    two.put(one.now())
    for name in ("rate", "mode", "later", "more"):
        here, there = (getattr(module[0], name, "absent") for module in (source, target))
        both_nan = all(isinstance(value, float) and math.isnan(value) for value in (here, there))
        assert both_nan or (type(here), here) == (type(there), there)


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
