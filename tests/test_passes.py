"""Each pass on a small chain: the lines that it changes."""

from __future__ import annotations

from dataclasses import replace

from expecttest import assert_expected_inline

from megatrain_fx.facts import ScheduleFacts, UpdateMode, Updates
from megatrain_fx.graph import new_module, nodes_of, operation_of
from megatrain_fx.ir import Op
from megatrain_fx.schedule import Schedule
from synthetic_facts import chain_facts, lower


def around(name: str, facts: ScheduleFacts) -> tuple[Schedule, Schedule]:
    """The schedules before and after a pass of the pipeline."""
    history = dict(lower(facts).history)
    names = list(history)
    position = names.index(name)
    before = history[names[position - 1]] if position else Schedule(())
    return before, history[name]


def change(name: str, facts: ScheduleFacts) -> str:
    """The lines that a pass adds and takes away, without buffers and numbers."""
    before, after = around(name, facts)
    lines = before.diff(after).splitlines()[2:]
    return "\n".join(line for line in lines if line[0] in "+-" and not line.endswith(" bytes") and len(line) > 1)


def lines_of(schedule: Schedule, *ops: Op) -> str:
    """Numbered lines of some ops."""
    text = [line for line in str(schedule).splitlines() if line.startswith("%")]
    return "\n".join(" ".join(text[i].split()) for i, operation in enumerate(schedule) if operation.op in ops)


def test_lower_stages_gives_forwards_a_yield_and_backwards() -> None:
    assert_expected_inline(
        change("lower_stages", chain_facts()),
        """\
+forward compute stage.0 T0 input.0 -> h0.0
+forward compute stage.1 T0 h0.0 -> h1.0
+yield compute h1.0 -> grad.h1.0
+backward compute stage.1 h0.0, grad.h1.0 -> grad.h0.0, gradients.1
+backward compute stage.0 input.0, grad.h0.0 -> gradients.0""",
    )


def test_lower_stages_for_inference_gives_forwards_only() -> None:
    assert_expected_inline(
        change("lower_stages", chain_facts(training=False)),
        """\
+forward compute stage.0 T0 input.0 -> h0.0
+forward compute stage.1 T0 h0.0 -> h1.0
+yield compute h1.0""",
    )


def test_lower_stages_for_resuming_gives_backwards_only() -> None:
    assert_expected_inline(
        change("lower_stages", chain_facts(resume=True)),
        """\
+yield compute -> grad.h1.0
+backward compute stage.1 h0.0, grad.h1.0 -> grad.h0.0, gradients.1
+backward compute stage.0 input.0, grad.h0.0 -> gradients.0""",
    )


def test_lower_stages_adds_up_the_gradients_of_a_value_that_two_stages_read() -> None:
    facts = chain_facts(3)
    last = replace(facts.stages[2], inputs=("h0.0", "h1.0"), differentiable_inputs=("h0.0", "h1.0"))
    _, lowered = around("lower_stages", replace(facts, stages=(*facts.stages[:2], last)))
    assert_expected_inline(
        lines_of(lowered, Op.BACKWARD),
        """\
%4 = backward compute stage.2 h0.0, h1.0, grad.h2.0 -> grad.h0.0, grad.h1.0, gradients.2
%5 = backward compute stage.1 h0.0, grad.h1.0, grad.h0.0 -> grad.h0.0, gradients.1
%6 = backward compute stage.0 input.0, grad.h0.0 -> gradients.0""",
    )


def test_lower_stages_gives_a_frozen_first_stage_no_backward() -> None:
    facts = chain_facts()
    frozen = replace(facts.stages[0], trainable_regions=(), differentiable_outputs=())
    follower = replace(facts.stages[1], differentiable_inputs=())
    _, lowered = around("lower_stages", replace(facts, stages=(frozen, follower)))
    assert_expected_inline(
        lines_of(lowered, Op.BACKWARD), """%3 = backward compute stage.1 h0.0, grad.h1.0 -> gradients.1"""
    )


def test_insert_checkpoints_keeps_inputs_and_reruns_all_stages_but_the_last() -> None:
    assert_expected_inline(
        change("insert_checkpoints", chain_facts()),
        """\
+checkpoint compute stage.0 input.0 -> checkpoint.0
-forward compute stage.1 T0 h0.0 -> h1.0
+checkpoint compute stage.1 h0.0 -> checkpoint.1
+forward compute stage.1 T0 h0.0 -> h1.0, tape.1
-backward compute stage.1 h0.0, grad.h1.0 -> grad.h0.0, gradients.1
-backward compute stage.0 input.0, grad.h0.0 -> gradients.0
+backward compute stage.1 tape.1, grad.h1.0 -> grad.h0.0, gradients.1
+recompute compute stage.0 T0 checkpoint.0 -> tape.0
+backward compute stage.0 tape.0, grad.h0.0 -> gradients.0""",
    )


