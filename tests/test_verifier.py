"""Every rule of the verifier, broken in a legal schedule: the reason, the mark, and the schedule that is printed."""

from __future__ import annotations

from dataclasses import replace

import pytest

import megatrain_fx as megatrain
from broken_rules import BROKEN_RULES, LEGAL, refusal
from megatrain_fx.ir import Lane, Op, Operation
from megatrain_fx.schedule import Schedule
from schedule_edits import changed, find, inserted, moved, removed, resized
from synthetic_facts import chain_facts, chain_schedule, lower


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_a_broken_rule_is_named_and_marked(rule: str) -> None:
    edit, index, reason = BROKEN_RULES[rule]
    assert refusal(edit(LEGAL)) == (index, reason)


def test_an_empty_schedule_does_not_yield() -> None:
    with pytest.raises(megatrain.ScheduleError, match="the schedule never yields to its caller"):
        Schedule(()).verify()


def test_a_schedule_without_a_yield_is_refused() -> None:
    inference = chain_schedule(training=False)
    assert refusal(removed(inference, find(inference, Op.YIELD)))[1] == "the schedule never yields to its caller"


def shared_region_with_two_slabs() -> Schedule:
    """Two stages with one region, each with a slab of its own; accumulates are %14 and %22."""
    facts = chain_facts()
    stages = (replace(one, regions=(0,), trainable_regions=(0,), views=facts.stages[0].views) for one in facts.stages)
    schedule = lower(replace(facts, stages=tuple(stages))).schedule
    for index in (18, 20, 21, 22, 23):
        operation = schedule.operations[index]
        names = {"reads": operation.reads, "writes": operation.writes}
        renamed = {side: tuple(name.replace("slab.0", "slab.1") for name in names[side]) for side in names}
        schedule = changed(schedule, index, **renamed)
    schedule = changed(changed(schedule, 18, after=()), 20, after=(18,))
    schedule = resized(resized(schedule, "slab.1.device", 256), "slab.1.host", 256)
    schedule.verify()
    return schedule


def test_gradients_of_a_shared_region_are_added_in_the_order_of_the_backwards() -> None:
    schedule = shared_region_with_two_slabs()
    assert refusal(moved(moved(schedule, 14, 23), 14, 23)) == (
        22,
        "the gradients of %10 are added to gradients.0 after those of the later %16",
    )


def test_gradients_are_evacuated_once() -> None:
    schedule = shared_region_with_two_slabs()
    assert refusal(changed(moved(schedule, 13, 20), 19, reads=("slab.0.device",))) == (
        19,
        "the gradients in slab.0.device have left it already; they would be counted twice",
    )


def test_a_resumed_schedule_may_read_checkpoints_that_it_did_not_take() -> None:
    chain_schedule(3, resume=True).verify()


def test_a_resumed_schedule_reads_a_checkpoint_until_it_is_released() -> None:
    early = inserted(chain_schedule(3, resume=True), 1, Operation(Op.RELEASE, Lane.COMPUTE, reads=("checkpoint.1",)))
    assert refusal(early)[1] == "checkpoint.1 is released before stage.1 has gone backward"


def test_a_training_schedule_must_take_its_checkpoints() -> None:
    assert refusal(removed(LEGAL, find(LEGAL, Op.CHECKPOINT, stage=1))) == (
        24,
        "checkpoint.1 is read, but holds nothing here: it was not written, or was released before",
    )


def test_a_long_schedule_is_shown_around_the_mark() -> None:
    schedule = chain_schedule(20)
    index = find(schedule, Op.BACKWARD, stage=10)
    with pytest.raises(megatrain.ScheduleError) as caught:
        changed(schedule, index, lane=Lane.D2H).verify()
    lines = str(caught.value).splitlines()
    mark = next(number for number, line in enumerate(lines) if "^ backward runs in lane compute" in line)
    assert lines[mark - 1].startswith(f"%{index} ")
    assert lines[1].strip() == lines[-1].strip() == "..."
    assert len(lines) < 30
