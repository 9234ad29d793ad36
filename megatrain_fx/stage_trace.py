"""One run of a stage on fake tensors: what it computes, which outputs need gradients, and what it modifies in place."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain_fx.host_randomness import HostRandomState
from megatrain_fx.operation_record import OperationRecord
from megatrain_fx.private_api import DATA_DEPENDENT_ERRORS, new_fake_mode
from megatrain_fx.side_effects import SideEffectWatch
from megatrain_fx.stage_function import StageArguments, StageFunction
from megatrain_fx.stages import Stage, is_unit_call
from megatrain_fx.unit_call import UnitCall


@dataclass(frozen=True)
class StageTrace:
    """What is known of a stage before it runs.

    Attributes:
        key: equal for stages that compute the same function, forward and backward; None if the stage cannot be traced.
        output_requires_grad: for each output.
        mutated_buffers: names in the stage's module of the buffers that its forward updates.
        mutated_inputs: positions of the inputs that it modifies in place.
        reason: why it cannot be traced.
        side_effect: what it does beside computing tensors (see :mod:`megatrain_fx.side_effects`).
    """

    key: str | None
    output_requires_grad: tuple[bool, ...]
    mutated_buffers: tuple[str, ...]
    mutated_inputs: tuple[int, ...]
    reason: str | None = None
    side_effect: str | None = None


def trace_stage(stage: Stage, input_requires_grad: Sequence[bool], device: torch.device) -> StageTrace:
    """Run a stage once, forward and backward, on fake tensors of ``device``; nothing real is allocated or changed.

    With symbolic sizes, at the sizes for which they were made.
    """
    function = StageFunction(stage, input_requires_grad)
    watch, randomness = SideEffectWatch(stage.module), HostRandomState.read()
    with new_fake_mode(), torch.enable_grad():
        fakes = StageArguments.of_stage(stage).fakes(device)
        record = OperationRecord([*fakes.parameters, *fakes.buffers, *fakes.inputs])
        try:
            with record:
                outputs, leaves = function.forward(fakes.parameters, fakes.buffers, fakes.inputs)
                roots = [o for o, needed in zip(outputs, function.output_requires_grad, strict=True) if needed]
                function.differentiate(outputs, leaves, [torch.ones_like(root) for root in roots])
        except DATA_DEPENDENT_ERRORS as error:
            randomness.restore()
            return _untraceable(stage, input_requires_grad, str(error).partition("\n")[0])
    if HostRandomState.read().advanced_since(randomness):  # another run may take another way
        return _untraceable(stage, input_requires_grad, watch.found(), function.mutated_inputs)
    names = [name for name, _ in stage.module.named_buffers()]
    silently = record.updated_statistics(zip(names, fakes.buffers, strict=True))
    mutated = tuple(name for name in names if name in function.mutated_buffers or name in silently)
    key = f"{record.key} {input_requires_grad} {[p.requires_grad for _, p in stage.parameters]}"
    return StageTrace(key, function.output_requires_grad, mutated, function.mutated_inputs, side_effect=watch.found())


def _untraceable(
    stage: Stage, input_requires_grad: Sequence[bool], reason: str | None, mutated_inputs: Sequence[int] = ()
) -> StageTrace:
    """The cautious answer: whatever may need a gradient does, and every buffer may be updated.

    Inputs are modified in place if they were in one fake run (`mutated_inputs`), or by a unit's real run.
    """
    trains = any(input_requires_grad) or any(parameter.requires_grad for _, parameter in stage.parameters)
    (output,) = stage.module.graph.find_nodes(op="output")
    values = [node.meta.get("val") for node in output.args[0]]
    flags = tuple(
        trains and isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex) for v in values
    )
    buffers = tuple(name for name, _ in stage.module.named_buffers())
    mutated = tuple(sorted({*mutated_inputs, *_inputs_mutated_by_units(stage)}))
    return StageTrace(None, flags, buffers, mutated, reason)


def _inputs_mutated_by_units(stage: Stage) -> set[int]:
    """Positions of the stage's inputs that are among the values that its unit calls are known to modify in place."""
    position = {node: k for k, node in enumerate(stage.module.graph.find_nodes(op="placeholder"))}
    mutated: set[int] = set()
    for node in filter(is_unit_call, stage.module.graph.nodes):
        call = stage.module.get_submodule(str(node.target))
        assert isinstance(call, UnitCall)
        mutated.update(position[node.args[k]] for k in call.mutated_inputs if node.args[k] in position)
    return mutated
