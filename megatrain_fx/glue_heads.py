"""Heads without a module: products of hidden states and a parameter in the glue, made calls of an ``nn.Linear``."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from megatrain_fx.execution_modes import ExecutionModes
from megatrain_fx.signature import Structure, Value
from megatrain_fx.stages import attribute
from megatrain_fx.tree import LEAF, flatten
from megatrain_fx.unit_call import UnitCall

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Product:
    """``hidden @ weight.T + bias``; weight and bias are ``get_attr`` nodes of parameters."""

    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def call_heads(root: fx.GraphModule, results: list[fx.Node]) -> None:
    """Make the product that each of these nodes comes from, first argument by first argument, the call of a unit.

    So ``functional.linear(hidden, embedding.weight)`` and ``hidden @ embedding.weight.T`` become what a model's own
    ``nn.Linear`` with the same parameter is. Others are left alone.

    Args:
        root: a captured graph, which is changed.
        results: nodes of it, such as the losses.
    """
    for number, result in enumerate(results):
        node: Any = result
        while isinstance(node, fx.Node) and node.op == "call_function" and node.args:
            product = _product(root, node)
            if product is not None:
                _call(root, f"head_{number}", node, product)
                break
            node = node.args[0]


def _product(root: fx.GraphModule, node: fx.Node) -> _Product | None:
    hidden, *factors = node.args
    if not isinstance(hidden, fx.Node) or node.kwargs:
        return None
    weight: Any
    bias: Any = None
    if node.target is _aten.linear.default:
        weight, *rest = factors
        bias = rest[0] if rest else None
    elif node.target is _aten.matmul.default:
        weight = _transposed(factors[0])
    else:
        return None
    if not all(_is_parameter(root, one) for one in (weight, *([] if bias is None else [bias]))):
        return None
    return _Product(hidden, weight, bias) if weight.meta["val"].ndim == 2 else None


def _transposed(node: Any) -> Any:
    """What a node is the transpose of, a matrix; None if it is no transpose."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    plain = node.target in (_aten.t.default, _aten.numpy_T.default)
    swapped = node.target is _aten.transpose.int and {dim % 2 for dim in node.args[1:]} == {0, 1}  # type: ignore[operator]
    permuted = node.target is _aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]
    return node.args[0] if plain or swapped or permuted else None


def _is_parameter(root: fx.GraphModule, node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr" and isinstance(attribute(root, node), nn.Parameter)


def _call(root: fx.GraphModule, name: str, node: fx.Node, product: _Product) -> None:
    weight = attribute(root, product.weight)
    assert isinstance(weight, nn.Parameter)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=product.bias is not None, device="meta")
    linear.weight = weight
    if product.bias is not None:
        linear.bias = attribute(root, product.bias)  # type: ignore[assignment]
    _, tree = flatten(((None,), {}))
    arguments, outputs = Structure(tree, (Value(0),)), Structure(LEAF, (Value(0),))
    root.add_submodule(name, UnitCall(linear, str(product.weight.target), arguments, outputs, ExecutionModes()))
    with root.graph.inserting_before(node):
        call = root.graph.call_module(name, (product.hidden,))
        call.meta = {**node.meta, "val": (node.meta["val"],)}
        result = root.graph.call_function(operator.getitem, (call, 0))
        result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    for unused in (node, *node.all_input_nodes[1:], product.weight):  # a transpose uses the weight
        if not unused.users and unused in root.graph.nodes:
            root.graph.erase_node(unused)
