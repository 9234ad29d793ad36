"""Compiled functions: the forward and the backward of a template, compiled by Inductor for one layout of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from megatrain_fx.execution_modes import Autocast, ExecutionModes
from megatrain_fx.joint_graph import StageGraphs, results
from megatrain_fx.random_operations import ancestors, keep_random, random_nodes
from megatrain_fx.run import RandomState
from megatrain_fx.stage_function import StageArguments

Tangents = Sequence[torch.Tensor | None]


class CompiledFunctions:
    """Runs a template as Inductor's code, without autograd: ``backward`` computes the forward again and differentiates.

    Attributes:
        is_random: whether they draw random numbers.
        output_requires_grad: for each output.
    """

    def __init__(
        self, graphs: StageGraphs, differentiates: bool, device: torch.device, options: dict[str, Any]
    ) -> None:
        """Prepare the functions; they are compiled when they run for the first time.

        Args:
            graphs: what they compute.
            differentiates: whether the backward is wanted.
            device: where they run.
            options: Inductor's.
        """
        self.is_random = bool(random_nodes(graphs.forward.graph))
        self.output_requires_grad = graphs.output_requires_grad
        self._device = device
        self._forward = _Compiled(graphs.forward, slice(None), options)
        self._backward: _Compiled | None = None
        if differentiates:
            gradients = slice(len(graphs.output_requires_grad), None)
            self._backward = _Compiled(graphs.joint, gradients, options)
            self._layouts = [node.meta["val"] for node in self._tangent_nodes(graphs)]
            self._sources = self._find_sources(graphs, gradients)

    @property
    def count(self) -> int:
        """How many functions there are to compile."""
        return 1 if self._backward is None else 2

    def forward(self, arguments: StageArguments) -> list[Any]:
        """The outputs; buffers are updated in place."""
        with _plain_modes(self._device):
            return self._forward([*arguments.parameters, *arguments.buffers, *arguments.inputs])

    def backward(self, arguments: StageArguments, tangents: Tangents) -> list[torch.Tensor | None]:
        """The gradients of trainable parameters and of differentiable inputs, None where there is none.

        Args:
            arguments: as the forward was given them; buffers that it updates are updated again.
            tangents: gradients of the outputs that require grad; None for zeros.
        """
        assert self._backward is not None
        present = {position for position, tangent in enumerate(tangents) if tangent is not None}
        with _plain_modes(self._device):
            filled = [_laid_out(t, layout, self._device) for t, layout in zip(tangents, self._layouts, strict=True)]
            found = self._backward([*arguments.parameters, *arguments.buffers, *arguments.inputs, *filled])
        return [g if sources & present else None for g, sources in zip(found, self._sources, strict=False)]

    def try_out(self, arguments: StageArguments) -> None:
        """Compile by running once, with no lasting effect.

        Both are compiled before either is needed: a forward may not be followed by an eager backward, which would draw
        other random numbers.
        """
        random = RandomState.read(self._device)
        buffers = tuple(buffer.clone() for buffer in arguments.buffers)
        trial = StageArguments(arguments.parameters, buffers, arguments.inputs)
        try:
            self.forward(trial)
            if self._backward is not None:
                self.backward(trial, [None] * len(self._layouts))
        finally:
            random.restore(self._device)

    @staticmethod
    def _tangent_nodes(graphs: StageGraphs) -> list[fx.Node]:
        placeholders = graphs.joint.graph.find_nodes(op="placeholder")
        return placeholders[len(placeholders) - sum(graphs.output_requires_grad) :]

    def _find_sources(self, graphs: StageGraphs, gradients: slice) -> list[set[int]]:
        """For each gradient the tangents from which it comes: without them, there is none rather than zeros."""
        number = {node: position for position, node in enumerate(self._tangent_nodes(graphs))}
        sources = []
        for gradient in results(graphs.joint.graph)[gradients]:
            reached = ancestors([gradient]) if isinstance(gradient, fx.Node) else set()
            sources.append({number[node] for node in reached & number.keys()})
        return sources


class _Compiled:
    """Some of the results of a graph, as a compiled function of those placeholders that they need."""

    def __init__(self, traced: fx.GraphModule, wanted: slice, options: dict[str, Any]) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(traced.graph, {}))
        module = fx.GraphModule(traced, graph)
        graph = module.graph
        (output,) = graph.find_nodes(op="output")
        output.args = (tuple(keep_random(graph, results(graph)[wanted])),)
        graph.eliminate_dead_code()
        placeholders = graph.find_nodes(op="placeholder")
        self._used = [position for position, node in enumerate(placeholders) if node.users]
        for node in placeholders:
            if not node.users:
                graph.erase_node(node)
        module.recompile()
        self._run: Callable[..., Any] = torch.compile(module, fullgraph=True, dynamic=False, options=options)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        return list(self._run(*[arguments[position].detach() for position in self._used]))


def _laid_out(tangent: torch.Tensor | None, layout: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tangent with the strides for which the graph was traced."""
    if tangent is not None and tangent.stride() == layout.stride():
        return tangent
    dense = torch.empty_strided(layout.shape, layout.stride(), dtype=layout.dtype, device=device)
    return dense.zero_() if tangent is None else dense.copy_(tangent)


def _plain_modes(device: torch.device) -> Any:
    """Modes that are the same wherever a function runs, so that it is compiled once. Its graph has autocast in it."""
    types = dict.fromkeys(("cpu", device.type))
    return ExecutionModes(False, tuple(Autocast(kind, torch.bfloat16, False, True) for kind in types)).active()
