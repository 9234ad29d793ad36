"""Compares a captured graph, run under autograd with its real units, with the eager model, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatrain_fx.capture import Captured, capture
from megatrain_fx.signature import flatten_inputs
from megatrain_fx.tree import flatten, leaf_names
from models import scalar_loss

CPU = torch.device("cpu")


def assert_capture_equals_eager(model: nn.Module, *args: Any, dynamic: bool = False, **kwargs: Any) -> Captured:
    """Capture a call and check that the graph does what the model does; returns what was captured."""
    captured = capture(model, args, kwargs, device=CPU, dynamic=dynamic)
    assert_equals_eager(captured, model, args, kwargs)
    return captured


def assert_equals_eager(
    captured: Captured, model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> None:
    """Check outputs, gradients of parameters and inputs, buffers, and the random numbers that are drawn."""
    eager = copy.deepcopy(model)
    eager_args, eager_kwargs = copy.deepcopy((tuple(args), dict(kwargs or {})))
    torch.manual_seed(7)
    expected = eager.forward(*eager_args, **eager_kwargs)
    expected_state = torch.get_rng_state()
    tensors, _ = flatten_inputs(model, args, kwargs or {})
    torch.manual_seed(7)
    actual = captured.output_tree.unflatten(captured.graph_module(*tensors))
    assert torch.equal(torch.get_rng_state(), expected_state), "the numbers drawn differ"
    assert_same_tree(actual, expected)
    expected_tensors, _ = flatten_inputs(model, eager_args, eager_kwargs)
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in flatten(expected)[0]):
        for output, owner in ((actual, model), (expected, eager)):
            owner.zero_grad()
            scalar_loss(output).backward()
    assert_same_gradients(model, eager)
    for position, (mine, theirs) in enumerate(zip(tensors, expected_tensors, strict=True)):
        assert_same(mine, theirs, f"input {position} after the call")
        assert_same(mine.grad, theirs.grad, f"gradient of input {position}")


def assert_same_tree(actual: Any, expected: Any) -> None:
    (mine, mine_tree), (theirs, theirs_tree) = flatten(actual), flatten(expected)
    assert mine_tree == theirs_tree
    for name, one, other in zip(leaf_names(theirs_tree, "output"), mine, theirs, strict=True):
        if isinstance(other, Tensor):
            assert_same(one, other, name)
            assert one.requires_grad == other.requires_grad, name
        else:
            assert type(one) is type(other), name
            assert one == other, name


def assert_same_gradients(model: nn.Module, eager: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert_same(mine.grad, theirs.grad, f"gradient of {name}")
    for (name, mine), theirs in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert_same(mine, theirs, f"buffer {name}")


def assert_same(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    if actual is None or expected is None:
        assert actual is expected, name
        return
    assert actual.dtype == expected.dtype, name
    assert torch.equal(actual, expected), f"{name} differs by {(actual - expected).abs().max()}"
