"""Each pass refused: where it lacks what it requires, and where it breaks what it promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from textwrap import fill

import pytest
from expecttest import assert_expected_inline
from torch import fx

import megatrain_fx as megatrain
from megatrain_fx.facts import ScheduleFacts, UpdateMode, Updates
from megatrain_fx.graph import new_module, nodes_of, set_fields
from megatrain_fx.ir import Op
from megatrain_fx.pass_manager import SchedulePass, run_passes
from megatrain_fx.passes import pipeline
from synthetic_facts import chain_facts

PASSES = {one.name: one for one in pipeline()}


@pytest.mark.parametrize("name", [name for name, one in PASSES.items() if one.requires])
def test_a_pass_run_first_is_refused(name: str) -> None:
    with pytest.raises(megatrain.PassError) as caught:
        run_passes(new_module(chain_facts()), [PASSES[name]])
    missing = min(required.value for required in PASSES[name].requires)
    expected = f"pass {name} requires a graph in which {missing}; passes run before it: none"
    assert str(caught.value) == expected


def test_lower_stages_refuses_a_graph_without_facts() -> None:
    with pytest.raises(megatrain.PassError) as caught:
        PASSES["lower_stages"].run(fx.symbolic_trace(lambda x: x))
    assert_expected_inline(
        fill(str(caught.value), 100),
        """the graph carries no facts about its model: a pass must return the module it was given, or a copy""",
    )


def broken(name: str, spoil: Callable[[fx.GraphModule], None], facts: ScheduleFacts | None = None) -> str:
    """The refusal when a pass of the pipeline does its work and then spoils it; without the list of passes."""

    def spoiled(module: fx.GraphModule) -> fx.GraphModule:
        result = PASSES[name].run(module)
        spoil(result)
        return result

    spoiled.__name__ = name
    passes = [replace(one, run=spoiled) if one.name == name else one for one in pipeline()]
    with pytest.raises(megatrain.PassError) as caught:
        run_passes(new_module(facts or chain_facts()), passes)
    return fill(str(caught.value).splitlines()[0], 100)


def erase(op: Op, nth: int = 0) -> Callable[[fx.GraphModule], None]:
    """Spoil a graph by taking an operation away."""

    def spoil(module: fx.GraphModule) -> None:
        node = nodes_of(module, op)[nth]
        for user in list(node.users):
            user.args = tuple(arg for arg in user.args if arg is not node)
            set_fields(user, after=tuple(other for other in user.kwargs["after"] if other is not node))
        module.graph.erase_node(node)

    return spoil


def test_a_lowering_that_forgets_a_forward_is_refused() -> None:
    assert_expected_inline(
        broken("lower_stages", erase(Op.FORWARD)),
        """\
after pass lower_stages it does not hold that every stage has one forward, and there is one yield:
forwards of stages [1], expected [0, 1]""",
    )


def test_a_lowering_that_forgets_the_yield_is_refused() -> None:
    assert_expected_inline(
        broken("lower_stages", erase(Op.YIELD)),
        """\
after pass lower_stages it does not hold that every stage has one forward, and there is one yield: 0
yields, expected one""",
    )


def test_checkpoints_that_leave_a_backward_without_its_tape_are_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        set_fields(nodes_of(module, Op.BACKWARD)[1], reads=("input.0", "grad.h0.0"))

    assert_expected_inline(
        broken("insert_checkpoints", spoil),
        """\
after pass insert_checkpoints it does not hold that every backward reads a tape and gradients, and
no activation: the backward of stage.0 reads input.0, grad.h0.0""",
    )


def test_gradients_that_are_not_evacuated_are_refused() -> None:
    assert_expected_inline(
        broken("evacuate_gradients", erase(Op.EVACUATE)),
        """\
after pass evacuate_gradients it does not hold that every slab that a backward writes is brought
home: slab.use0.device, which the backward of stage.1 writes, is never evacuated""",
    )


def test_gradients_written_to_the_host_from_the_device_are_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        set_fields(nodes_of(module, Op.BACKWARD)[0], writes=("grad.h0.0", "gradients.1"))

    assert_expected_inline(
        broken("evacuate_gradients", spoil),
        """\
after pass evacuate_gradients it does not hold that every slab that a backward writes is brought
home: the backward of stage.1 writes gradients.1 from the device""",
    )


def test_weights_that_are_not_streamed_are_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        set_fields(nodes_of(module, Op.RECOMPUTE)[0], reads=("checkpoint.0",))

    assert_expected_inline(
        broken("stream_weights", spoil),
        """\
