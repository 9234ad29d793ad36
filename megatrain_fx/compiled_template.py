"""Compiled templates: each is compiled once by Inductor for all stages that share it, or stays eager and says why."""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from megatrain_fx.compiled_functions import CompiledFunctions
from megatrain_fx.config import StreamConfig
from megatrain_fx.ir import BufferKind, Op, kind_of
from megatrain_fx.joint_graph import StageGraphs, trace_graphs
from megatrain_fx.model_state import preserved
from megatrain_fx.program import Program
from megatrain_fx.random_operations import inductor_options
from megatrain_fx.side_effects import SideEffectWatch
from megatrain_fx.stage_function import StageArguments
from megatrain_fx.stage_trace import StageTrace
from megatrain_fx.stages import Stage
from megatrain_fx.templates import Template

logger = logging.getLogger(__name__)

_MOST_LAYOUTS = 8
"""Layouts of inputs for which one template is compiled; more run eagerly, rather than compile without end."""
_FEWEST_OPERATIONS = 3
_FEWEST_OPERATIONS_ONCE = 5
"""A template with fewer operations (if it has only one stage) is not worth the time that compiling it takes."""


class CompiledTemplate:
    """A template as compiled functions, one pair for each layout (sizes and strides) of inputs that it meets.

    Where sizes vary from call to call, a layout is compiled when it comes a second time: many come only once.
    """

    def __init__(
        self,
        template: Template,
        stage: Stage,
        input_requires_grad: Sequence[bool],
        differentiates: bool,
        sizes_vary: bool,
        device: torch.device,
    ) -> None:
        """Compile nothing yet: that happens as stages run.

        Args:
            template: what to compile.
            stage: one of its stages.
            input_requires_grad: for each input of the stage, whether its gradient is wanted.
            differentiates: whether the stages have a backward.
            sizes_vary: whether the program serves inputs of other sizes too.
            device: where they run.
        """
        self.template = template
        self._stage = stage
        self._input_requires_grad = input_requires_grad
        self._differentiates = differentiates
        self._device = device
        self._functions: dict[Any, CompiledFunctions | None] = {}
        self._calls: Counter[Any] = Counter()
        self._awaited_calls = 2 if sizes_vary else 1
        self._warned = False

    @property
    def compilations(self) -> int:
        """How many functions were compiled."""
        return sum(functions.count for functions in self._functions.values() if functions)

    def functions(self, stage: Stage, arguments: StageArguments) -> CompiledFunctions | None:
        """The functions with which a stage is to run forward and backward; None if it is to run eagerly.

        Compiles them where they are wanted for the first time, which runs them once.
        """
        layout = _layout(arguments.inputs)
        if layout in self._functions:
            return self._functions[layout]
        self._calls[layout] += stage is self._stage
        if self._calls[layout] < self._awaited_calls:
            return None
        if len(self._functions) >= _MOST_LAYOUTS:
            self._stays_eager(f"its inputs came in more than {_MOST_LAYOUTS} sizes (pad batches to a few)")
            return None
        return self._functions.setdefault(layout, self._compile(arguments))

    def _compile(self, arguments: StageArguments) -> CompiledFunctions | None:
        try:
            graphs, reason = self._trace(arguments)
            options = inductor_options(graphs.joint.graph)
            if reason is not None or isinstance(options, str):
                self._stays_eager(reason or str(options))
                return None
            functions = CompiledFunctions(graphs, self._differentiates, self._device, options)
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
        with preserved(self._stage.module):
            watch = SideEffectWatch(self._stage.module)
            graphs = trace_graphs(self._stage, self._input_requires_grad, self._device, arguments)
            reason = watch.found()
        if graphs.replaced_buffers:
            reason = f"it assigns to the buffer {graphs.replaced_buffers[0]}, rather than update it in place"
        return graphs, reason

    def _stays_eager(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            _warn(self.template, self._stage, reason)


def compile_templates(program: Program, config: StreamConfig) -> dict[int, CompiledTemplate]:
    """The compiled templates of a program, by stage; stages that are left out run eagerly.

    A stage whose forward records a tape for the backward is left out, since compiled functions record none.
    """
    if config.template != "inductor":
        return {}
    recording = {operation.stage for operation in program.schedule if _records(operation)}
    compiled: dict[int, CompiledTemplate] = {}
    for template in program.templates:
        if _is_trivial(template):
            continue
        replaying = (index for index in template.stages if index not in recording)
        stages = [i for i in replaying if _may_be_compiled(template, program.stages[i], program.traces[i])]
        if stages:
            stage, facts = program.stages[stages[0]], program.facts.stages[stages[0]]
            wanted = [name in facts.differentiable_inputs for name in stage.inputs]
            differentiates, sizes_vary = program.training and facts.has_backward, program.capture.symbolic is not None
            shared = CompiledTemplate(template, stage, wanted, differentiates, sizes_vary, config.device)
            compiled.update(dict.fromkeys(stages, shared))
    return compiled


def _may_be_compiled(template: Template, stage: Stage, trace: StageTrace) -> bool:
    """Whether nothing that is known of a stage forbids it; otherwise a warning says what."""
    reason = template.reason or trace.side_effect
    if trace.mutated_inputs:
        reason = f"it modifies its input {stage.inputs[trace.mutated_inputs[0]]} in place"
    if reason is not None:
        _warn(template, stage, reason)
    return reason is None


def _is_trivial(template: Template) -> bool:
    """Whether a template has too few operations ahead of those that wait for its outputs' gradients."""
    if template.joint is None:
        return False
    computing = 0
    late: set[fx.Node] = set()
    for node in template.joint.graph.nodes:
        if str(node.target).startswith("tangents") or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        elif node.op == "call_function" and not _is_view(node):
            computing += 1
    return computing < (_FEWEST_OPERATIONS if len(template.stages) > 1 else _FEWEST_OPERATIONS_ONCE)


def _records(operation: Any) -> bool:
    return operation.op is Op.FORWARD and any(kind_of(name) is BufferKind.TAPE for name in operation.writes)


def _layout(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What a graph that was traced with these inputs holds of them."""
    return tuple((v.dtype, v.device, tuple(v.shape), v.stride()) if isinstance(v, torch.Tensor) else v for v in inputs)


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
