"""Runs one stage: keeps its checkpoint, runs its template, reruns it for autograd, and takes its gradients."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megatrain_fx.errors import StaleWeightsError
from megatrain_fx.ir import gradient_name
from megatrain_fx.private_api import version_of
from megatrain_fx.run import Checkpoint, RandomState, Run, Tape
from megatrain_fx.stage_trace import StageTrace
from megatrain_fx.stages import Stage
from megatrain_fx.stateless_module import StatelessModule


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
        grad: bool,
    ) -> None:
        """Bind a stage.

        Args:
            stage: what to run.
            trace: what is known of it.
            names: names in the model of its parameters, by their names in the stage's module.
            differentiable_inputs: names of the inputs whose gradients are wanted.
            device: where it runs.
            chaos: copy checkpoints, so that they can be spoilt when released.
            grad: whether the call is made with gradients enabled.
        """
        self.stage = stage
        self._stateless = StatelessModule(stage.module)
        self._mutated_buffers = trace.mutated_buffers
        self._mutated_inputs = frozenset(trace.mutated_inputs)
        self.parameter_names = names
        self._differentiable = frozenset(differentiable_inputs)
        self.trainable = frozenset(names[local] for local, p in stage.parameters if p.requires_grad)
        self._device = device
        self._chaos = chaos
        self._grad = grad

    def checkpoint(self, run: Run) -> None:
        """Keep what a rerun needs. Inputs are kept by reference unless the stage (or chaos mode) will change them."""
        inputs = []
        for position, name in enumerate(self.stage.inputs):
            value = run.values[name]
            copied = isinstance(value, torch.Tensor) and (self._chaos or position in self._mutated_inputs)
            inputs.append(value.detach().clone() if copied else value)
        buffers = {name: self.stage.module.get_buffer(name).detach().clone() for name in self._mutated_buffers}
        random = RandomState.read(self._device)
        run.checkpoints[self.stage.index] = Checkpoint(tuple(inputs), _versions(inputs), random, buffers)

    def forward(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        """Run the stage and keep nothing for autograd.

        Where the call has gradients enabled, so has this: modules and kernels choose other ways, with other
        roundings, when they see that none is wanted.
        """
        if self._grad:
            self._keep(run, weights, self._record(weights, {}, self._inputs(run)))
            return
        inputs = [_detached(value) for value in self._inputs(run).values()]
        with torch.no_grad():
            outputs = self._call(self._parameters(weights), {}, inputs)
        self._keep(run, weights, Tape(dict(zip(self.stage.outputs, outputs, strict=True))))

    def forward_recording(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        """Run the stage once for both passes: its outputs are values, its tape waits for the backward."""
        tape = self._record(weights, {}, self._inputs(run))
        run.tapes[self.stage.index] = tape
        self._keep(run, weights, tape)

    def recompute(self, run: Run, weights: Mapping[str, torch.Tensor]) -> None:
        """Run the stage again from its checkpoint, with the random numbers and buffers of the first time.

        Raises:
            StaleWeightsError: an input was modified in place since.
        """
        kept = run.checkpoints[self.stage.index]
        self._check_unchanged(kept)
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

        Gradients of inputs named in ``leaving`` go to ``run.gradients``; where another stage has already put one
        there, it becomes a root of autograd's graph, which makes autograd sum all contributions in the order of the
        whole model.

        Returns:
            The gradient of every trainable parameter that has one, by name in the model; none if they are not wanted.
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
        parameters = tape.parameters if run.trains else {}
        leaves = [*tape.inputs.values(), *parameters.values()]
        gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
        if roots and leaves:
            gradients = self._stateless.within(
                tape.state, lambda: torch.autograd.grad(roots, leaves, root_gradients, allow_unused=True)
            )
        found = dict(zip((*map(gradient_name, tape.inputs), *parameters), gradients, strict=True))
        run.gradients.update({name: found.get(name, run.gradients.get(name)) for name in leaving})
        return {name: found[name] for name in parameters if found[name] is not None}  # type: ignore[misc]

    def _record(
        self, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], inputs: dict[str, Any]
    ) -> Tape:
        """Run the stage for autograd, on copies of the inputs that it modifies in place: no leaf may be modified."""
        parameters = self._parameters(weights)
        leaves = {name: inputs[name].detach().requires_grad_() for name in inputs if name in self._differentiable}
        modified = {}
        with torch.enable_grad():
            passed = {name: leaves.get(name, _detached(value)) for name, value in inputs.items()}
            for position in self._mutated_inputs:
                name = self.stage.inputs[position]
                passed[name] = modified[name] = passed[name].clone()
            outputs = self._call(parameters, buffers, tuple(passed.values()))
        trained = {self.parameter_names[name]: leaf for name, leaf in parameters.items() if leaf.requires_grad}
        named = dict(zip(self.stage.outputs, outputs, strict=True))
        return Tape(named, leaves, trained, modified, {**parameters, **buffers})

    def _check_unchanged(self, kept: Checkpoint) -> None:
        for name, old, new in zip(self.stage.inputs, kept.versions, _versions(kept.inputs), strict=True):
            if old != new:
                raise StaleWeightsError(
                    f"{name}, which stage {self.stage.index} ({', '.join(self.stage.units) or 'glue'}) reads, was "
                    "modified in place between the forward pass and this backward pass, which reruns the stage: leave "
                    "the model's inputs and outputs unchanged until then, or modify a clone"
                )

    def _parameters(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Views of the weights that require gradients as the parameters do: kernels are chosen by that flag too."""
        return {
            name: view.detach().requires_grad_(self.parameter_names[name] in self.trainable)
            for name, view in weights.items()
        }

    def _inputs(self, run: Run) -> dict[str, Any]:
        return {name: run.values[name] for name in self.stage.inputs}

    def _keep(self, run: Run, weights: Mapping[str, torch.Tensor], tape: Tape) -> None:
        """Keep what the stage returned, and what it made of the inputs that it modifies in place."""
        owned = {view.untyped_storage().data_ptr() for view in weights.values()}
        for name, value in tape.outputs.items():
            run.values[name] = _own(_detached(value), owned)
        with torch.no_grad():
            for name, value in tape.modified.items():
                run.values[name].copy_(value)

    def _call(
        self, weights: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], inputs: Sequence[Any]
    ) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = self._stateless({**weights, **buffers}, inputs)
        if torch.is_autocast_enabled(self._device.type) or torch.is_autocast_enabled("cpu"):
            # autocast keeps what it casts until its region ends: the weights of every stage, in the end
            torch.clear_autocast_cache()
        return outputs


def _versions(values: Sequence[Any]) -> tuple[int, ...]:
    """How often each tensor was modified in place; tensors of inference mode do not tell."""
    return tuple(version_of(v) if isinstance(v, torch.Tensor) and not v.is_inference() else 0 for v in values)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _own(value: Any, slots: set[int]) -> Any:
    """The value itself, or a copy if it is a view of weights, whose slot will soon hold others."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in slots:
        return value.clone()
    return value
