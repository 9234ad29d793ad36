"""Runs one stage: keeps its checkpoint, runs its template, reruns it for autograd, and takes its gradients."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call

from megatrain_fx.ir import gradient_name
from megatrain_fx.run import Checkpoint, RandomState, Run, Tape
from megatrain_fx.stages import Stage
from megatrain_fx.stage_trace import StageTrace


class StageRunner:
    """One stage of a program.

    Weights are given as views of slots; the schedule sees to it that the slots hold the right regions when a method is
    called.

    Attributes:
        stage: what is run.
        parameter_names: names in the model of the stage's parameters, by their names in the stage's module.
        trainable: names in the model of those that require gradients.
    """

    def __init__(
        self,
        stage: Stage,
        trace: StageTrace,
        names: Mapping[str, str],
        differentiable_inputs: Collection[str],
        device: torch.device,
        chaos: bool,
    ) -> None:
        """Bind a stage.

        Args:
            stage: what to run.
            trace: what is known of it.
            names: names in the model of its parameters, by their names in the stage's module.
            differentiable_inputs: names of the inputs whose gradients are wanted.
            device: where it runs.
            chaos: copy checkpoints, so that they can be spoilt when released.
        """
        self.stage = stage
        self._mutated_buffers = trace.mutated_buffers
        self._mutated_inputs = frozenset(trace.mutated_inputs)
        self.parameter_names = names
        self._differentiable = frozenset(differentiable_inputs)
        self.trainable = frozenset(names[local] for local, p in stage.parameters if p.requires_grad)
        self._device = device
        self._chaos = chaos

    def checkpoint(self, run: Run) -> None:
        """Keep what a rerun needs. Inputs are kept by reference unless the stage (or chaos mode) will change them."""
        inputs = []
        for position, name in enumerate(self.stage.inputs):
            value = run.values[name]
            copied = isinstance(value, torch.Tensor) and (self._chaos or position in self._mutated_inputs)
            inputs.append(value.detach().clone() if copied else value)
        buffers = {name: self.stage.module.get_buffer(name).detach().clone() for name in self._mutated_buffers}
        run.checkpoints[self.stage.index] = Checkpoint(tuple(inputs), RandomState.read(self._device), buffers)

    def forward(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        """Run the stage without autograd."""
        inputs = [_detached(run.values[name]) for name in self.stage.inputs]
        with torch.no_grad():
            outputs = self._call(weights, {}, inputs)
        owned = {view.untyped_storage().data_ptr() for view in weights.values()}
        for name, value in zip(self.stage.outputs, outputs, strict=True):
            run.values[name] = _own(value, owned)

    def forward_recording(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        """Run the stage once for both passes: its outputs are values, its tape waits for the backward."""
        inputs = dict(zip(self.stage.inputs, (run.values[name] for name in self.stage.inputs), strict=True))
        tape = self._record(weights, {}, inputs)
        run.tapes[self.stage.index] = tape
        owned = {view.untyped_storage().data_ptr() for view in weights.values()}
        for name, value in tape.outputs.items():
            run.values[name] = _own(_detached(value), owned)

    def recompute(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        """Run the stage again from its checkpoint, with the random numbers and buffers of the first time."""
        kept = run.checkpoints[self.stage.index]
        buffers = {name: buffer.clone() for name, buffer in kept.buffers.items()}
        now = RandomState.read(self._device)
        kept.random.restore(self._device)
        try:
            with run.modes.active():
                inputs = dict(zip(self.stage.inputs, kept.inputs, strict=True))
                run.tapes[self.stage.index] = self._record(weights, buffers, inputs)
        finally:
            now.restore(self._device)

    def backward(self, run: Run, leaving: Sequence[str]) -> dict[str, torch.Tensor]:
        """Take the gradients of the recorded stage.

        Gradients of inputs named in ``leaving`` go to ``run.gradients``; where another stage has already put one there, it
        becomes a root of autograd's graph, which makes autograd sum all contributions in the order of the whole model.

        Returns:
            The gradient of every trainable parameter that has one, by name in the model.
        """
        tape = run.tapes[self.stage.index]
        roots, root_gradients = [], []
        for name, output in tape.outputs.items():
            gradient = run.gradients.get(gradient_name(name))
            if gradient is not None and output.requires_grad:
                roots.append(output)
                root_gradients.append(gradient)
        for name, leaf in tape.inputs.items():
            begun = run.gradients.get(gradient_name(name))
            if begun is not None:
                roots.append(leaf)
                root_gradients.append(begun)
        leaves = [*tape.inputs.values(), *tape.parameters.values()]
        gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if roots and leaves:
            gradients = torch.autograd.grad(roots, leaves, root_gradients, allow_unused=True)
        found = dict(zip((*map(gradient_name, tape.inputs), *tape.parameters), gradients, strict=True))
        run.gradients.update({name: found.get(name, run.gradients.get(name)) for name in leaving})
        return {name: found[name] for name in tape.parameters if found[name] is not None}  # type: ignore[misc]

    def _record(
        self, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], inputs: dict[str, Any]
    ) -> Tape:
        leaves: dict[str, torch.Tensor] = {}
        parameters = {}
        for name, view in weights.items():
            parameters[name] = view.detach().requires_grad_(self.parameter_names[name] in self.trainable)
        passed = []
        for position, (name, value) in enumerate(inputs.items()):
            if name in self._differentiable:
                leaves[name] = value.detach().requires_grad_()
                passed.append(leaves[name].clone() if position in self._mutated_inputs else leaves[name])
            else:
                passed.append(_detached(value, copied=position in self._mutated_inputs))
        with torch.enable_grad():
            outputs = self._call(parameters, buffers, passed)
        trained = {self.parameter_names[name]: leaf for name, leaf in parameters.items() if leaf.requires_grad}
        return Tape(dict(zip(self.stage.outputs, outputs, strict=True)), leaves, trained)

    def _call(
        self, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], inputs: Sequence[Any]
    ) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = functional_call(self.stage.module, {**weights, **buffers}, tuple(inputs))
        return outputs


def _detached(value: Any, copied: bool = False) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if copied else value.detach()


def _own(value: Any, slots: set[int]) -> Any:
    """The value itself, or a copy if it is a view of weights, whose slot will soon hold others."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in slots:
        return value.clone()
    return value

