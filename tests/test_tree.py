"""Trees: every container that can be taken apart is put together again."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatrain_fx.tree import flatten, leaf_names, unflatten


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    first: Any
    second: Any = None
    derived: Any = dataclasses.field(init=False, default=3)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any


class Mapping(dict):
    """A dict subclass as configurations often are."""


_TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3)),
    lambda child: st.one_of(
        st.lists(child, max_size=3),
        st.tuples(child, child),
        st.dictionaries(st.text(max_size=3), child, max_size=3),
        st.builds(Point, child, child),
        st.builds(Plain, child, child),
        st.builds(Frozen, child),
        st.dictionaries(st.text(max_size=3), child, max_size=3).map(collections.OrderedDict),
        st.dictionaries(st.text(max_size=3), child, max_size=3).map(Mapping),
    ),
    max_leaves=8,
)


@given(_TREES)
def test_round_trip(value: Any) -> None:
    leaves, tree = flatten(value)
    again = unflatten(tree, leaves)
    assert again == value
    assert type(again) is type(value)
    assert flatten(again)[1] == tree
    assert hash(flatten(again)[1]) == hash(tree)
    assert len(leaf_names(tree)) == len(leaves)


@given(_TREES)
def test_leaf_names_reach_the_leaves(value: Any) -> None:
    leaves, tree = flatten(value)
    for name, leaf in zip(leaf_names(tree, "value"), leaves, strict=True):
        assert eval(name, {"value": value}) is leaf


@pytest.mark.parametrize(
    "value",
    [
        torch.Size([2, 3]),
        slice(1, None, 2),
        collections.defaultdict(list, {"a": 1}),
        torch.return_types.max((torch.ones(1), torch.zeros(1))),
    ],
)
def test_special_containers(value: Any) -> None:
    leaves, tree = flatten(value)
    again = unflatten(tree, leaves)
    assert type(again) is type(value)
    assert again == value
    assert len(leaves) > 0


def test_attributes_beside_the_fields_survive() -> None:
    value = Plain(1)
    value.extra = [2]
    again = unflatten(*reversed(flatten(value)))
    assert again == value
    assert again.extra == [2]


@pytest.mark.parametrize("value", [torch.ones(2), nn.Linear(1, 1), Plain, {1, 2}, object(), len])
def test_leaves_are_not_looked_into(value: Any) -> None:
    leaves, _ = flatten(value)
    assert len(leaves) == 1
    assert leaves[0] is value
