"""Compares models whose loss works by chunks with eager ones, to rounding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captured_and_eager import CPU
from loss_models import loss_of
from megatrain_fx.capture import capture
from megatrain_fx.chunked_loss import ChunkedLoss
from megatrain_fx.passes.chunk_loss import chunk_loss
from megatrain_fx.signature import flatten_inputs


def difference(actual: Tensor | None, expected: Tensor | None) -> float:
    """The norm of the difference over that of what is expected."""
    assert actual is not None
    assert expected is not None
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None], tolerance: float) -> None:
    for number, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert difference(mine, theirs) < tolerance, number


def train_both(model: nn.Module, *args: Any, dynamic: bool = False, **kwargs: Any) -> tuple[Tensor, Tensor, nn.Module]:
    """Losses of a chunked capture of ``model`` and of an eager copy, after backward; and the copy."""
    eager = copy.deepcopy(model)
    captured = chunk_loss(capture(model, args, kwargs, device=CPU, dynamic=dynamic), 0)
    assert isinstance(captured.unit_calls[-1], ChunkedLoss)
    tensors, _ = flatten_inputs(model, args, kwargs)
    torch.manual_seed(1)
    actual = loss_of(captured.output_tree.unflatten(captured.graph_module(*tensors)))
    torch.manual_seed(1)
    expected = loss_of(eager(*args, **kwargs))
    for loss in (actual, expected):
        loss.backward()
    return actual, expected, eager


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]