after pass stream_weights it does not hold that every forward and recompute reads a slot for each
region of its stage: recompute of stage.0 reads slots [] for regions (0,)""",
    )


def test_a_value_that_is_not_released_is_refused() -> None:
    assert_expected_inline(
        broken("release_values", erase(Op.RELEASE, 1)),
        """\
after pass release_values it does not hold that no activation, checkpoint or tape is left at the
end: h0.0 is never released""",
    )


def test_a_slot_without_a_number_is_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        set_fields(nodes_of(module, Op.PREFETCH)[0], writes=("slot.use0",))

    assert_expected_inline(
        broken("assign_slots", spoil),
        """\
after pass assign_slots it does not hold that slots are numbered from zero: slot.use0 is not
assigned""",
    )


def test_a_slab_without_a_number_is_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        set_fields(nodes_of(module, Op.EVACUATE)[0], writes=("slab.use0.host",))

    assert_expected_inline(
        broken("assign_slabs", spoil),
        """\
after pass assign_slabs it does not hold that slabs are numbered from zero: slab.use0.host is not
assigned""",
    )


def test_an_update_before_the_last_use_of_the_weights_is_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        nodes_of(module)[0].prepend(nodes_of(module, Op.UPDATE)[0])

    facts = chain_facts(updates=Updates(UpdateMode.DURING_BACKWARD, (0, 1)))
    assert_expected_inline(
        broken("insert_updates", spoil, facts),
        """\
after pass add_dependencies it does not hold that the verifier accepts the schedule: operation %0:
gradients.1 is not complete yet: %16 still adds to it""",
    )


def test_a_prefetch_hoisted_too_far_is_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        first, *_, last = nodes_of(module, Op.PREFETCH)
        first.append(last)

    assert_expected_inline(
        broken("hoist_prefetches", spoil, chain_facts(3)),
        """\
after pass add_dependencies it does not hold that the verifier accepts the schedule: operation %1:
slot.0 is overwritten while it still holds the result of %0; release it first""",
    )


def test_a_dependency_that_is_not_added_is_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        set_fields(nodes_of(module, Op.EVACUATE)[0], after=())

    assert_expected_inline(
        broken("add_dependencies", spoil),
        """\
after pass add_dependencies it does not hold that the verifier accepts the schedule: operation %13:
race on slab.0.device: %11 (backward) need not be complete when %13 (evacuate) starts; add 'after
%11'""",
    )


def test_a_dependency_that_is_not_pruned_is_refused() -> None:
    def spoil(module: fx.GraphModule) -> None:
        set_fields(nodes_of(module, Op.FORWARD)[1], after=(nodes_of(module, Op.PREFETCH)[0],))

    assert_expected_inline(
        broken("prune_dependencies", spoil),
        """\
after pass prune_dependencies it does not hold that no dependency is redundant: %7 need not wait for
%0""",
    )


def test_a_later_pass_must_keep_what_an_earlier_one_promised() -> None:
    def forget(module: fx.GraphModule) -> fx.GraphModule:
        erase(Op.EVACUATE)(module)
        return module

    with pytest.raises(megatrain.PassError) as caught:
        run_passes(new_module(chain_facts()), pipeline([forget]))
    assert_expected_inline(
        "\n".join(fill(line, 100) for line in str(caught.value).splitlines()),
        """\
after pass forget it does not hold that every slab that a backward writes is brought home:
slab.0.device, which the backward of stage.1 writes, is never evacuated
passes run before it: lower_stages, insert_checkpoints, evacuate_gradients, stream_weights,
release_values, assign_slots, assign_slabs, hoist_prefetches, insert_updates, split_updates""",
    )


def test_a_property_that_a_pass_replaces_need_not_hold_any_longer() -> None:
    def keep_alive(module: fx.GraphModule) -> fx.GraphModule:
        erase(Op.RELEASE, 1)(module)
        return module

    earlier = pipeline()[:5]
    replacing = SchedulePass(keep_alive, replaces=PASSES["release_values"].ensures)
    assert run_passes(new_module(chain_facts()), [*earlier, replacing]).history[-1][0] == "keep_alive"
    with pytest.raises(megatrain.PassError, match="is never released"):
        run_passes(new_module(chain_facts()), [*earlier, SchedulePass(keep_alive)])
