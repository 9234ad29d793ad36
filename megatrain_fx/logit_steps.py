"""Logit steps: what a model does to every logit between its head and its loss, and the derivative of that."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class Pointwise(enum.Enum):
    """An elementwise operation on logits."""

    CAST = "cast"
    MULTIPLY = "multiply"
    DIVIDE = "divide"
    TANH = "tanh"


@dataclass(frozen=True)
class LogitStep:
    """One operation, with the number or the dtype that it takes; its text, such as ``divide 30.0``, parses back."""

    operation: Pointwise
    number: float = 1.0
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        operands = {
            Pointwise.CAST: [str(self.dtype).removeprefix("torch.")],
            Pointwise.MULTIPLY: [repr(self.number)],
            Pointwise.DIVIDE: [repr(self.number)],
            Pointwise.TANH: [],
        }
        return " ".join([self.operation.value, *operands[self.operation]])

    @classmethod
    def parse(cls, text: str) -> LogitStep:
        """The step that prints as ``text``."""
        word, _, operand = text.partition(" ")
        operation = Pointwise(word)
        if operation is Pointwise.CAST:
            return cls(operation, dtype=getattr(torch, operand))
        return cls(operation) if operation is Pointwise.TANH else cls(operation, float(operand))


@dataclass(frozen=True)
class AppliedStep:
    """What the derivative of a step needs: the dtype of its input, and its result if that is a tanh."""

    step: LogitStep
    dtype: torch.dtype
    tanh: torch.Tensor | None


def apply_steps(steps: Sequence[LogitStep], logits: torch.Tensor) -> tuple[torch.Tensor, list[AppliedStep]]:
    """The result of all steps in order, each rounded as by itself, and what their derivatives need."""
    applied = []
    for step in steps:
        before = logits.dtype
        logits = _apply(step, logits)
        applied.append(AppliedStep(step, before, logits if step.operation is Pointwise.TANH else None))
    return logits, applied


def differentiate_steps(applied: Sequence[AppliedStep], gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of the steps' input, given that of their result; ``gradient`` may be overwritten."""
    for one in reversed(applied):
        if one.tanh is not None:
            gradient = torch.ops.aten.tanh_backward(gradient, one.tanh)
        elif one.step.operation is Pointwise.MULTIPLY:
            gradient = gradient.mul_(one.step.number)
        elif one.step.operation is Pointwise.DIVIDE:
            gradient = gradient.div_(one.step.number)
        else:
            gradient = gradient.to(one.dtype)
    return gradient


def _apply(step: LogitStep, logits: torch.Tensor) -> torch.Tensor:
    if step.operation is Pointwise.TANH:
        return torch.tanh(logits)
    if step.operation is Pointwise.MULTIPLY:
        return logits * step.number
    if step.operation is Pointwise.DIVIDE:
        return logits / step.number
    return logits.to(step.dtype)
