"""Trees as bytes: whatever may be registered comes back the same, everything else is refused by its place."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gridagent.train.packing import PackError, pack, unpack

keys = st.text(max_size=5) | st.integers(-5, 5) | st.booleans() | st.tuples(st.integers(0, 3))
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in value and type all the way down: 1, 1.0 and True are three things."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return bool(one == other)


@given(trees)
def test_a_tree_comes_back_and_its_bytes_are_canonical(tree: Any) -> None:
    data = pack(tree, [])
    again = unpack(data, [])
    assert same(again, tree)
    assert pack(again, []) == data


def test_tensors_and_arrays() -> None:
    tensors: list[torch.Tensor] = []
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    tree: dict[str, Any] = {"t": [torch.ones(2), torch.zeros(3)], "a": array, "s": np.float64(2)}
    again = unpack(pack(tree, tensors), tensors)
    assert again["t"][0] is tree["t"][0]
    assert again["t"][1] is tree["t"][1]
    assert again["a"].dtype == np.float32
    assert np.array_equal(again["a"], tree["a"])
    assert again["a"].flags.writeable
    assert type(again["s"]) is np.float64
    assert math.isnan(unpack(pack(math.nan, []), []))


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": [1, {2}]}, "state.a[1]: set"),
        ({"a": {"b": object()}}, "state.a.b: object"),
        ((1, lambda: 0), "state[1]: function"),
        ({None: 1}, "a key of type NoneType"),
        ([np.array([object()])], "state[0]: a numpy array of Python objects"),
    ],
    ids=["set", "object", "function", "key", "object-array"],
)
def test_anything_else_is_refused_by_its_place(tree: Any, place: str) -> None:
    with pytest.raises(PackError, match="state") as refused:
        pack(tree, [], "state")
    assert place in str(refused.value)


@given(st.binary(max_size=60))
def test_garbage_never_does_more_than_fail(data: bytes) -> None:
    try:
        unpack(data, [])
    except PackError:
        pass
