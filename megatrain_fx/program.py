"""A program: a model captured for one kind of call, cut into stages, laid out, and lowered to a verified schedule."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx, nn

from megatrain_fx.capture import Captured
from megatrain_fx.config import StreamConfig
from megatrain_fx.facts import ScheduleFacts, Updates
from megatrain_fx.graph import new_module
from megatrain_fx.joint_graph import trace_graphs
from megatrain_fx.layout import Layout, plan_layout
from megatrain_fx.model_facts import describe, names_by_identity, trace_stages
from megatrain_fx.pass_manager import GraphTransform, PassResult, run_passes
from megatrain_fx.passes import pipeline
from megatrain_fx.passes.chunk_loss import chunk_loss
from megatrain_fx.schedule import Schedule
from megatrain_fx.stage_trace import StageTrace
from megatrain_fx.stages import Stage, partition
from megatrain_fx.templates import Template, deduplicate


@dataclass(frozen=True)
class Program:
    """Everything that compiling found out about one kind of call; nothing in it has run.

    Attributes:
        capture: the captured call: its graph, signature and output tree.
        stages: runs of that graph.
        traces: what was learnt of each stage on fake tensors.
        templates: the functions of the stages, one for all equal ones.
        layout: region and offset of every parameter.
        facts: what the passes know.
        passes: the user's own passes.
        lowered: the final graph, and the schedule after every pass.
    """

    capture: Captured
    stages: tuple[Stage, ...]
    traces: tuple[StageTrace, ...]
    templates: tuple[Template, ...]
    layout: Layout
    facts: ScheduleFacts
    passes: tuple[GraphTransform, ...]
    lowered: PassResult

    @property
    def captured(self) -> fx.GraphModule:
        """The model as a graph: every call of a unit is one node, the glue between them is ATen."""
        return self.capture.graph_module

    @property
    def graph_module(self) -> fx.GraphModule:
        """The schedule as a torch.fx graph: one node an operation."""
        return self.lowered.module

    @property
    def schedule(self) -> Schedule:
        """The final schedule."""
        return self.lowered.schedule

    @property
    def history(self) -> list[tuple[str, Schedule]]:
        """The schedule after every pass, with the pass's name."""
        return list(self.lowered.history)

    @cached_property
    def resume_schedule(self) -> Schedule | None:
        """The schedule of a backward pass from checkpoints alone; None if there is no backward pass."""
        return self.lower(resume=True).schedule if self.training else None

    def lower(self, *, resume: bool = False, updates: Updates | None = None) -> PassResult:
        """Run all passes: for a whole step, or for a backward pass from checkpoints alone (without the user's passes).

        Args:
            resume: only the backward pass.
            updates: what the optimizer does within the schedule; as the program was built by default.
        """
        facts = replace(self.facts, resume=resume, updates=self.facts.updates if updates is None else updates)
        return run_passes(new_module(facts), pipeline(() if resume else self.passes))

    @property
    def training(self) -> bool:
        """Whether a backward pass can follow the forward pass."""
        return self.facts.training


def build_program(
    model: nn.Module,
    captured: Captured,
    config: StreamConfig,
    layout: Layout | None = None,
    updates: Callable[[Layout], Updates] | None = None,
) -> Program:
    """Partition, trace, lay out and lower a captured model.

    Args:
        model: the model that was captured.
        captured: its graph.
        config: how to stream it.
        layout: where parameters lie already; planned for this call by default.
        updates: what the optimizer does within the schedule, given the layout; nothing by default.

    Raises:
        PassError, ScheduleError: a pass of the user's own broke the schedule.
    """
    if config.loss_chunk_bytes is not None:
        compiled = config.template != "eager"
        captured = chunk_loss(captured, config.loss_chunk_bytes, keep_logits=config.keep_logits, compiled=compiled)
    staged = partition(captured, config.stage_bytes)
    training = captured.signature.modes.grad
    wanted = [training and _differentiable(tensor.dtype, tensor.requires_grad) for tensor in captured.signature.tensors]
    traces, differentiable = trace_stages(staged, wanted, config.device)
    templates = deduplicate(traces, lambda index: _joint_graph(staged.stages[index], differentiable, config.device))
    layout = layout or plan_layout(model, [[parameter for _, parameter in stage.parameters] for stage in staged.stages])
    names = names_by_identity(model)
    facts = describe(staged, differentiable, templates, layout, names, config, training)
    if updates is not None and facts.training:
        facts = replace(facts, updates=updates(layout))
    lowered = run_passes(new_module(facts), pipeline(config.passes))
    return Program(captured, staged.stages, traces, templates, layout, facts, config.passes, lowered)


def _joint_graph(stage: Stage, differentiable: frozenset[str], device: torch.device) -> fx.GraphModule:
    return trace_graphs(stage, [name in differentiable for name in stage.inputs], device).joint


def _differentiable(dtype: torch.dtype, requires_grad: bool) -> bool:
    return requires_grad and (dtype.is_floating_point or dtype.is_complex)
