"""Small made-up models as the passes see them (facts), and the schedules that the passes make of them."""

from __future__ import annotations

from typing import Any

from megatrain_fx.facts import RegionFacts, ScheduleFacts, StageFacts
from megatrain_fx.graph import new_module
from megatrain_fx.ir import View
from megatrain_fx.pass_manager import PassResult, run_passes
from megatrain_fx.passes import pipeline
from megatrain_fx.schedule import Schedule

BYTES = 256


def chain_facts(stages: int = 2, **options: Any) -> ScheduleFacts:
    """Facts of a chain of equal stages, one region with one parameter each; ``options`` are fields of ScheduleFacts."""
    described = tuple(_link(number) for number in range(stages))
    last = f"h{stages - 1}.0"
    fields: dict[str, Any] = {"outputs": (last,), "differentiable_outputs": (last,), "slots": 2, "slabs": 1, **options}
    return ScheduleFacts(described, (RegionFacts(BYTES, BYTES),) * stages, **fields)


def _link(number: int) -> StageFacts:
    source = f"h{number - 1}.0" if number else "input.0"
    return StageFacts(
        template=0,
        regions=(number,),
        trainable_regions=(number,),
        views=((f"{number}.weight", View(f"weights.{number}", 0, (8, 8), "float32")),),
        inputs=(source,),
        outputs=(f"h{number}.0",),
        differentiable_inputs=(source,) if number else (),
        differentiable_outputs=(f"h{number}.0",),
    )


def lower(facts: ScheduleFacts) -> PassResult:
    """What all passes make of facts."""
    return run_passes(new_module(facts), pipeline())


def chain_schedule(stages: int = 2, **options: Any) -> Schedule:
    """The final schedule of :func:`chain_facts`."""
    return lower(chain_facts(stages, **options)).schedule
