"""A program: a model captured for one kind of call, cut into stages, laid out, and lowered to a verified schedule."""

from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from megatrain_fx.capture import Captured
from megatrain_fx.config import StreamConfig
from megatrain_fx.facts import ScheduleFacts
from megatrain_fx.graph import new_module
from megatrain_fx.layout import Layout, plan_layout
from megatrain_fx.model_facts import describe, names_by_identity, trace_stages
from megatrain_fx.pass_manager import PassResult, run_passes
from megatrain_fx.passes import pipeline
from megatrain_fx.schedule import Schedule
from megatrain_fx.stage_trace import StageTrace, trace_joint_graph
from megatrain_fx.stages import Stage, partition
from megatrain_fx.templates import Template, deduplicate


@dataclass(frozen=True)
class Program:
    """Everything that compiling found out about one kind of call; nothing in it has run.

    Attributes:
        captured: the model as a graph of units and glue (``captured.graph_module``).
        stages: runs of that graph.
        traces: what was learnt of each stage on fake tensors.
        templates: the functions of the stages, one for all equal ones.
        layout: region and offset of every parameter.
        facts: what the passes know.
        lowered: the final graph, and the schedule after every pass.
        resumed: the same for a backward pass from checkpoints alone; None if there is no backward pass.
    """

    captured: Captured
    stages: tuple[Stage, ...]
    traces: tuple[StageTrace, ...]
    templates: tuple[Template, ...]
    layout: Layout
    facts: ScheduleFacts
    lowered: PassResult
    resumed: PassResult | None

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

    @property
    def resume_schedule(self) -> Schedule | None:
        """The schedule of a backward pass from checkpoints alone."""
        return None if self.resumed is None else self.resumed.schedule

    @property
    def training(self) -> bool:
        """Whether a backward pass can follow the forward pass."""
        return self.facts.training


def build_program(model: nn.Module, captured: Captured, config: StreamConfig, layout: Layout | None = None) -> Program:
    """Partition, trace, lay out and lower a captured model; an existing layout is kept.

    Raises:
        PassError, ScheduleError: a pass of the user's own broke the schedule.
    """
    staged = partition(captured, config.stage_bytes)
    training = captured.signature.modes.grad
    wanted = [training and _differentiable(tensor.dtype, tensor.requires_grad) for tensor in captured.signature.tensors]
    traces, differentiable = trace_stages(staged, wanted, config.device)
    templates = deduplicate(traces, lambda index: _joint_graph(staged.stages[index], differentiable, config.device))
    layout = layout or plan_layout(model, [[parameter for _, parameter in stage.parameters] for stage in staged.stages])
    names = names_by_identity(model)
    facts = describe(staged, differentiable, templates, layout, names, config, training)
    lowered = run_passes(new_module(facts), pipeline(config.passes))
    resumed = run_passes(new_module(replace(facts, resume=True)), pipeline()) if facts.training else None
    return Program(captured, staged.stages, traces, templates, layout, facts, lowered, resumed)


def _joint_graph(stage: Stage, differentiable: frozenset[str], device: torch.device) -> fx.GraphModule:
    return trace_joint_graph(stage, [name in differentiable for name in stage.inputs], device)


def _differentiable(dtype: torch.dtype, requires_grad: bool) -> bool:
    return requires_grad and (dtype.is_floating_point or dtype.is_complex)
