"""Random operations in compiled graphs: a forward and its rerun are compiled apart, and must draw the same numbers."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten


def _bernoulli(tensor: torch.Tensor, probability: float = 0.5, generator: Any = None) -> torch.Tensor:
    if generator is not None:
        return NotImplemented
    return torch.rand_like(tensor, dtype=torch.float32).lt(probability).to(tensor.dtype)


def _bernoulli_(tensor: torch.Tensor, probability: float = 0.5, generator: Any = None) -> torch.Tensor:
    return NotImplemented if generator is not None else tensor.copy_(_bernoulli(tensor, probability))


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {_aten.bernoulli.p: _bernoulli, _aten.bernoulli_.float: _bernoulli_}
)
"""Dropout on the CPU, in terms of an operation that Inductor makes from seeds."""

# Inductor draws one seed for each of these, in the order of the graph, before anything else: how it then orders and
# fuses them does not matter.
_SEEDED = frozenset(
    (
        _aten.native_dropout.default,
        _aten.rand.default,
        _aten.rand_like.default,
        _aten.randn.default,
        _aten.randn_like.default,
    )
)
# Of these only the layout is read, so no order follows from such an argument.
_LAYOUT_ONLY = frozenset((_aten.rand_like, _aten.randn_like, _aten.empty_like, _aten.zeros_like, _aten.ones_like))


def random_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that advance a random number generator, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and _draws(node)]


def inductor_options(graph: fx.Graph) -> dict[str, Any] | str:
    """Options under which every compiled part of this graph draws the same numbers, or the reason why none do.

    Patterns are off because one of them replaces attention with dropout by a kernel that draws other numbers, in the
    forward but not in the backward.
    """
    nodes = random_nodes(graph)
    if not nodes:
        return {}
    options: dict[str, Any] = {"pattern_matcher": False}
    if all(node.target in _SEEDED for node in nodes):
        return options
    # Others run as they do in eager mode, and must follow from one another to keep their order.
    opaque = all(node.target not in _SEEDED or node.target is _aten.native_dropout.default for node in nodes)
    if opaque and _is_chain(nodes):
        return options | {"fallback_random": True}
    names = ", ".join(sorted({str(node.target) for node in nodes}))
    return f"nothing fixes the order in which its random operations ({names}) would run once compiled"


def keep_random(graph: fx.Graph, results: Sequence[Any]) -> list[Any]:
    """The results, and those random nodes on which none depends: left out, later ones would draw other numbers."""
    needed = ancestors(node for node in results if isinstance(node, fx.Node))
    extra = []
    for node in random_nodes(graph):
        if node not in needed:
            with graph.inserting_after(node):
                several = isinstance(node.meta.get("val"), (tuple, list))
                extra.append(graph.call_function(operator.getitem, (node, 0)) if several else node)
    return [*results, *extra]


def ancestors(nodes: Iterable[fx.Node], through: Callable[[fx.Node], bool] = lambda node: True) -> set[fx.Node]:
    """The nodes themselves, and all that they are computed from; inputs are followed only ``through`` some nodes."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if through(node):
                pending.extend(node.all_input_nodes)
    return found


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    name = str(node.target)
    if name.endswith("_backward.default"):  # of attention: it is given the state that its forward used
        return False
    return "attention" not in name or _dropout(node) != 0.0


def _dropout(node: fx.Node) -> Any:
    """The probability with which attention drops weights; None if it is unknown."""
    root = node.graph.owning_module
    assert root is not None
    normal = node.normalized_arguments(root, normalize_to_only_use_kwargs=True)
    return None if normal is None else normal.kwargs.get("dropout_p", 0.0)


def _is_chain(nodes: Sequence[fx.Node]) -> bool:
    def computes(node: fx.Node) -> bool:
        return getattr(node.target, "overloadpacket", None) not in _LAYOUT_ONLY

    return all(before in ancestors([after], computes) for before, after in itertools.pairwise(nodes))
