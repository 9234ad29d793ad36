"""Runs one stage by its compiled template: nothing is rerun until the gradients are there, then all at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain_fx.compiled_functions import CompiledFunctions
from megatrain_fx.compiled_template import CompiledTemplate
from megatrain_fx.ir import gradient_name
from megatrain_fx.run import Checkpoint, RandomState, Run, Tape
from megatrain_fx.stage_function import StageArguments
from megatrain_fx.stage_runner import StageRunner


@dataclass(frozen=True)
class CompiledCheckpoint(Checkpoint):
    """A checkpoint whose stage ran forward by compiled functions: eager ones would draw other random numbers."""

    functions: CompiledFunctions


@dataclass
class DeferredTape(Tape):
    """What a recompute leaves where the compiled backward is to run the stage again itself."""

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
        """Run the compiled forward, if there is one."""
        arguments = self._arguments(weights, {}, [run.values[name] for name in self.stage.inputs])
        functions = self._template.functions(self.stage, arguments)
        if functions is None:
            super().forward(run, weights)
            return
        kept = run.checkpoints.get(self.stage.index)
        if kept is not None:
            run.checkpoints[self.stage.index] = CompiledCheckpoint(
                kept.inputs, kept.versions, kept.random, kept.buffers, functions
            )
        outputs = functions.forward(arguments)
        self._keep(run, weights, Tape(dict(zip(self.stage.outputs, outputs, strict=False))))

    def recompute(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        """Leave it to the backward, if that is compiled.

        Raises:
            StaleWeightsError: an input was modified in place since the forward.
        """
        kept = run.checkpoints[self.stage.index]
        if not isinstance(kept, CompiledCheckpoint):
            super().recompute(run, weights)
            return
        self._check_unchanged(kept)
        run.tapes[self.stage.index] = DeferredTape({}, weights=weights)

    def backward(self, run: Run, leaving: Sequence[str]) -> dict[str, torch.Tensor]:
        """Run the compiled backward, which runs the forward too, or take gradients of what a recompute recorded.

        Gradients that other stages have already given inputs are added to.
        """
        tape, kept = run.tapes[self.stage.index], run.checkpoints[self.stage.index]
        if not isinstance(tape, DeferredTape) or not isinstance(kept, CompiledCheckpoint):
            return super().backward(run, leaving)
        parameters, inputs = self._gradients(run, kept, tape.weights)
        run.gradients.update({name: _sum(run.gradients.get(name), inputs.get(name)) for name in leaving})
        return {name: found for name, found in parameters.items() if found is not None and run.trains}

    def _gradients(
        self, run: Run, kept: CompiledCheckpoint, weights: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]:
        """The gradients of parameters, by name in the model, and of inputs, by name in the schedule."""
        parameters = [name for name in self.parameter_names.values() if name in self.trainable]
        inputs = [gradient_name(name) for name in self.stage.inputs if name in self._differentiable]
        pairs = zip(self.stage.outputs, kept.functions.output_requires_grad, strict=True)
        tangents = [run.gradients.get(gradient_name(name)) for name, needed in pairs if needed]
        if all(tangent is None for tangent in tangents):
            return {}, {}
        buffers = {name: buffer.clone() for name, buffer in kept.buffers.items()}
        arguments = self._arguments(weights, buffers, kept.inputs)
        with _replayed(kept.random, self._device) if kept.functions.is_random else contextlib.nullcontext():
            found = kept.functions.backward(arguments, tangents)
        return (
            dict(zip(parameters, found[: len(parameters)], strict=True)),
            dict(zip(inputs, found[len(parameters) :], strict=True)),
        )

    def _arguments(
        self, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], inputs: Sequence[Any]
    ) -> StageArguments:
        module = self.stage.module
        current = (buffers[name] if name in buffers else module.get_buffer(name) for name in self._buffer_names)
        return StageArguments(tuple(weights.values()), tuple(current), tuple(inputs))


@contextlib.contextmanager
def _replayed(random: RandomState, device: torch.device) -> Iterator[None]:
    """Let random numbers be drawn from an earlier state, with no effect on those that follow."""
    now = RandomState.read(device)
    random.restore(device)
    try:
        yield
    finally:
        now.restore(device)


def _sum(begun: torch.Tensor | None, own: torch.Tensor | None) -> torch.Tensor | None:
    if begun is None or own is None:
        return own if begun is None else begun
    return begun + own
