"""Compiled templates: each is compiled once by Inductor, for all the stages that share it, or stays eager and says why."""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from megatrain_fx.compiled_functions import CompiledFunctions
from megatrain_fx.config import StreamConfig
from megatrain_fx.ir import BufferKind, Op, kind_of
from megatrain_fx.joint_graph import StageGraphs, trace_graphs
from megatrain_fx.model_state import preserved
from megatrain_fx.program import Program
from megatrain_fx.random_operations import inductor_options
from megatrain_fx.stage_function import StageArguments
from megatrain_fx.stages import Stage
from megatrain_fx.templates import Template

logger = logging.getLogger(__name__)

_MOST_LAYOUTS = 8
"""Layouts of inputs for which one template is compiled; more run eagerly, rather than compile without end."""
_FEWEST_OPERATIONS = 5
"""A template of one stage with fewer operations than this gains nothing."""


class CompiledTemplate:
    """A template as compiled functions, one pair for each layout (sizes and strides) of inputs that it meets."""

    def __init__(
        self,
        template: Template,
        stage: Stage,
        input_requires_grad: Sequence[bool],
        differentiates: bool,
        device: torch.device,
    ) -> None:
        """Compile nothing yet: that happens as stages run.

        Args:
            template: what to compile.
            stage: one of its stages.
            input_requires_grad: for each input of the stage, whether its gradient is wanted.
            differentiates: whether the stages have a backward.
            device: where they run.
        """
        self.template = template
        self._stage = stage
        self._input_requires_grad = input_requires_grad
        self._differentiates = differentiates
        self._device = device
        self._functions: dict[Any, CompiledFunctions | None] = {}
        self._warned = False

    @property
    def compilations(self) -> int:
        """How many functions were compiled."""
        return sum(functions.count for functions in self._functions.values() if functions)

    def functions(self, arguments: StageArguments) -> CompiledFunctions | None:
        """The functions for the layout of these inputs, compiled at first use; None if it runs eagerly."""
        layout = _layout(arguments.inputs)
        if layout not in self._functions:
            if len(self._functions) >= _MOST_LAYOUTS:
                self._stays_eager(f"its inputs came in more than {_MOST_LAYOUTS} sizes", "pad batches to few sizes")
                return None
            self._functions[layout] = self._compile(arguments)
        return self._functions[layout]

    def _compile(self, arguments: StageArguments) -> CompiledFunctions | None:
        try:
            graphs, reason = self._trace(arguments)
            options = inductor_options(graphs.joint.graph)
            if reason is not None or isinstance(options, str):
                self._stays_eager(reason or str(options))
                return None
            functions = CompiledFunctions(graphs, self._differentiates, self._device, options)
            if self._is_trivial(graphs):
                return None
            functions.try_out(arguments)
            return functions
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever Inductor cannot do, the Python that was given can
            logger.debug("template T%d cannot be compiled", self.template.index, exc_info=True)
            self._stays_eager(_root_cause(error))
            return None

    def _trace(self, arguments: StageArguments) -> tuple[StageGraphs, str | None]:
        """Its graphs, and what it does beyond them, which would be lost once compiled."""
        before = random.getstate()
        modules = list(self._stage.module.modules())
        with preserved(self._stage.module):
            attributes = [dict(vars(module)) for module in modules]
            graphs = trace_graphs(self._stage, self._input_requires_grad, self._device, arguments)
            changed = [_changed(module, old) for module, old in zip(modules, attributes, strict=True)]
        drew = random.getstate() != before
        random.setstate(before)
        if drew:
            return graphs, "it draws numbers from Python's random module"
        if graphs.replaced_buffers:
            return graphs, f"it assigns to the buffer {graphs.replaced_buffers[0]}, rather than update it in place"
        return graphs, next((reason for reason in changed if reason), None)

    def _is_trivial(self, graphs: StageGraphs) -> bool:
        computing = [node for node in graphs.forward.graph.nodes if node.op == "call_function" and not _is_view(node)]
        return len(self.template.stages) == 1 and len(computing) < _FEWEST_OPERATIONS

    def _stays_eager(self, reason: str, remedy: str = "") -> None:
        if not self._warned:
            self._warned = True
            _warn(self.template, self._stage, f"{reason}{f' ({remedy})' if remedy else ''}")


def compile_templates(program: Program, config: StreamConfig) -> dict[int, CompiledTemplate]:
    """The compiled templates of a program, by stage; stages that are left out run eagerly.

    A stage whose forward records a tape for the backward is left out, since compiled functions record none.
    """
    if config.template != "inductor":
        return {}
    recording = {operation.stage for operation in program.schedule if _records(operation)}
    compiled: dict[int, CompiledTemplate] = {}
    for template in program.templates:
        stages = [index for index in template.stages if index not in recording]
        if not stages:
            continue
        stage, trace, facts = (x[stages[0]] for x in (program.stages, program.traces, program.facts.stages))
        if template.joint is None or trace.mutated_inputs:
            reason = template.reason or f"it modifies its input {stage.inputs[trace.mutated_inputs[0]]} in place"
            _warn(template, stage, reason)
            continue
        wanted = [name in facts.differentiable_inputs for name in stage.inputs]
        differentiates = program.training and facts.has_backward
        shared = CompiledTemplate(template, stage, wanted, differentiates, config.device)
        compiled.update(dict.fromkeys(stages, shared))
    return compiled


def _records(operation: Any) -> bool:
    return operation.op is Op.FORWARD and any(kind_of(name) is BufferKind.TAPE for name in operation.writes)


def _layout(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What a graph that was traced with these inputs holds of them."""
    return tuple(
        (v.dtype, v.device, tuple(v.shape), v.stride()) if isinstance(v, torch.Tensor) else v for v in inputs
    )


def _changed(module: nn.Module, before: dict[str, Any]) -> str | None:
    """What a module did to its own attributes."""
    for name, value in vars(module).items():
        if before.get(name) is not value:
            return f"it sets the attribute {name} of a {type(module).__name__}"
    return None


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}{f': {first_line}' if first_line else ''}"


def _is_view(node: fx.Node) -> bool:
    """Whether a node computes nothing."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def _warn(template: Template, stage: Stage, reason: str) -> None:
    units = ", ".join(stage.units) or "glue"
    logger.warning(
        "template T%d (stage %d: %s; %d stages) runs eagerly instead of compiled: %s",
        template.index,
        stage.index,
        units,
        len(template.stages),
        reason,
    )
