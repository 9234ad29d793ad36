"""One run of a stage on fake tensors: its template graph, which outputs need gradients, and what it modifies in place."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.func import functional_call

from megatrain_fx.private_api import DATA_DEPENDENT_ERRORS, new_fake_mode, size_at, version_of
from megatrain_fx.stages import Stage


@dataclass(frozen=True)
class StageTrace:
    """What is known of a stage before it runs.

    Attributes:
        joint: forward and vector-Jacobian product as one ATen graph. Placeholders: parameters and buffers in the order of
            the stage's module, inputs, then gradients of the outputs that require them; results: outputs, then the
            gradients (None where there is none) of trainable parameters and of differentiable inputs. None if the stage
            cannot be traced.
        output_requires_grad: for each output.
        mutated_buffers: names in the stage's module of the buffers that its forward updates.
        mutated_inputs: positions of the inputs that it modifies in place.
        reason: why there is no graph.
    """

    joint: fx.GraphModule | None
    output_requires_grad: tuple[bool, ...]
    mutated_buffers: tuple[str, ...]
    mutated_inputs: tuple[int, ...]
    reason: str | None = None


def trace_stage(stage: Stage, input_requires_grad: Sequence[bool], device: torch.device) -> StageTrace:
    """Run a stage once on fake tensors of ``device``; nothing real is allocated or changed.

    With symbolic sizes the graph is that of the sizes for which they were made.
    """
    recorder = _Recorder(stage, input_requires_grad)
    mode = new_fake_mode()
    with mode, torch.enable_grad():
        fakes = _FakeArguments(stage, device)
        try:
            # make_fx counts the arguments of a plain function; of a method it would count self too
            joint = make_fx(lambda parameters, buffers, inputs: recorder.run(parameters, buffers, inputs))(
                fakes.parameters, fakes.buffers, fakes.inputs
            )
        except DATA_DEPENDENT_ERRORS as error:
            return _untraceable(stage, input_requires_grad, str(error).partition("\n")[0])
    names = [name for name, _ in stage.module.named_buffers()]
    silently = _silently_updated(joint, len(stage.parameters), names)
    mutated = tuple(name for name in names if name in recorder.mutated_buffers or name in silently)
    return StageTrace(joint, recorder.output_requires_grad, mutated, recorder.mutated_inputs)


# Operations that update the running statistics they are given, though neither their schema nor a version counter says so.
_UPDATES_STATISTICS = (torch.ops.aten.native_batch_norm, torch.ops.aten.cudnn_batch_norm, torch.ops.aten.miopen_batch_norm)


def _silently_updated(joint: fx.GraphModule, first_buffer: int, names: Sequence[str]) -> set[str]:
    """Names of buffers that reach a batch normalisation as running statistics."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    buffers = dict(zip(placeholders[first_buffer:], names, strict=False))
    found = set()
    for node in joint.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "overloadpacket", None) in _UPDATES_STATISTICS:
            found.update(buffers[source] for source in node.all_input_nodes if source in buffers)
    return found


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


class _Recorder:
    """The function that is traced; it also writes down what the trace itself does not show."""

    def __init__(self, stage: Stage, input_requires_grad: Sequence[bool]) -> None:
        self.stage = stage
        self.input_requires_grad = input_requires_grad
        self.output_requires_grad: tuple[bool, ...] = ()
        self.mutated_buffers: tuple[str, ...] = ()
        self.mutated_inputs: tuple[int, ...] = ()

    def run(
        self, parameters: list[torch.Tensor], buffers: list[torch.Tensor], inputs: list[torch.Tensor | int]
    ) -> tuple[list[object], list[torch.Tensor | None]]:
        """Outputs, and gradients for output gradients of one (their values do not matter to a trace)."""
        leaves = [
            tensor.detach().requires_grad_(parameter.requires_grad)
            for tensor, (_, parameter) in zip(parameters, self.stage.parameters, strict=True)
        ]
        wanted = list(zip(inputs, self.input_requires_grad, strict=True))
        roots = [value.detach().requires_grad_() if needed else value for value, needed in wanted]
        passed = [value.clone() if needed else value for value, (_, needed) in zip(roots, wanted, strict=True)]
        outputs = self._call(leaves, buffers, passed)
        self.output_requires_grad = tuple(isinstance(o, torch.Tensor) and o.requires_grad for o in outputs)
        gradients = _differentiate(outputs, [x for x in (*leaves, *roots) if isinstance(x, torch.Tensor) and x.requires_grad])
        return list(outputs), gradients

    def _call(
        self, leaves: list[torch.Tensor], buffers: list[torch.Tensor], passed: list[torch.Tensor | int]
    ) -> Sequence[object]:
        names = [name for name, _ in self.stage.module.named_buffers()]
        state = dict(zip((name for name, _ in self.stage.parameters), leaves, strict=True))
        state.update(zip(names, buffers, strict=True))
        before = [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in (*buffers, *passed)]
        outputs = functional_call(self.stage.module, state, tuple(passed))
        after = [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in (*buffers, *passed)]
        changed = [old != new for old, new in zip(before, after, strict=True)]
        reassigned = [state[name] is not buffer for name, buffer in zip(names, buffers, strict=True)]
        self.mutated_buffers = tuple(
            name for name, one, other in zip(names, changed, reassigned, strict=False) if one or other
        )
        self.mutated_inputs = tuple(position for position, one in enumerate(changed[len(buffers) :]) if one)
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
    values = [node.meta.get("val") for node in output.args[0]]  # type: ignore[union-attr]
    flags = tuple(
        trains and isinstance(v, torch.Tensor) and (v.dtype.is_floating_point or v.dtype.is_complex) for v in values
    )
    buffers = tuple(name for name, _ in stage.module.named_buffers())
    return StageTrace(None, flags, buffers, (), reason)
