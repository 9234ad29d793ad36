"""The function of a stage, forward and vector-Jacobian product, in the form in which it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatrain_fx.private_api import size_at, version_of
from megatrain_fx.stages import Stage
from megatrain_fx.stateless_module import StatelessModule

Values = Sequence[Any]


@dataclass(frozen=True)
class StageArguments:
    """What the function of a stage is given.

    Attributes:
        parameters: in the order of the stage's module.
        buffers: in the order of the stage's module.
        inputs: in the order of the stage; an int where the captured graph has a symbolic size.
    """

    parameters: tuple[torch.Tensor, ...]
    buffers: tuple[torch.Tensor, ...]
    inputs: tuple[Any, ...]

    @classmethod
    def of_stage(cls, stage: Stage) -> StageArguments:
        """Those with which the stage was captured, with symbolic sizes still in them."""
        parameters = tuple(parameter for _, parameter in stage.parameters)
        return cls(parameters, tuple(buffer for _, buffer in stage.module.named_buffers()), tuple(stage.input_examples))

    def fakes(self, device: torch.device) -> StageArguments:
        """Equal ones of the active fake mode, on the compute device, at the sizes for which symbols were made."""

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return size_at(value, scaled=False)
            sizes = [size_at(size, scaled=False) for size in value.shape]
            strides = [size_at(stride, scaled=False) for stride in value.stride()]
            place = value.device if value.device.type == "cpu" and value.ndim == 0 else device
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=place)

        return StageArguments(*(tuple(map(fake, values)) for values in (self.parameters, self.buffers, self.inputs)))


class StageFunction:
    """Runs a stage on given arguments; it also writes down what a record of operations does not show.

    Attributes:
        output_requires_grad: for each output of the last run.
        mutated_buffers: names in the stage's module of the buffers that the last run updated or replaced.
        replaced_buffers: those of them that it replaced by other tensors.
        mutated_inputs: positions of the inputs that it modified in place.
    """

    def __init__(self, stage: Stage, input_requires_grad: Sequence[bool]) -> None:
        self.stage = stage
        self._stateless = StatelessModule(stage.module)
        self.input_requires_grad = input_requires_grad
        self._state: dict[str, torch.Tensor] = {}
        self.output_requires_grad: tuple[bool, ...] = ()
        self.mutated_buffers: tuple[str, ...] = ()
        self.replaced_buffers: tuple[str, ...] = ()
        self.mutated_inputs: tuple[int, ...] = ()

    def forward(self, parameters: Values, buffers: Values, inputs: Values) -> tuple[Values, list[torch.Tensor]]:
        """The outputs, and the leaves of autograd's graph: trainable parameters, then differentiable inputs."""
        leaves = [
            tensor.detach().requires_grad_(parameter.requires_grad)
            for tensor, (_, parameter) in zip(parameters, self.stage.parameters, strict=True)
        ]
        wanted = list(zip(inputs, self.input_requires_grad, strict=True))
        roots = [v.detach().requires_grad_() if needed and isinstance(v, torch.Tensor) else v for v, needed in wanted]
        passed = [v.clone() if isinstance(v, torch.Tensor) and v.requires_grad else v for v in roots]
        outputs = self._call(leaves, buffers, passed)
        self.output_requires_grad = tuple(isinstance(o, torch.Tensor) and o.requires_grad for o in outputs)
        return outputs, [x for x in (*leaves, *roots) if isinstance(x, torch.Tensor) and x.requires_grad]

    def _call(self, leaves: Values, buffers: Values, passed: Values) -> Values:
        names = [name for name, _ in self.stage.module.named_buffers()]
        state = dict(zip((name for name, _ in self.stage.parameters), leaves, strict=True))
        state.update(zip(names, buffers, strict=True))
        self._state = dict(state)
        values = (*buffers, *passed)
        before = [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in values]
        outputs: Values = self._stateless(state, passed)
        after = [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in values]
        changed = [old != new for old, new in zip(before, after, strict=True)]
        replaced = [state[name] is not buffer for name, buffer in zip(names, buffers, strict=True)]
        flags = zip(names, changed[: len(names)], replaced, strict=True)
        self.mutated_buffers = tuple(name for name, in_place, other in flags if in_place or other)
        self.replaced_buffers = tuple(name for name, other in zip(names, replaced, strict=True) if other)
        self.mutated_inputs = tuple(position for position, one in enumerate(changed[len(names) :]) if one)
        return outputs

    def differentiate(
        self, outputs: Values, leaves: Sequence[torch.Tensor], tangents: Values
    ) -> list[torch.Tensor | None]:
        """The gradients of the last run's leaves, None where there is none.

        Args:
            outputs: of the last run.
            leaves: of the last run.
            tangents: one for each output that requires grad.
        """
        roots = [output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
        if not roots or not leaves:
            return [None] * len(leaves)
        found = self._stateless.within(
            self._state, lambda: torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
        )
        return list(found)
