"""Derives what the passes may know (:class:`ScheduleFacts`) from stages, their traces and the layout."""

import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from megatrain_fx.config import StreamConfig
from megatrain_fx.facts import Lookup, RegionFacts, ScheduleFacts, StageFacts
from megatrain_fx.ir import View
from megatrain_fx.layout import Layout, Place
from megatrain_fx.lookups import looked_up
from megatrain_fx.stage_trace import StageTrace, trace_stage
from megatrain_fx.stages import Stage, StagedGraph
from megatrain_fx.templates import Template


def trace_stages(
    staged: StagedGraph, input_requires_grad: Sequence[bool], device: torch.device
) -> tuple[tuple[StageTrace, ...], frozenset[str]]:
    """Trace all stages in order.

    Args:
        staged: the stages.
        input_requires_grad: for each input of the model, whether its gradient is wanted.
        device: where the stages compute.

    Returns:
        The traces, and the names of all values that need gradients.
    """
    differentiable = {f"input.{k}" for k, needed in enumerate(input_requires_grad) if needed}
    traces = []
    for stage in staged.stages:
        trace = trace_stage(stage, [name in differentiable for name in stage.inputs], device)
        pairs = zip(stage.outputs, trace.output_requires_grad, strict=True)
        differentiable.update(name for name, needed in pairs if needed)
        traces.append(trace)
    return tuple(traces), frozenset(differentiable)


def describe(
    staged: StagedGraph,
    differentiable: frozenset[str],
    templates: Sequence[Template],
    layout: Layout,
    parameter_names: Mapping[int, str],
    config: StreamConfig,
    training: bool,
) -> ScheduleFacts:
    """The facts of a model.

    Args:
        staged: its stages.
        differentiable: names of the values that need gradients.
        templates: the templates of the stages.
        layout: where parameters lie.
        parameter_names: name in the model of every parameter, by its ``id``.
        config: slots and slabs.
        training: whether a backward pass is wanted.
    """
    places = layout.places
    template_of = {stage: template for template in templates for stage in template.stages}
    alone = {region.places[0].name for region in layout.regions if len(region.places) == 1}
    stages = tuple(
        _describe_stage(
            stage, template_of[stage.index], differentiable if training else frozenset(), places, parameter_names, alone
        )
        for stage in staged.stages
    )
    trainable = {parameter_names[id(p)] for stage in staged.stages for _, p in stage.parameters if p.requires_grad}
    regions = tuple(
        RegionFacts(region.bytes, region.gradient_bytes(trainable) if training else 0) for region in layout.regions
    )
    returned = tuple(name for name in staged.outputs if name in differentiable) if training else ()
    return ScheduleFacts(
        stages, regions, staged.outputs, returned, config.slots, config.slabs, training=training and bool(returned)
    )


def _describe_stage(
    stage: Stage,
    template: Template,
    differentiable: frozenset[str],
    places: Mapping[str, Place],
    parameter_names: Mapping[int, str],
    alone: Collection[str],
) -> StageFacts:
    """The facts of one stage; ``alone`` names the parameters that have a region to themselves."""
    used = [(places[parameter_names[id(p)]], p) for _, p in stage.parameters]
    trainable = {place.region for place, p in used if p.requires_grad}
    return StageFacts(
        template=template.index,
        regions=tuple(sorted({place.region for place, _ in used})),
        trainable_regions=tuple(sorted(trainable)),
        views=tuple((printable(place.name), view_of(place)) for place, _ in used),
        inputs=stage.inputs,
        outputs=stage.outputs,
        differentiable_inputs=tuple(name for name in stage.inputs if name in differentiable),
        differentiable_outputs=tuple(name for name in stage.outputs if name in differentiable),
        lookups=_lookups(stage, template, used, alone),
    )


def _lookups(
    stage: Stage, template: Template, used: Sequence[tuple[Place, nn.Parameter]], alone: Collection[str]
) -> tuple[Lookup, ...]:
    if template.joint is None:
        return ()
    trainable = [number for number, (_, parameter) in enumerate(used) if parameter.requires_grad]
    gradients = {number: len(stage.outputs) + rank for rank, number in enumerate(trainable)}
    indices = looked_up(template.joint.graph, len(used), gradients)
    first_input = len(used) + len(list(stage.module.named_buffers()))
    found = []
    for number, (place, _) in enumerate(used):
        position = indices.get(number, -1) - first_input
        if position >= 0 and place.name in alone and place.stride == (place.shape[1], 1):
            found.append(Lookup(place.region, stage.inputs[position]))
    return tuple(found)


def view_of(place: Place) -> View:
    """A place as schedules print it."""
    return View(f"weights.{place.region}", place.offset, place.shape, str(place.dtype).removeprefix("torch."))


def printable(name: str) -> str:
    """A parameter's name with only the characters that the text form allows in a name."""
    return re.sub(r"[^\w.]", "_", name)


def names_by_identity(model: nn.Module) -> dict[int, str]:
    """The first name of every parameter, by ``id``."""
    return {id(parameter): name for name, parameter in model.named_parameters()}
