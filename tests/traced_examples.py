"""The examples of the zoo, each compiled once for all tests of schedules: one stage a unit, two slots, chaos mode."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from torch import nn

import megatrain_fx as megatrain
from megatrain_fx.edge import STATE
from megatrain_fx.graph import new_module
from megatrain_fx.pass_manager import PassResult, run_passes
from megatrain_fx.passes import pipeline
from megatrain_fx.program import Program
from megatrain_fx.schedule import Schedule
from megatrain_fx.streamed_model import StreamedModel
from models import Example, example


@dataclass(frozen=True)
class TracedExample:
    """A compiled model, and the program of its training step."""

    example: Example
    model: nn.Module
    program: Program

    @property
    def streamed(self) -> StreamedModel:
        """The state behind the compiled model."""
        streamed: StreamedModel = self.model.__dict__[STATE]
        return streamed

    def lowered(self, **facts: object) -> PassResult:
        """The passes run again on the same stages with other facts, for example ``slots=1``."""
        changed = replace(self.program.facts, **facts)  # type: ignore[arg-type]
        return run_passes(new_module(changed), pipeline())

    def schedules(self) -> dict[str, Schedule]:
        """What the passes make of the model for training, for inference, and for a backward pass on its own."""
        resumed = self.program.resume_schedule
        assert resumed is not None
        return {
            "train": self.program.schedule,
            "infer": self.lowered(training=False).schedule,
            "resume": resumed,
        }


@functools.cache
def traced(name: str) -> TracedExample:
    """The compiled example called ``name``, captured but not run."""
    chosen = example(name)
    model = megatrain.compile(chosen.make_model(), device="cpu", slots=2, stage_bytes=0, chaos=1)
    streamed: StreamedModel = model.__dict__[STATE]
    program, _ = streamed.prepare(model, *chosen.make_inputs())
    return TracedExample(chosen, model, program)