def test_evacuate_gradients_sends_them_home_through_slabs() -> None:
    assert_expected_inline(
        change("evacuate_gradients", chain_facts(1)),
        """\
-backward compute stage.0 tape.0, grad.h0.0 -> gradients.0
+backward compute stage.0 tape.0, grad.h0.0 -> slab.use0.device
+evacuate d2h slab.use0.device -> slab.use0.host
+release d2h slab.use0.device
+accumulate host slab.use0.host -> gradients.0
+release host slab.use0.host""",
    )


def test_stream_weights_gives_every_use_a_slot() -> None:
    assert_expected_inline(
        change("stream_weights", chain_facts()),
        """\
-forward compute stage.0 T0 input.0 -> h0.0
+prefetch h2d weights.0 -> slot.use0
+load compute stage.0 slot.use0 -> <0.weight> (weights.0+0 float32[8, 8])
+forward compute stage.0 T0 slot.use0, input.0 -> h0.0
+release compute slot.use0
-forward compute stage.1 T0 h0.0 -> h1.0, tape.1
+prefetch h2d weights.1 -> slot.use1
+load compute stage.1 slot.use1 -> <1.weight> (weights.1+0 float32[8, 8])
+forward compute stage.1 T0 slot.use1, h0.0 -> h1.0, tape.1
-backward compute stage.1 tape.1, grad.h1.0 -> grad.h0.0, slab.use0.device
+backward compute stage.1 slot.use1, tape.1, grad.h1.0 -> grad.h0.0, slab.use0.device
+release compute slot.use1
-recompute compute stage.0 T0 checkpoint.0 -> tape.0
-backward compute stage.0 tape.0, grad.h0.0 -> slab.use1.device
+prefetch h2d weights.0 -> slot.use2
+load compute stage.0 slot.use2 -> <0.weight> (weights.0+0 float32[8, 8])
+recompute compute stage.0 T0 slot.use2, checkpoint.0 -> tape.0
+backward compute stage.0 slot.use2, tape.0, grad.h0.0 -> slab.use1.device
+release compute slot.use2""",
    )


def test_release_values_frees_each_after_its_last_use() -> None:
    assert_expected_inline(
        change("release_values", chain_facts()),
        """\
+release compute h0.0
+release compute h1.0
-release compute slot.use1
+release compute slot.use1, checkpoint.1, tape.1, grad.h1.0
-release compute slot.use2
+release compute slot.use2, checkpoint.0, grad.h0.0, tape.0""",
    )


def test_assign_slots_numbers_them_and_does_not_fetch_a_resident_region_again() -> None:
    before, after = around("assign_slots", chain_facts())
    assert_expected_inline(
        lines_of(before, Op.PREFETCH, Op.RECOMPUTE),
        """\
%1 = prefetch h2d weights.0 -> slot.use0
%6 = prefetch h2d weights.1 -> slot.use1
%18 = prefetch h2d weights.0 -> slot.use2
%20 = recompute compute stage.0 T0 slot.use2, checkpoint.0 -> tape.0""",
    )
    assert_expected_inline(
        lines_of(after, Op.PREFETCH, Op.RECOMPUTE),
        """\
%1 = prefetch h2d weights.0 -> slot.0
%5 = prefetch h2d weights.1 -> slot.1
%18 = recompute compute stage.0 T0 slot.0, checkpoint.0 -> tape.0""",
    )


def test_assign_slots_with_one_slot_fetches_every_time() -> None:
    _, after = around("assign_slots", chain_facts(slots=1))
    assert_expected_inline(
        lines_of(after, Op.PREFETCH),
        """\
%1 = prefetch h2d weights.0 -> slot.0
%6 = prefetch h2d weights.1 -> slot.0
%18 = prefetch h2d weights.0 -> slot.0""",
    )


def test_assign_slabs_uses_them_in_rotation() -> None:
    _, after = around("assign_slabs", chain_facts(3, slabs=2))
    assert_expected_inline(
        lines_of(after, Op.EVACUATE),
        """\
%19 = evacuate d2h slab.0.device -> slab.0.host
%27 = evacuate d2h slab.1.device -> slab.1.host
%36 = evacuate d2h slab.0.device -> slab.0.host""",
    )


def test_hoist_prefetches_moves_each_to_where_its_slot_is_free() -> None:
    before, after = around("hoist_prefetches", chain_facts(3))
    assert_expected_inline(
        lines_of(before, Op.PREFETCH),
        """\
%1 = prefetch h2d weights.0 -> slot.0
%6 = prefetch h2d weights.1 -> slot.1
%11 = prefetch h2d weights.2 -> slot.0
%31 = prefetch h2d weights.0 -> slot.0""",
    )
    assert_expected_inline(
        lines_of(after, Op.PREFETCH),
        """\
%0 = prefetch h2d weights.0 -> slot.0
%1 = prefetch h2d weights.1 -> slot.1
%6 = prefetch h2d weights.2 -> slot.0
%19 = prefetch h2d weights.0 -> slot.0""",
    )
    assert "slot.0" in after.operations[5].freed
    assert "slot.0" in after.operations[18].freed


def updating(mode: UpdateMode) -> ScheduleFacts:
    """Two stages, both trained by the schedule itself."""
    return chain_facts(updates=Updates(mode, (0, 1)))


