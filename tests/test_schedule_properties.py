"""Properties of the schedules of any model, and of any small model's numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from comparison import make_pair
from megatrain_fx.facts import ScheduleFacts
from megatrain_fx.happens_before import HappensBefore
from megatrain_fx.ir import BufferKind, Op, kind_of, number_of
from megatrain_fx.passes.residency import size_classes
from megatrain_fx.schedule import Schedule
from random_facts import chain_of_equals, schedule_facts
from random_models import WIDTH, Plan, PlannedNetwork, plans
from schedule_edits import accepted, dependency_deletions
from synthetic_facts import lower


def properties(examples: int, *, always_the_same: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Settings that do not depend on how busy the machine is."""
    phases = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)  # explaining takes far too long
    return settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=phases,
        derandomize=always_the_same,
    )


@properties(50)
@given(schedule_facts())
def test_every_schedule_is_legal_and_parses_back(facts: ScheduleFacts) -> None:
    for name, schedule in lower(facts).history:
        assert Schedule.parse(str(schedule)) == schedule, name
    schedule.verify()


@properties(50)
@given(schedule_facts())
def test_every_dependency_is_needed(facts: ScheduleFacts) -> None:
    schedule = lower(facts).schedule
    note(str(schedule))
    order = HappensBefore(schedule.operations)
    assert all(operation.after == order.needed(index) for index, operation in enumerate(schedule))
    for mutant in dependency_deletions(schedule):
        assert not accepted(mutant.schedule), mutant


def contents_of_slots(schedule: Schedule) -> dict[str, set[int]]:
    """The regions that each slot ever holds."""
    contents: dict[str, set[int]] = {name: set() for name in schedule.buffers if kind_of(name) is BufferKind.SLOT}
    for operation in schedule:
        if operation.op is Op.PREFETCH:
            contents[operation.writes[0]].add(number_of(operation.reads[0]))
    return contents


@properties(50)
@given(schedule_facts())
def test_slots_are_within_their_limit(facts: ScheduleFacts) -> None:
    schedule = lower(facts).schedule
    note(str(schedule))
    classes = size_classes([region.bytes for region in facts.regions])
    uses = [facts.stages[o.stage or 0].regions for o in schedule if o.op in (Op.FORWARD, Op.RECOMPUTE)]
    uses = [use for use in uses if use]
    windows = [set().union(*uses[i : i + facts.slots]) for i in range(max(len(uses) - facts.slots, 0) + 1)]
    kinds = [{classes[region] for region in regions} for regions in contents_of_slots(schedule).values()]
    assert all(len(kind) == 1 for kind in kinds), "regions of very different sizes share a slot"
    for kind, count in Counter(min(kind) for kind in kinds).items():
        assert count <= max(sum(classes[region] == kind for region in window) for window in windows)


@properties(30)
@given(chain_of_equals())
def test_a_chain_of_equal_stages_uses_as_many_buffers_as_are_declared(facts: ScheduleFacts) -> None:
    buffers = lower(facts).schedule.buffers
    stages = len(facts.stages)
    assert sum(name.startswith("slot.") for name in buffers) == min(facts.slots, stages)
    assert sum(name.endswith(".device") for name in buffers) == min(facts.slabs, stages)
    assert sum(name.endswith(".host") for name in buffers) == min(facts.slabs, stages)


@properties(12)
@given(chain_of_equals())
def test_more_slots_never_mean_more_copies(facts: ScheduleFacts) -> None:
    def copies(slots: int) -> int:
        schedule = lower(replace(facts, slots=slots)).schedule
        return sum(operation.op is Op.PREFETCH for operation in schedule)

    assert copies(facts.slots + 1) <= copies(facts.slots)
    assert copies(len(facts.stages)) == len(facts.stages)


@properties(50)
@given(schedule_facts())
def test_every_gradient_comes_home_once(facts: ScheduleFacts) -> None:
    schedule = lower(facts).schedule
    backwards = {operation.stage for operation in schedule if operation.op is Op.BACKWARD}
    expected = [f"gradients.{r}" for stage in backwards for r in facts.stages[stage or 0].trainable_regions]
    found = [operation.writes[0] for operation in schedule if operation.op is Op.ACCUMULATE]
    assert sorted(found) == sorted(expected)


@properties(6, always_the_same=True)
@given(
    plan=plans(),
    slots=st.integers(1, 3),
    slabs=st.integers(1, 2),
    stage_bytes=st.sampled_from([0, 2000, 2**20]),
    chaos=st.integers(0, 99),
)
def test_any_small_model_equals_eager(plan: Plan, slots: int, slabs: int, stage_bytes: int, chaos: int) -> None:
    options = {"slots": slots, "slabs": slabs, "stage_bytes": stage_bytes, "chaos": chaos}
    torch.manual_seed(chaos)
    pair = make_pair(lambda: PlannedNetwork(plan), torch.device("cpu"), reused=plan.reused, **options)
    inputs = torch.randn(4, WIDTH)
    for seed in (1, 2):
        pair.step(inputs, seed=seed)
