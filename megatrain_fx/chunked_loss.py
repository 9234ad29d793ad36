"""A unit call that takes the cross-entropy of its head's logits, which never exist as a whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain_fx.chunked_cross_entropy import chunked_cross_entropy
from megatrain_fx.logit_chunk import LossSettings
from megatrain_fx.private_api import backward_keeps_graph
from megatrain_fx.signature import Structure, Value
from megatrain_fx.tree import LEAF, flatten
from megatrain_fx.unit_call import UnitCall


class ChunkedLoss(UnitCall):
    """Calls a head, an ``nn.Linear``, and takes the cross-entropy of its logits.

    Where gradients are wanted they are computed with the loss, while each chunk of logits is there, and kept in place
    of the logits; the backward pass only scales them.

    Attributes:
        settings: what is computed.
        loss_dtype: of the result.
        class_dim: the dimension of the hidden states that the head takes for its own; all others are rows.
    """

    def __init__(self, head: UnitCall, settings: LossSettings, loss_dtype: torch.dtype, class_dim: int) -> None:
        _, tree = flatten(((None, None), {}))
        arguments, outputs = Structure(tree, (Value(0), Value(1))), Structure(LEAF, (Value(0),))
        super().__init__(head.unit, head.path, arguments, outputs, head.modes)
        self.settings = settings
        self.loss_dtype = loss_dtype
        self.class_dim = class_dim

    def forward(self, *values: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
        """The loss, a scalar, given hidden states (of any shape) and targets.

        Targets are class numbers, ``int64``, of the shape of the hidden states without ``class_dim``.
        """
        hidden, targets = values
        assert isinstance(hidden, torch.Tensor)
        assert isinstance(targets, torch.Tensor)
        assert isinstance(self.unit, nn.Linear)
        rows = hidden.movedim(self.class_dim, -1).reshape(-1, self.unit.in_features)
        with self.modes.active():
            dtype = _product_dtype(rows)
        loss: torch.Tensor = _Loss.apply(
            rows, self.unit.weight, self.unit.bias, targets.reshape(-1), dtype, self.settings, torch.is_grad_enabled()
        )
        return (loss.to(self.loss_dtype),)

    def extra_repr(self) -> str:
        steps = "".join(f", {step}" for step in self.settings.steps)
        return f"{super().extra_repr()}, chunk_bytes={self.settings.chunk_bytes}{steps}"


class _Loss(torch.autograd.Function):
    """The loss as autograd sees it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        product_dtype: torch.dtype,
        settings: LossSettings,
        gradients: bool,
    ) -> torch.Tensor:
        """The loss, a scalar of ``settings.dtype``; ``gradients`` tells whether a backward pass may follow."""
        wanted = [gradients and needed for needed in ctx.needs_input_grad[:3]]
        loss, factor, *found = chunked_cross_entropy(hidden, weight, bias, targets, wanted, product_dtype, settings)
        ctx.save_for_backward(factor, *found)
        ctx.wanted = wanted
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients, in place unless another backward pass will follow.

        Raises:
            RuntimeError: gradients of gradients were asked for.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradients of a loss by chunks cannot be differentiated again: call backward() or "
                "torch.autograd.grad() without create_graph=True, or compile with loss_chunk_bytes=None"
            )
        factor, *found = ctx.saved_tensors
        factor = torch.where(factor == 0, factor, factor * gradient)
        scale = torch.Tensor.mul if backward_keeps_graph() else torch.Tensor.mul_
        scaled = [scale(one, factor) if wanted else None for one, wanted in zip(found, ctx.wanted, strict=True)]
        return (*scaled, None, None, None, None)


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype in which a linear layer would compute here, under autocast or not."""
    kind = hidden.device.type
    casts = torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if casts else hidden.dtype
