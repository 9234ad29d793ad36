"""One run of a stage on fake tensors: what it computes, which outputs need gradients, and what it modifies in place."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from megatrain_fx.operation_record import OperationRecord
from megatrain_fx.private_api import DATA_DEPENDENT_ERRORS, new_fake_mode, size_at, version_of
from megatrain_fx.stages import Stage


@dataclass(frozen=True)
class StageTrace:
    """What is known of a stage before it runs.

    Attributes:
        key: equal for stages that compute the same function, forward and backward; None if the stage cannot be traced.
        output_requires_grad: for each output.
        mutated_buffers: names in the stage's module of the buffers that its forward updates.
        mutated_inputs: positions of the inputs that it modifies in place.
        reason: why it cannot be traced.
    """

    key: str | None
    output_requires_grad: tuple[bool, ...]
    mutated_buffers: tuple[str, ...]
    mutated_inputs: tuple[int, ...]
    reason: str | None = None


def trace_stage(stage: Stage, input_requires_grad: Sequence[bool], device: torch.device) -> StageTrace:
    """Run a stage once, forward and backward, on fake tensors of ``device``; nothing real is allocated or changed.

    With symbolic sizes, at the sizes for which they were made.
    """
    run = _StageRun(stage, input_requires_grad)
    with new_fake_mode(), torch.enable_grad():
        fakes = _FakeArguments(stage, device)
        record = OperationRecord([*fakes.parameters, *fakes.buffers, *fakes.inputs])
        try:
            with record:
                run(fakes.parameters, fakes.buffers, fakes.inputs)
        except DATA_DEPENDENT_ERRORS as error:
            return _untraceable(stage, input_requires_grad, str(error).partition("\n")[0])
    names = [name for name, _ in stage.module.named_buffers()]
    silently = record.updated_statistics(zip(names, fakes.buffers, strict=True))
    mutated = tuple(name for name in names if name in run.mutated_buffers or name in silently)
    key = f"{record.key} {input_requires_grad} {[p.requires_grad for _, p in stage.parameters]}"
    return StageTrace(key, run.output_requires_grad, mutated, run.mutated_inputs)


def trace_joint_graph(stage: Stage, input_requires_grad: Sequence[bool], device: torch.device) -> fx.GraphModule:
    """Forward and vector-Jacobian product of a stage as one ATen graph.

    Placeholders: parameters and buffers in the order of the stage's module, then inputs. Results: outputs, then the
    gradients (None where there is none) of trainable parameters and of differentiable inputs, for output gradients of
    one.
    """
    run = _StageRun(stage, input_requires_grad)
    with new_fake_mode(), torch.enable_grad():
        fakes = _FakeArguments(stage, device)
        # make_fx counts the arguments of a plain function; of a callable object it would count self too
        traced = make_fx(lambda parameters, buffers, inputs: run(parameters, buffers, inputs))
        return traced(fakes.parameters, fakes.buffers, fakes.inputs)


class _FakeArguments:
    """Fake parameters, buffers and inputs of a stage, on the compute device."""

    def __init__(self, stage: Stage, device: torch.device) -> None:
        def fake(tensor: torch.Tensor) -> torch.Tensor:
            sizes = [size_at(size, scaled=False) for size in tensor.shape]
            strides = [size_at(stride, scaled=False) for stride in tensor.stride()]
            place = tensor.device if tensor.device.type == "cpu" and tensor.ndim == 0 else device
            return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=place)

        self.parameters = [fake(parameter) for _, parameter in stage.parameters]
        self.buffers = [fake(buffer) for _, buffer in stage.module.named_buffers()]
        self.inputs = [
            fake(example) if isinstance(example, torch.Tensor) else size_at(example, scaled=False)
            for example in stage.input_examples
        ]


class _StageRun:
    """The function that is traced; it also writes down what a record of operations does not show."""

    def __init__(self, stage: Stage, input_requires_grad: Sequence[bool]) -> None:
        self.stage = stage
        self.input_requires_grad = input_requires_grad
        self.output_requires_grad: tuple[bool, ...] = ()
        self.mutated_buffers: tuple[str, ...] = ()
        self.mutated_inputs: tuple[int, ...] = ()

    def __call__(
        self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], inputs: list[torch.Tensor | int]
    ) -> tuple[list[object], list[torch.Tensor | None]]:
        leaves = [
            tensor.detach().requires_grad_(parameter.requires_grad)
            for tensor, (_, parameter) in zip(parameters, self.stage.parameters, strict=True)
        ]
        wanted = list(zip(inputs, self.input_requires_grad, strict=True))
        roots = [v.detach().requires_grad_() if needed and isinstance(v, torch.Tensor) else v for v, needed in wanted]
        passed = [v.clone() if isinstance(v, torch.Tensor) and v.requires_grad else v for v in roots]
        outputs = self._call(leaves, buffers, passed)
        self.output_requires_grad = tuple(isinstance(o, torch.Tensor) and o.requires_grad for o in outputs)
        trained = [x for x in (*leaves, *roots) if isinstance(x, torch.Tensor) and x.requires_grad]
        return list(outputs), _differentiate(outputs, trained)

    def _call(
        self, leaves: list[torch.Tensor], buffers: list[torch.Tensor], passed: list[torch.Tensor | int]
    ) -> Sequence[object]:
        names = [name for name, _ in self.stage.module.named_buffers()]
        state = dict(zip((name for name, _ in self.stage.parameters), leaves, strict=True))
        state.update(zip(names, buffers, strict=True))
        values = (*buffers, *passed)
        before = [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in values]
        outputs: Sequence[object] = functional_call(self.stage.module, state, tuple(passed))
        after = [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in values]
        changed = [old != new for old, new in zip(before, after, strict=True)]
        reassigned = [state[name] is not buffer for name, buffer in zip(names, buffers, strict=True)]
        flags = zip(names, changed[: len(names)], reassigned, strict=True)
        self.mutated_buffers = tuple(name for name, in_place, replaced in flags if in_place or replaced)
        self.mutated_inputs = tuple(position for position, one in enumerate(changed[len(names) :]) if one)
        return outputs


def _differentiate(outputs: Sequence[object], leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    roots = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not roots or not leaves:
        return [None] * len(leaves)
    return list(torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True))


def _untraceable(stage: Stage, input_requires_grad: Sequence[bool], reason: str) -> StageTrace:
    """The cautious answer: whatever may need a gradient does, and every buffer may be updated."""
    trains = any(input_requires_grad) or any(parameter.requires_grad for _, parameter in stage.parameters)
    (output,) = stage.module.graph.find_nodes(op="output")
    values = [node.meta.get("val") for node in output.args[0]]
    flags = tuple(
        trains and isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex) for v in values
    )
    buffers = tuple(name for name, _ in stage.module.named_buffers())
    return StageTrace(None, flags, buffers, (), reason)
