"""A chunk of logits: its cross-entropy and the gradient of that, eager or compiled, with few temporaries."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatrain_fx.logit_steps import LogitStep, apply_steps, differentiate_steps

_ROWS = 64
"""Chunks have a multiple of this many rows: matrix products of fewer take as long as reading the weight."""

Chunk = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "LossSettings", bool], tuple[torch.Tensor, torch.Tensor | None]
]


@dataclass(frozen=True)
class LossSettings:
    """What is computed of the logits, and in how much memory.

    Attributes:
        mean: the sum of the losses is divided by the number of targets that are not ignored.
        ignore_index: the target that stands for none.
        label_smoothing: the share of every target that is spread over all classes.
        steps: what is done to the logits first.
        dtype: of the cross-entropy and of sums of losses; logits are cast to it.
        chunk_bytes: the most that a chunk of logits in ``dtype`` may take, as far as a chunk of 64 rows allows.
        compiled: fuse what is done to a chunk with ``torch.compile``.
    """

    mean: bool
    ignore_index: int
    label_smoothing: float
    steps: tuple[LogitStep, ...]
    dtype: torch.dtype
    chunk_bytes: int
    compiled: bool

    def chunks(self, rows: int, classes: int) -> Iterator[slice]:
        """Runs of rows, as few as fit, of one size but for the last."""
        most = max(self.chunk_bytes // (classes * self.dtype.itemsize * _ROWS), 1) * _ROWS
        count = max(-(-rows // most), 1)
        size = max(-(-rows // (count * _ROWS)), 1) * _ROWS
        return (slice(start, min(start + size, rows)) for start in range(0, rows, size))

    @property
    def chunk(self) -> Chunk:
        """The function for chunks."""
        return _compiled_chunk() if self.compiled else differentiated_loss


def differentiated_loss(
    logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, settings: LossSettings, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The cross-entropy of some rows of logits, and its gradient.

    With p the softmax of a row of n logits, t its target and s the label smoothing, the loss is, as PyTorch defines it,
    ``-(1 - s) log p[t] - s / n sum(log p)``, and its gradient ``p - s / n``, less ``1 - s`` at t.

    Args:
        logits: (rows, classes), as the head returns them; overwritten.
        targets: (rows), ``int64``: class numbers, or ``settings.ignore_index``.
        scale: of the gradient, a scalar tensor of ``settings.dtype``.
        settings: what to compute.
        wanted: whether the gradient is wanted.

    Returns:
        The sum of the losses of the rows, a scalar of ``settings.dtype``; the gradient of the logits of ``scale`` times
        that sum, in the dtype and shape of the logits, or None.
    """
    read, applied = apply_steps(settings.steps, logits)
    dtype, spread, kept = read.dtype, settings.label_smoothing / read.shape[1], 1 - settings.label_smoothing
    values = read.to(settings.dtype)
    if values is read and applied and read is applied[-1].tanh:
        values = read.clone()  # what a step keeps for its derivative is not overwritten
    del logits, read  # from here on one tensor is as large as the chunk, and everything happens in it
    valid = (targets != settings.ignore_index).unsqueeze(1)
    index = torch.where(valid, targets.unsqueeze(1), 0)
    values.sub_(values.amax(1, keepdim=True))
    picked = values.gather(1, index)
    losses = -kept * picked
    if spread:
        losses = losses - spread * values.sum(1, keepdim=True)
    total = values.exp_().sum(1, keepdim=True)
    loss = torch.where(valid, losses + total.log(), 0).sum()
    if not wanted:
        return loss, None
    if spread:
        values.sub_(spread * total)
    values.scatter_(1, index, picked.exp() - (kept + spread) * total)
    gradient = values if dtype == values.dtype else torch.empty_like(values, dtype=dtype)
    torch.mul(values, torch.where(valid, scale / total, 0), out=gradient)
    return loss, differentiate_steps(applied, gradient)


class _CompiledChunk:
    """:func:`differentiated_loss` compiled; as it is from then on if compiling fails at the first call."""

    def __init__(self) -> None:
        self._function: Chunk = torch.compile(differentiated_loss)
        self._tried = False

    def __call__(
        self, logits: torch.Tensor, targets: torch.Tensor, scale: torch.Tensor, settings: LossSettings, wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._tried:
            return self._function(logits, targets, scale, settings, wanted)
        self._tried = True
        try:
            return self._function(logits, targets, scale, settings, wanted)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # no compiler, or one that cannot compile this: nothing has been overwritten yet
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"the loss by chunks runs uncompiled, since torch.compile failed: {reason}", stacklevel=2)
            self._function = differentiated_loss
            return self._function(logits, targets, scale, settings, wanted)


@functools.cache
def _compiled_chunk() -> _CompiledChunk:
    """One for all losses, so that equal ones are compiled once."""
    return _CompiledChunk()
