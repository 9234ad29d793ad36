"""The state of one call of a model: its activations, checkpoints, tapes and gradients between forward and backward."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain_fx.execution_modes import ExecutionModes
from megatrain_fx.host_randomness import HostRandomState
from megatrain_fx.ir import BufferKind, gradient_name, kind_of, number_of


@dataclass(frozen=True)
class RandomState:
    """States of the random number generators of Python and NumPy, of the CPU and of the compute device."""

    host: HostRandomState
    cpu: torch.Tensor
    accelerator: torch.Tensor | None

    @classmethod
    def read(cls, device: torch.device) -> "RandomState":
        """The states now."""
        if device.type == "cpu":
            return cls(HostRandomState.read(), torch.get_rng_state(), None)
        accelerator = torch.get_device_module(device).get_rng_state(device)
        return cls(HostRandomState.read(), torch.get_rng_state(), accelerator)

    def restore(self, device: torch.device) -> None:
        """Go back to these states."""
        self.host.restore()
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(device).set_rng_state(self.accelerator, device)


@dataclass(frozen=True)
class Checkpoint:
    """What a stage needs to be rerun: its inputs, the random state, and the buffers that its forward updates.

    ``versions`` are those of the inputs when they were kept.
    """

    inputs: tuple[Any, ...]
    versions: tuple[int, ...]
    random: RandomState
    buffers: dict[str, torch.Tensor]


@dataclass
class Tape:
    """A recorded stage: autograd's graph from the leaves to the outputs.

    Attributes:
        outputs: by name.
        inputs: the leaves that stand for the stage's inputs, by name (only those that need gradients).
        parameters: the leaves that stand for the parameters, by name in the model (only trainable ones).
        modified: what became of the inputs that the stage modifies in place, by name.
        state: the tensors that stood for parameters and buffers, by their names in the stage's module.
    """

    outputs: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    modified: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Run:
    """One call, owned by the autograd node of the call.

    Attributes:
        values: inputs and activations by their names in the schedule.
        modes: autocast as it was in the forward pass.
        weights_version: version of the store when the forward pass ran.
        checkpoints: by stage.
        tapes: by stage.
        gradients: of values, by name; None where autograd found none.
        returned: the values that the model returns, by name.
        keep_checkpoints: another backward pass will follow.
        trains: the backward pass is to deliver gradients of parameters.
        homes: how the next gradient of each parameter comes home, by name (see :mod:`megatrain_fx.store`).
        trained: names of the parameters that received a gradient.
        published: those of them that had no ``grad`` before.
        lookups: how many rows of a region have been looked up, at most, by region.
    """

    values: dict[str, Any]
    modes: ExecutionModes
    weights_version: int = 0
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    tapes: dict[int, Tape] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    returned: dict[str, Any] = field(default_factory=dict)
    keep_checkpoints: bool = False
    trains: bool = True
    homes: dict[str, int] = field(default_factory=dict)
    trained: dict[str, None] = field(default_factory=dict)
    published: list[str] = field(default_factory=list)
    lookups: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of_inputs(cls, inputs: Sequence[torch.Tensor], modes: ExecutionModes) -> "Run":
        """A run whose model inputs are these tensors."""
        return cls({f"input.{k}": tensor for k, tensor in enumerate(inputs)}, modes)

    def hand_over(self, names: Sequence[str]) -> None:
        """Keep the values that the model returns for the caller."""
        self.returned = {name: self.values[name] for name in names}

    def begin_backward(self, gradients: Iterable[tuple[str, torch.Tensor | None]], keep: bool, trains: bool) -> None:
        """Take the gradients of the values that the model returned; a value returned twice gets their sum."""
        self.keep_checkpoints = keep
        self.trains = trains
        self.gradients = {}
        self.trained = {}
        self.published = []
        for value, gradient in gradients:
            earlier = self.gradients.get(gradient_name(value))
            if earlier is not None and gradient is not None:
                gradient = earlier + gradient
            self.gradients[gradient_name(value)] = earlier if gradient is None else gradient

    def release(self, names: Sequence[str], chaos: bool) -> None:
        """Drop activations, gradients, tapes and checkpoints; in chaos mode released checkpoints are spoilt."""
        for name in names:
            kind = kind_of(name)
            if kind is BufferKind.CHECKPOINT:
                self._release_checkpoint(number_of(name), chaos)
            elif kind is BufferKind.TAPE:
                self.tapes.pop(number_of(name), None)
            elif kind is BufferKind.GRADIENT_VALUE:
                self.gradients.pop(name, None)
            else:
                self.values.pop(name, None)

    def _release_checkpoint(self, stage: int, chaos: bool) -> None:
        if self.keep_checkpoints:
            return
        checkpoint = self.checkpoints.pop(stage, None)
        for value in checkpoint.inputs if checkpoint is not None and chaos else ():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.fill_(math.nan)
