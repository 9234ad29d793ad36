"""The operator ``megatrain_fx::chunked_cross_entropy``: a linear head and its loss, with gradients, by chunks of rows.

It is an operator so that whoever traces a stage meets one node, whatever the number of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from megatrain_fx.logit_chunk import LossSettings
from megatrain_fx.logit_steps import LogitStep

_NAME = "megatrain_fx::chunked_cross_entropy"

# After the tensors: the gradients that are wanted, the dtype of products, and the settings.
torch.library.define(
    _NAME,
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, bool[] wanted, ScalarType product_dtype, bool mean, "
    "int ignore_index, float label_smoothing, str[] steps, ScalarType dtype, int chunk_bytes, bool compiled) "
    "-> (Tensor loss, Tensor factor, Tensor hidden_gradient, Tensor weight_gradient, Tensor bias_gradient)",
)

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    wanted: Sequence[bool],
    product_dtype: torch.dtype,
    settings: LossSettings,
) -> Results:
    """Cross-entropy of the logits ``hidden @ weight.T + bias``, which are never made as a whole; no value is read back.

    Args:
        hidden: (rows, width).
        weight: (classes, width).
        bias: (classes), or None.
        targets: (rows), ``int64``: class numbers, or ``settings.ignore_index``.
        wanted: whether the gradients of ``hidden``, ``weight`` and ``bias`` are wanted.
        product_dtype: of the matrix products, and so of the logits.
        settings: what to compute.

    Returns:
        The loss, a scalar of ``settings.dtype``; a scalar by which the gradients are yet to be multiplied (with
        ``torch.float16`` products, the division by the number of targets, lest small gradients vanish; 0 if there is no
        target); the gradients of ``hidden``, ``weight`` and ``bias``, of the dtype and shape of what they are of, or
        empty where not wanted.
    """
    results: Results = torch.ops.megatrain_fx.chunked_cross_entropy(
        hidden,
        weight,
        bias,
        targets,
        list(wanted),
        product_dtype,
        settings.mean,
        settings.ignore_index,
        settings.label_smoothing,
        [str(step) for step in settings.steps],
        settings.dtype,
        settings.chunk_bytes,
        settings.compiled,
    )
    return results


def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    wanted: Sequence[bool],
    product_dtype: torch.dtype,
    mean: bool,
    ignore_index: int,
    label_smoothing: float,
    steps: Sequence[str],
    dtype: torch.dtype,
    chunk_bytes: int,
    compiled: bool,
) -> Results:
    parsed = tuple(map(LogitStep.parse, steps))
    settings = LossSettings(mean, ignore_index, label_smoothing, parsed, dtype, chunk_bytes, compiled)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        return run_by_chunks(hidden, weight, bias, targets, wanted, product_dtype, settings)


torch.library.impl(_NAME, "CompositeExplicitAutograd", _run)


@torch.library.register_fake(_NAME)
def _infer(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    wanted: Sequence[bool],
    product_dtype: torch.dtype,
    mean: bool,
    ignore_index: int,
    label_smoothing: float,
    steps: Sequence[str],
    dtype: torch.dtype,
    chunk_bytes: int,
    compiled: bool,
) -> Results:
    scalars = hidden.new_empty((), dtype=dtype), hidden.new_empty((), dtype=dtype)
    return (*scalars, *_empty_gradients(hidden, weight, bias, wanted))


def run_by_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    wanted: Sequence[bool],
    product_dtype: torch.dtype,
    settings: LossSettings,
) -> Results:
    """What the operator does (see :func:`chunked_cross_entropy`), in the modes that it sets."""
    count = (targets != settings.ignore_index).sum().to(settings.dtype)
    one = torch.ones((), dtype=settings.dtype, device=hidden.device)
    share = one / count.clamp(min=1) if settings.mean else one
    now, later = (one, share) if product_dtype is torch.float16 else (share, one)
    later = later * (count > 0)  # without a target all gradients are zero, also if the mean, NaN, is used non-linearly
    sums = _Sums(torch.zeros_like(one), *_empty_gradients(hidden, weight, bias, wanted))
    sums.weight_gradient.zero_()
    sums.bias_gradient.zero_()
    weight = weight.to(product_dtype)
    bias = None if bias is None else bias.to(product_dtype)
    for rows in settings.chunks(hidden.shape[0], weight.shape[0]):
        sums.add(rows, hidden[rows].to(product_dtype), weight, bias, targets[rows], now, wanted, settings)
    loss = sums.loss / count if settings.mean else sums.loss
    return loss, later, sums.hidden_gradient, sums.weight_gradient, sums.bias_gradient


@dataclass
class _Sums:
    """What chunks add up to."""

    loss: torch.Tensor
    hidden_gradient: torch.Tensor
    weight_gradient: torch.Tensor
    bias_gradient: torch.Tensor

    def add(
        self,
        rows: slice,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: torch.Tensor,
        wanted: Sequence[bool],
        settings: LossSettings,
    ) -> None:
        """Add one chunk. Nothing as large as its logits outlives the call."""
        loss, gradient = settings.chunk(F.linear(hidden, weight, bias), targets, scale, settings, any(wanted))
        self.loss += loss
        if gradient is None:
            return
        if wanted[0]:
            self.hidden_gradient[rows] = gradient @ weight
        if wanted[1]:
            _add_product(self.weight_gradient, gradient, hidden, settings.chunk_bytes)
        if wanted[2]:
            self.bias_gradient += gradient.sum(0)


def _empty_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised tensors for the gradients, without elements where none is wanted."""
    of_bias = hidden.new_empty(0) if bias is None or not wanted[2] else torch.empty_like(bias)
    return (
        torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0),
        torch.empty_like(weight) if wanted[1] else hidden.new_empty(0),
        of_bias,
    )


def _add_product(total: torch.Tensor, gradient: torch.Tensor, hidden: torch.Tensor, most_bytes: int) -> None:
    """Add ``gradient.T @ hidden``; where dtypes differ, by blocks of classes, to keep the product small."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.t(), hidden)
        return
    size = max(most_bytes // (hidden.shape[1] * hidden.element_size()), hidden.shape[1])
    for start in range(0, total.shape[0], size):
        block = slice(start, start + size)
        total[block] += gradient[:, block].t() @ hidden
