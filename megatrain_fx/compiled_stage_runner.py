"""Runs one stage by its compiled template: nothing is rerun until the gradients are there, then all at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain_fx.compiled_functions import CompiledFunctions
from megatrain_fx.compiled_template import CompiledTemplate
from megatrain_fx.ir import gradient_name
from megatrain_fx.run import Checkpoint, RandomState, Run, Tape
from megatrain_fx.stage_function import StageArguments
from megatrain_fx.stage_runner import StageRunner


@dataclass
class DeferredTape(Tape):
    """What a recompute leaves when the compiled backward is to run the stage again itself."""

    functions: CompiledFunctions | None = None
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)


class CompiledStageRunner(StageRunner):
    """One stage of a program, whose template may be compiled; where it is not, it runs as :class:`StageRunner` does."""

    def __init__(self, template: CompiledTemplate, *binding: Any) -> None:
        """Bind a stage.

        Args:
            template: of the stage.
            *binding: as for :class:`StageRunner`.
        """
        super().__init__(*binding)
        self._template = template
        self._buffer_names = tuple(name for name, _ in self.stage.module.named_buffers())

    def forward(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        arguments = self._arguments(weights, {}, [run.values[name] for name in self.stage.inputs])
        functions = self._template.functions(arguments)
        if functions is None:
            super().forward(run, weights)
            return
        outputs = functions.forward(arguments)
        self._keep(run, weights, Tape(dict(zip(self.stage.outputs, outputs, strict=False))))

    def recompute(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        kept = run.checkpoints[self.stage.index]
        functions = self._template.functions(self._arguments(weights, {}, kept.inputs))
        if functions is None:
            super().recompute(run, weights)
            return
        self._check_unchanged(kept)
        run.tapes[self.stage.index] = DeferredTape({}, functions=functions, weights=weights)

    def backward(self, run: Run, leaving: Sequence[str]) -> dict[str, torch.Tensor]:
        tape = run.tapes[self.stage.index]
        if not isinstance(tape, DeferredTape) or tape.functions is None:
            return super().backward(run, leaving)
        found = self._gradients(run, tape.functions, tape.weights)
        for name in leaving:
            found[name] = _sum(run.gradients.get(name), found.get(name))
        run.gradients.update((name, found[name]) for name in leaving)
        trained = self._trained() if run.trains else []
        return {name: found[name] for name in trained if found[name] is not None}

    def _gradients(
        self, run: Run, functions: CompiledFunctions, weights: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor | None]:
        """The gradients of parameters, by name in the model, and of inputs, by name in the schedule."""
        pairs = zip(self.stage.outputs, functions.output_requires_grad, strict=True)
        tangents = [run.gradients.get(gradient_name(name)) for name, needed in pairs if needed]
        names = [*self._trained(), *(gradient_name(n) for n in self.stage.inputs if n in self._differentiable)]
        if all(tangent is None for tangent in tangents):
            return dict.fromkeys(names)
        kept = run.checkpoints[self.stage.index]
        buffers = {name: buffer.clone() for name, buffer in kept.buffers.items()}
        arguments = self._arguments(weights, buffers, kept.inputs)
        if not functions.is_random:
            return dict(zip(names, functions.backward(arguments, tangents), strict=True))
        now = RandomState.read(self._device)
        kept.random.restore(self._device)
        try:
            return dict(zip(names, functions.backward(arguments, tangents), strict=True))
        finally:
            now.restore(self._device)

    def _trained(self) -> list[str]:
        return [name for name in self.parameter_names.values() if name in self.trainable]

    def _arguments(
        self, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], inputs: Sequence[Any]
    ) -> StageArguments:
        module = self.stage.module
        current = (buffers[name] if name in buffers else module.get_buffer(name) for name in self._buffer_names)
        return StageArguments(tuple(weights.values()), tuple(current), tuple(inputs))


def _sum(begun: torch.Tensor | None, own: torch.Tensor | None) -> torch.Tensor | None:
    if begun is None or own is None:
        return own if begun is None else begun
    return begun + own
