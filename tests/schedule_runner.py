"""Runs any schedule of a traced example in chaos mode, and the same step in eager PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megatrain_fx.extension import runtime as native
from megatrain_fx.pass_manager import PassResult
from megatrain_fx.program_cache import ProgramCache
from megatrain_fx.schedule import Schedule
from models import scalar_loss, tensors
from traced_examples import TracedExample


@dataclass(frozen=True)
class StepResult:
    """Loss, outputs and gradients of one training step."""

    loss: Tensor
    outputs: tuple[Tensor, ...]
    gradients: dict[str, Tensor | None]

    def equals(self, other: StepResult, *, exactly: bool = True) -> bool:
        """Whether all numbers are equal, bit for bit or (gradients only) to rounding."""
        pairs = list(zip((self.loss, *self.outputs), (other.loss, *other.outputs), strict=True))
        if not all(torch.equal(one, two) for one, two in pairs) or self.gradients.keys() != other.gradients.keys():
            return False
        return all(_equal(one, other.gradients[name], exactly) for name, one in self.gradients.items())


def _equal(one: Tensor | None, two: Tensor | None, exactly: bool) -> bool:
    if one is None or two is None:
        return one is two
    return torch.equal(one, two) if exactly else torch.allclose(one, two, rtol=1e-4, atol=1e-6)


class ScheduleRunner:
    """Runs schedules of one example. Nothing verifies them here."""

    def __init__(self, traced: TracedExample, delay_us: int) -> None:
        """``delay_us``: longest delay before an operation, in microseconds."""
        self._traced = traced
        traced.streamed._lanes = native.Runtime(torch.device("cpu"), 1, chaos_delay_us=delay_us)

    def eager(self) -> StepResult:
        """One step of the uncompiled model."""
        return self._step(self._traced.example.make_model())

    def run(self, schedule: Schedule) -> StepResult:
        """One step of the compiled model by a given schedule, bound anew."""
        program = self._traced.program
        changed = PassResult(program.graph_module, (("given", schedule),))
        streamed = self._traced.streamed
        streamed._bound.clear()
        streamed.programs = ProgramCache()
        streamed.programs.add(program.capture.signature, replace(program, lowered=changed))
        return self._step(self._traced.model)

    def _step(self, model: nn.Module) -> StepResult:
        args, kwargs = self._traced.example.make_inputs()
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        outputs = model(*args, **kwargs)
        loss = scalar_loss(outputs)
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        return StepResult(loss.detach(), tuple(tensor.detach() for tensor in tensors(outputs)), gradients)
