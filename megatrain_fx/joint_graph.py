"""ATen graphs of a stage: its forward, and its forward with the vector-Jacobian product (the joint graph)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from megatrain_fx.private_api import new_fake_mode
from megatrain_fx.random_operations import DECOMPOSITIONS
from megatrain_fx.stage_function import StageArguments, StageFunction
from megatrain_fx.stages import Stage


@dataclass(frozen=True)
class StageGraphs:
    """A stage as ATen graphs, for the layout of given arguments.

    Attributes:
        forward: placeholders are parameters, buffers and inputs; results are the outputs.
        joint: placeholders are those and a tangent for each output that requires grad; results are the outputs, then
            the gradients (None where there is none) of trainable parameters and of differentiable inputs.
        output_requires_grad: for each output.
        replaced_buffers: names of the buffers in whose place the forward puts other tensors, which no graph shows.
    """

    forward: fx.GraphModule
    joint: fx.GraphModule
    output_requires_grad: tuple[bool, ...]
    replaced_buffers: tuple[str, ...]


def trace_graphs(
    stage: Stage, input_requires_grad: Sequence[bool], device: torch.device, arguments: StageArguments | None = None
) -> StageGraphs:
    """Trace a stage on fake tensors of ``device`` with the layout of ``arguments`` (default: as it was captured)."""
    function = StageFunction(stage, input_requires_grad)
    # gradients are traced on this thread: make_fx sees no other
    with new_fake_mode(), torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        fakes = (arguments or StageArguments.of_stage(stage)).fakes(device)
        groups = (fakes.parameters, fakes.buffers, fakes.inputs)

        # make_fx counts the arguments of a plain function; of a method it would count self too
        def run_forward(parameters: Any, buffers: Any, inputs: Any) -> Any:
            return list(function.forward(parameters, buffers, inputs)[0])

        def run_joint(parameters: Any, buffers: Any, inputs: Any, tangents: Any) -> Any:
            outputs, leaves = function.forward(parameters, buffers, inputs)
            return list(outputs), function.differentiate(outputs, leaves, tangents)

        forward = make_fx(run_forward, dict(DECOMPOSITIONS))(*groups)
        tangents = _tangents(forward.graph, function.output_requires_grad)
        joint = make_fx(run_joint, dict(DECOMPOSITIONS))(*groups, tangents)
        return StageGraphs(forward, joint, function.output_requires_grad, function.replaced_buffers)


def results(graph: fx.Graph) -> list[Any]:
    """The results of a graph, one after the other: nodes, and constants."""
    (output,) = graph.find_nodes(op="output")
    return list(output.args[0])


def _tangents(forward: fx.Graph, output_requires_grad: Sequence[bool]) -> list[torch.Tensor]:
    """A dense tensor for each output that requires grad, of its layout unless that is one of overlapping elements."""
    pairs = zip(results(forward), output_requires_grad, strict=True)
    return [torch.empty_like(node.meta["val"]) for node, needed in pairs if needed]
