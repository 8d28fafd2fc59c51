"""A batch that was changed in place is not given out once more."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gridagent.train.batch import Opaque, marks


def test_marks_see_a_write_into_a_batch() -> None:
    batch: dict[str, list[Tensor]] = {"x": [torch.ones(2)]}
    before = marks(batch)
    assert marks(batch) == before
    batch["x"][0].add_(1)
    assert marks(batch) != before


@dataclass
class Item:
    x: Any
    __slots__ = ("x",)


class Named:
    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: [x, (x,)], lambda x: {"a": x}, Item, Named, UserDict]
)
@pytest.mark.parametrize("change", ["write", "replace"])
def test_a_change_in_place_is_seen_wherever_it_is(wrap: Callable[[Any], Any], change: str) -> None:
    for value in (torch.ones(2), np.ones(2), bytearray(b"ab")):
        holder = [wrap({"in": value})]
        before = marks(holder)
        assert marks(holder) == before
        if change == "replace":
            holder[0] = wrap({"in": torch.ones(2) * 2})
        elif isinstance(value, bytearray):
            value[0] = 0
        else:
            value += 1
        assert marks(holder) != before


@pytest.mark.parametrize("value", [object(), iter([1]), np.array([object()]), (lambda: 1)])
def test_what_cannot_be_watched_is_named(value: object) -> None:
    with pytest.raises(Opaque):
        marks({"x": [value]})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(Opaque, match="holds itself"):
        marks(loop)
