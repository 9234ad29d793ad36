"""Trees: nested containers taken apart into leaves and put together again.

`torch.utils._pytree` is private and refuses dataclasses that nobody registered with it, and registering is global
state; so containers are taken apart here. Nothing that is a tensor or a constant is looked into.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn


class Tree(NamedTuple):
    """The shape of a tree: a container's type, what is needed to rebuild it beside its children, and the children.

    A leaf has no type. Hashable; equal trees are rebuilt alike from the same leaves.
    """

    container: type | None
    context: Hashable
    children: tuple[Any, ...]


LEAF = Tree(None, None, ())


def flatten(value: object) -> tuple[list[object], Tree]:
    """The leaves of `value`, depth first, and the tree that they were taken from.

    Containers are tuples (named, `torch.Size` and `torch.return_types` too), lists, slices, dicts and their
    subclasses, and instances of dataclasses. Everything else is a leaf, None included.
    """
    leaves: list[object] = []
    return leaves, _flatten(value, leaves)


def unflatten(tree: Tree, leaves: Sequence[object]) -> Any:
    """The inverse of `flatten`. Dataclasses are rebuilt without running `__init__`, dicts that are dataclasses with."""
    return _unflatten(tree, iter(leaves))


def leaf_names(tree: Tree, root: str = "") -> list[str]:
    """For each leaf the expression that reaches it from `root`, such as `output['hidden'][0]`."""
    if tree.container is None:
        return [root]
    names: list[str] = []
    for step, child in zip(_steps(tree), tree.children, strict=True):
        names.extend(leaf_names(child, root + step))
    return names


def is_dataclass_instance(value: object) -> bool:
    """Whether `value` is an instance of a dataclass that may be taken apart; modules keep their identity instead."""
    return dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module, torch.Tensor))


def _flatten(value: object, leaves: list[object]) -> Tree:
    kind = type(value)
    if value is None or kind in (int, bool, float, str) or isinstance(value, torch.Tensor):
        leaves.append(value)
        return LEAF
    parts = _take_apart(value)
    if parts is None:
        leaves.append(value)
        return LEAF
    context, children = parts
    return Tree(kind, context, tuple(_flatten(child, leaves) for child in children))


def _take_apart(value: object) -> tuple[Hashable, Sequence[object]] | None:
    if isinstance(value, (tuple, list)):
        return None, value
    if isinstance(value, dict):
        factory = value.default_factory if isinstance(value, collections.defaultdict) else None
        return (factory, tuple(value)), list(value.values())
    if isinstance(value, slice):
        return None, (value.start, value.stop, value.step)
    if is_dataclass_instance(value):
        names = _attribute_names(value)
        return names, [getattr(value, name) for name in names]
    return None


def _attribute_names(value: Any) -> tuple[str, ...]:
    """The fields that are set, and whatever else was set on the instance."""
    names = dict.fromkeys(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
    names.update(dict.fromkeys(getattr(value, "__dict__", ())))
    return tuple(names)


def _unflatten(tree: Tree, leaves: Iterator[object]) -> Any:
    if tree.container is None:
        return next(leaves)
    return _put_together(tree.container, tree.context, [_unflatten(child, leaves) for child in tree.children])


def _put_together(container: Any, context: Any, children: list[Any]) -> Any:
    if issubclass(container, tuple):
        return container(*children) if hasattr(container, "_fields") else container(children)
    if issubclass(container, list):
        return container(children)
    if issubclass(container, dict):
        return _build_dict(container, context, children)
    if container is slice:
        return slice(*children)
    value: Any = object.__new__(container)
    for name, child in zip(context, children, strict=True):
        object.__setattr__(value, name, child)
    return value


def _build_dict(container: Any, context: Any, children: list[Any]) -> Any:
    factory, keys = context
    items = dict(zip(keys, children, strict=True))
    if issubclass(container, collections.defaultdict):
        return container(factory, items)
    by_name = dataclasses.is_dataclass(container)
    return container(**items) if by_name else container(items)


def _steps(tree: Tree) -> list[str]:
    """How each child is reached from its container, in Python's syntax."""
    container, context = tree.container, tree.context
    assert container is not None
    if issubclass(container, (tuple, list)):
        names = getattr(container, "_fields", None)
        return [f".{name}" for name in names] if names else [f"[{i}]" for i in range(len(tree.children))]
    if isinstance(context, tuple) and issubclass(container, dict):
        return [f"[{key!r}]" for key in context[1]]
    if container is slice:
        return [".start", ".stop", ".step"]
    return [f".{name}" for name in context] if isinstance(context, tuple) else []
