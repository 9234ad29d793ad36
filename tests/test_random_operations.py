"""Random operations of compiled graphs: whether, and how, two graphs compiled apart draw the same numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from megatrain_fx.random_operations import DECOMPOSITIONS, inductor_options, keep_random, random_nodes

aten = torch.ops.aten

# Attention of the GPU's, which draws its own numbers; dropout is its fourth argument.
_attention = aten._scaled_dot_product_flash_attention.default
SEEDED = {"pattern_matcher": False}
AS_EAGER = {"pattern_matcher": False, "fallback_random": True}


def first(node: fx.Node) -> fx.Node:
    return node.graph.call_function(operator.getitem, (node, 0))


def dropout(node: fx.Node) -> fx.Node:
    return first(node.graph.call_function(aten.native_dropout.default, (node, 0.1, True)))


def attention(node: fx.Node, *settings: Any) -> fx.Node:
    return first(node.graph.call_function(_attention, (node, node, node, *settings)))


def noise(node: fx.Node) -> fx.Node:
    return node.graph.call_function(aten.randn_like.default, (node,))


def choice(node: fx.Node) -> fx.Node:
    return node.graph.call_function(aten.multinomial.default, (node, 1))


def graph_of(body: Callable[[fx.Node], Any]) -> fx.Graph:
    graph = fx.Graph()
    graph.output(body(graph.placeholder("x")))
    return fx.GraphModule(torch.nn.Module(), graph).graph


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (lambda x: attention(x), {}),
        (lambda x: attention(x, 0.0), {}),
        (lambda x: [dropout(x), noise(x)], SEEDED),
        (lambda x: attention(x, 0.1), AS_EAGER),
        (lambda x: dropout(attention(dropout(x), 0.1)), AS_EAGER),
        (lambda x: choice(x), AS_EAGER),
        (lambda x: choice(choice(x)), AS_EAGER),
    ],
)
def test_graphs_whose_order_is_fixed(body: Callable[[fx.Node], Any], options: dict[str, Any]) -> None:
    assert inductor_options(graph_of(body)) == options


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (lambda x: [dropout(x), attention(x, 0.1)], ["native_dropout", "flash_attention"]),
        (lambda x: choice(noise(x)), ["multinomial", "randn_like"]),
        (lambda x: [choice(x), choice(x)], ["multinomial"]),
        (lambda x: attention(x.graph.call_function(aten.empty_like.default, (choice(x),)), 0.1), ["multinomial"]),
    ],
)
def test_graphs_whose_order_is_not(body: Callable[[fx.Node], Any], names: list[str]) -> None:
    reason = inductor_options(graph_of(body))
    assert isinstance(reason, str)
    assert all(name in reason for name in names)


def test_random_nodes_on_which_no_result_depends_are_kept() -> None:
    graph = graph_of(lambda x: [dropout(x), noise(x), x])
    (output,) = graph.find_nodes(op="output")
    wanted, drawn, unchanged = output.args[0]
    kept = keep_random(graph, [wanted, unchanged, None])
    assert kept == [wanted, unchanged, None, drawn]
    output.args = (kept,)
    graph.eliminate_dead_code()
    assert len(random_nodes(graph)) == 2


def test_dropout_on_the_cpu_becomes_seeded() -> None:
    def dropped(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(values, 0.25)

    traced = torch.fx.experimental.proxy_tensor.make_fx(dropped, dict(DECOMPOSITIONS))(torch.ones(4, 1000))
    assert inductor_options(traced.graph) == SEEDED
    result = traced(torch.ones(4, 1000))
    assert set(result.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert 0.7 < (result > 0).float().mean().item() < 0.8