def test_insert_updates_does_nothing_without_an_optimizer() -> None:
    before, after = around("insert_updates", updating(UpdateMode.NONE))
    assert before == after


def test_insert_updates_trains_each_region_when_its_gradients_are_home() -> None:
    _, after = around("insert_updates", updating(UpdateMode.DURING_BACKWARD))
    assert_expected_inline(
        lines_of(after, Op.ACCUMULATE, Op.UPDATE),
        """\
%15 = accumulate host slab.0.host -> gradients.1
%16 = update optimizer gradients.1 -> weights.1
%24 = accumulate host slab.0.host -> gradients.0
%25 = update optimizer gradients.0 -> weights.0""",
    )


def test_insert_updates_measures_all_gradients_before_it_clips_them() -> None:
    _, after = around("insert_updates", updating(UpdateMode.AFTER_CLIP))
    assert_expected_inline(
        lines_of(after, Op.ACCUMULATE, Op.NORM, Op.CLIP, Op.UPDATE),
        """\
%15 = accumulate host slab.0.host -> gradients.1
%16 = norm host gradients.1 -> norm.1
%24 = accumulate host slab.0.host -> gradients.0
%25 = norm host gradients.0 -> norm.0
%27 = clip host norm.1, norm.0 -> scale
%28 = update optimizer gradients.0, scale -> weights.0
%29 = update optimizer gradients.1, scale -> weights.1""",
    )


def test_a_prefetch_waits_for_the_update_of_the_previous_step() -> None:
    schedule = lower(updating(UpdateMode.AFTER_CLIP)).schedule
    assert_expected_inline(
        lines_of(schedule, Op.PREFETCH, Op.UPDATE),
        """\
%0 = prefetch h2d weights.0 -> slot.0 after prev %28
%1 = prefetch h2d weights.1 -> slot.1 after prev %29
%28 = update optimizer gradients.0, scale -> weights.0 after %27
%29 = update optimizer gradients.1, scale -> weights.1 after %27""",
    )


def test_add_dependencies_orders_conflicting_accesses() -> None:
    before, after = around("add_dependencies", chain_facts())
    assert not any(operation.after for operation in before)
    assert_expected_inline(
        lines_of(after, Op.PREFETCH, Op.LOAD, Op.FORWARD, Op.BACKWARD, Op.EVACUATE),
        """\
%0 = prefetch h2d weights.0 -> slot.0
%1 = prefetch h2d weights.1 -> slot.1
%3 = load compute stage.0 slot.0 -> <0.weight> (weights.0+0 float32[8, 8]) after %0
%4 = forward compute stage.0 T0 slot.0, input.0 -> h0.0 after %0
%6 = load compute stage.1 slot.1 -> <1.weight> (weights.1+0 float32[8, 8]) after %1
%7 = forward compute stage.1 T0 slot.1, h0.0 -> h1.0, tape.1 after %1
%11 = backward compute stage.1 slot.1, tape.1, grad.h1.0 -> grad.h0.0, slab.0.device after %1
%13 = evacuate d2h slab.0.device -> slab.0.host after %11
%17 = load compute stage.0 slot.0 -> <0.weight> (weights.0+0 float32[8, 8]) after %0
%19 = backward compute stage.0 slot.0, tape.0, grad.h0.0 -> slab.0.device after %0, %14
%21 = evacuate d2h slab.0.device -> slab.0.host after %16, %19""",
    )


def test_prune_dependencies_keeps_only_those_that_order_something() -> None:
    _, after = around("prune_dependencies", chain_facts())
    assert_expected_inline(
        lines_of(after, Op.PREFETCH, Op.LOAD, Op.FORWARD, Op.BACKWARD, Op.EVACUATE),
        """\
%0 = prefetch h2d weights.0 -> slot.0
%1 = prefetch h2d weights.1 -> slot.1
%3 = load compute stage.0 slot.0 -> <0.weight> (weights.0+0 float32[8, 8]) after %0
%4 = forward compute stage.0 T0 slot.0, input.0 -> h0.0
%6 = load compute stage.1 slot.1 -> <1.weight> (weights.1+0 float32[8, 8]) after %1
%7 = forward compute stage.1 T0 slot.1, h0.0 -> h1.0, tape.1
%11 = backward compute stage.1 slot.1, tape.1, grad.h1.0 -> grad.h0.0, slab.0.device
%13 = evacuate d2h slab.0.device -> slab.0.host after %11
%17 = load compute stage.0 slot.0 -> <0.weight> (weights.0+0 float32[8, 8])
%19 = backward compute stage.0 slot.0, tape.0, grad.h0.0 -> slab.0.device after %14
%21 = evacuate d2h slab.0.device -> slab.0.host after %16, %19""",
    )


def test_operations_survive_the_graph() -> None:
    facts = chain_facts()
    operations = lower(facts).schedule.operations
    assert [operation_of(node) for node in nodes_of(new_module(facts, operations))] == [
        replace(operation, after=()) for operation in operations
    ]
