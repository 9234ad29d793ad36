"""Captured graphs: an exported program rewritten so that units are single modules and parameters go by their names."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from megatrain_fx.errors import CaptureError
from megatrain_fx.execution_modes import ExecutionModes, run_region
from megatrain_fx.glue_regions import region_arguments, rewrite_regions
from megatrain_fx.private_api import is_fake, writes_first_argument
from megatrain_fx.unit_call import FunctionCall, UnitCall
from megatrain_fx.unit_recording import AppliedFunction, UnitRecorder

_UNIT = torch.ops.megatrain_fx.unit.default
# Checks and bounds that export adds; the shapes they speak of are part of the input signature.
_CHECKS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
)


def build_captured_graph(
    program: ExportedProgram, model: nn.Module, prefix: str, recorder: UnitRecorder, input_names: Sequence[str]
) -> tuple[fx.GraphModule, tuple[UnitCall, ...]]:
    """The graph module of `program`, an export of a module that holds `model` under `prefix`, and its unit calls.

    Raises:
        CaptureError: a unit is called in a part of the graph that cannot be opened.
    """
    for node in program.graph.nodes:
        if node.stack_trace:
            node.meta["stack_trace"] = _without_own_frames(node.stack_trace)
    rewrite_regions(program.graph_module, _is_opaque_call)
    builder = _Builder(program, model, prefix, recorder)
    builder.add_inputs(input_names)
    for node in program.graph_module.graph.nodes:
        builder.add(node)
    _remove_unused(builder.graph)
    graph_module = fx.GraphModule(builder.attributes, builder.graph, class_name=f"Captured{type(model).__name__}")
    graph_module.training = model.training  # train() would change the flags of the user's own modules, in unit calls
    graph_module.graph.lint()
    return graph_module, tuple(builder.unit_calls)


def _is_opaque_call(node: fx.Node) -> bool:
    return node.target is _UNIT


class _Builder:
    """Copies the exported graph node by node; parameters become `get_attr` nodes just before their first use."""

    def __init__(self, program: ExportedProgram, model: nn.Module, prefix: str, recorder: UnitRecorder) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.unit_calls: list[UnitCall] = []
        self._program, self._prefix, self._recorder = program, prefix, recorder
        self._tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self._first_names = {id(tensor): name for name, tensor in reversed(self._tensors.items())}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._lifted: dict[fx.Node, InputSpec] = {}
        self._attribute_nodes: dict[str, fx.Node] = {}
        self._constants = 0

    def add_inputs(self, names: Sequence[str]) -> None:
        """Placeholders for the distinct input tensors, used or not; everything else that export lifted is noted."""
        placeholders = [node for node in self._program.graph.nodes if node.op == "placeholder"]
        inputs: list[fx.Node] = []
        for node, spec in zip(placeholders, self._program.graph_signature.input_specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                inputs.append(node)
            else:
                self._lifted[node] = spec
        for node, name in zip(inputs, names, strict=True):
            self._copies[node] = self.graph.placeholder(name)
            self._copies[node].meta = dict(node.meta)

    def add(self, node: fx.Node) -> None:
        """Append what stands for `node`."""
        if node.op == "placeholder" or node.target in _CHECKS:
            return
        if _is_opaque_call(node):
            self._add_opaque_call(node)
        elif node.op == "output":
            self._add_output(node)
        else:
            if node.op == "get_attr":
                self._add_module(node)
            self._copies[node] = self.graph.node_copy(node, self._copy_of)

    def _copy_of(self, node: fx.Node) -> fx.Node:
        if node not in self._copies:
            self._copies[node] = self._add_attribute(node, self._lifted[node])
        return self._copies[node]

    def _add_attribute(self, node: fx.Node, spec: InputSpec) -> fx.Node:
        copy = self._attribute(*self._original(node, spec))
        copy.meta = copy.meta or dict(node.meta)
        return copy

    def _attribute(self, name: str, value: torch.Tensor) -> fx.Node:
        """The one `get_attr` node of this name."""
        if name not in self.attributes:
            self.attributes[name] = value
            self._attribute_nodes[name] = self.graph.create_node("get_attr", name)
        return self._attribute_nodes[name]

    def _original(self, node: fx.Node, spec: InputSpec) -> tuple[str, Any]:
        target = (spec.target or "").removeprefix(self._prefix)
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensor = self._tensors[target]
            return self._first_names[id(tensor)], tensor
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            raise CaptureError(
                f"the glue uses an object that is no tensor (of kind {spec.kind.name}){_users_line(node)}"
            )
        value = self._program.constants[spec.target]
        if is_fake(value):
            raise CaptureError(
                f"the glue uses a tensor of shape {tuple(value.shape)} of which tracing does not know how it was made: "
                "inside a unit, from where it came by a forward hook or an attribute, or by .data. Let the unit return "
                "it (for a Hugging Face model: output_hidden_states, output_attentions and output_router_logits must "
                f"be False), and use detach().{_users_line(node)}"
            )
        name = f"_constant_{self._constants}"
        self._constants += 1
        return name, value.detach().to(node.meta["val"].device)

    def _add_module(self, node: fx.Node) -> None:
        module = self._program.graph_module.get_submodule(str(node.target))
        if isinstance(module, fx.GraphModule) and _holds_unit_call(module):
            raise CaptureError(
                "a unit is called inside a higher-order operator (such as torch.cond), where it cannot be streamed; "
                "move the operator into the unit."
            )
        self.attributes[str(node.target)] = module

    def _add_opaque_call(self, node: fx.Node) -> None:
        tensors, sizes, _, call_id = node.args
        call = self._recorder.calls[call_id]  # type: ignore[index]
        assert call.outputs is not None
        modes = node.meta.pop("modes", ExecutionModes())
        values = tuple(self._copy_of(v) if isinstance(v, fx.Node) else v for v in (*tensors, *sizes))  # type: ignore[misc]
        if isinstance(call.unit.module, AppliedFunction):
            function = FunctionCall(call.unit.module.function, call.arguments, call.outputs)
            copy = self._add_function_call(function, modes, values)
        else:
            unit_call = UnitCall(call.unit.module, call.unit.path, call.arguments, call.outputs, modes)
            unit_call.mutated_inputs = call.mutated_inputs
            copy = self._add_unit_call(unit_call, values)
        copy.meta = {**node.meta, "val": tuple(node.meta["val"])}
        self._copies[node] = copy

    def _add_unit_call(self, module: UnitCall, values: tuple[Any, ...]) -> fx.Node:
        name = f"unit_call_{len(self.unit_calls)}"
        self.unit_calls.append(module)
        self.attributes[name] = module
        return self.graph.create_node("call_module", name, values)

    def _add_function_call(self, module: FunctionCall, modes: ExecutionModes, values: tuple[Any, ...]) -> fx.Node:
        name = f"function_call_{sum(isinstance(value, FunctionCall) for value in self.attributes.values())}"
        self.attributes[name] = module
        return self.graph.call_function(run_region, region_arguments(modes, self.graph.get_attr(name), values))

    def _add_output(self, node: fx.Node) -> None:
        """Write the assigned buffers last, as the exported graph returns their new values after the model's outputs."""
        returned: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        names = list(self._recorder.assignments.buffers)
        results = [self._copy_of(value) for value in returned]
        outputs, assigned = results[: len(results) - len(names)], results[len(results) - len(names) :]
        targets = [self._attribute(self._first_names[id(self._tensors[name])], self._tensors[name]) for name in names]
        pairs = [(buffer, new) for buffer, new in zip(targets, assigned, strict=True) if _origin(new) is not buffer]
        written = {buffer for buffer, _ in pairs}
        # Outputs and new values that are buffers themselves are read before any buffer is written.
        outputs = [
            self._apply(torch.ops.aten.clone, value) if _origin(value) in written else value for value in outputs
        ]
        pairs = [(buffer, self._detached(value)) for buffer, value in pairs]
        for buffer, value in pairs:
            self._apply(torch.ops.aten.copy_, buffer, value)
        self.graph.output(tuple(outputs))

    def _detached(self, value: fx.Node) -> fx.Node:
        detached = self._apply(torch.ops.aten.detach, value)
        return self._apply(torch.ops.aten.clone, detached) if _origin(value).op == "get_attr" else detached

    def _apply(self, operator_: Any, *args: fx.Node) -> fx.Node:
        """Append an operator whose result looks like its first argument."""
        node = self.graph.call_function(operator_.default, args)
        node.meta = dict(args[0].meta)
        return node


def _users_line(node: fx.Node) -> str:
    """The first place that uses a value, as far as known."""
    return next((f"\n{user.stack_trace}" for user in node.users if user.stack_trace), "")


def _without_own_frames(stack_trace: str) -> str:
    """A stack trace of a node, from the model's forward on."""
    frames = re.split(r'(?m)^(?=\s*File ")', stack_trace)
    return "".join(frame for frame in frames if f'File "{Path(__file__).parent}' not in frame).lstrip()


def _origin(node: fx.Node) -> fx.Node:
    """The node whose tensor object `node` returns, following operators that return the argument that they write."""
    while writes_first_argument(node.target) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _holds_unit_call(graph_module: fx.GraphModule) -> bool:
    modules = [module for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
    return any(_is_opaque_call(node) for module in modules for node in module.graph.nodes)


def _remove_unused(graph: fx.Graph) -> None:
    """Remove sizes and attributes that only the checks used. Nothing else: an unused dropout still draws numbers."""
    for node in reversed(list(graph.nodes)):
        size = node.target is torch.ops.aten.sym_size.int or getattr(node.target, "__module__", "") == operator.__name__
        if not node.users and (size or node.op == "get_attr"):
            graph.erase_node(node)
