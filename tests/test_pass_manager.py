"""The pass manager: order, history, refusals that name the pass, and passes of the user's own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

import megatrain_fx as megatrain
from megatrain_fx.contracts import CHECKS, Property
from megatrain_fx.graph import append, new_module, nodes_of, operation_of, set_fields
from megatrain_fx.ir import Lane, Op, Operation
from megatrain_fx.pass_manager import GraphTransform, SchedulePass, copy_of, run_passes
from megatrain_fx.passes import pipeline
from models import example
from synthetic_facts import chain_facts


def refusal(custom: GraphTransform) -> str:
    """The first line of the error when a pass of the user's own runs in the pipeline."""
    with pytest.raises(megatrain.PassError) as caught:
        run_passes(new_module(chain_facts()), pipeline([custom]))
    text = str(caught.value)
    assert "passes run before it: lower_stages, insert_checkpoints" in text or "changed the facts" in text
    return text.split("; passes run")[0].splitlines()[0]


def test_passes_run_in_order_and_every_schedule_is_kept() -> None:
    result = run_passes(new_module(chain_facts()), pipeline())
    assert [name for name, _ in result.history] == [one.name for one in pipeline()]
    kinds = [{operation.op for operation in schedule} for _, schedule in result.history]
    assert kinds[0] == {Op.FORWARD, Op.YIELD, Op.BACKWARD}
    assert all(earlier <= later for earlier, later in itertools.pairwise(kinds))
    assert result.schedule == result.history[-1][1]


def test_every_property_has_a_check_and_a_text() -> None:
    assert set(CHECKS) == set(Property)
    assert len({member.value for member in Property}) == len(Property)


def test_a_pass_that_returns_nothing_is_refused() -> None:
    def forgetful(module: fx.GraphModule) -> None:
        nodes_of(module)

    assert_expected_inline(
        refusal(forgetful), """pass forgetful failed: it returned NoneType, not a torch.fx.GraphModule"""
    )  # type: ignore[arg-type]


def test_a_pass_that_returns_a_graph_is_refused() -> None:
    def shallow(module: fx.GraphModule) -> fx.Graph:
        return module.graph

    assert_expected_inline(refusal(shallow), """pass shallow failed: it returned Graph, not a torch.fx.GraphModule""")  # type: ignore[arg-type]


def test_a_pass_that_fails_is_named_and_its_own_error_kept() -> None:
    def failing(module: fx.GraphModule) -> fx.GraphModule:
        raise KeyError("slot.7")

    assert_expected_inline(refusal(failing), """pass failing failed: KeyError: 'slot.7'""")
    with pytest.raises(megatrain.PassError) as caught:
        run_passes(new_module(chain_facts()), pipeline([failing]))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_pass_that_loses_the_facts_is_refused() -> None:
    def rebuilding(module: fx.GraphModule) -> fx.GraphModule:
        return fx.GraphModule({}, module.graph)

    assert "carries no facts about its model" in refusal(rebuilding)
    assert refusal(rebuilding).startswith("pass rebuilding ")


def test_a_pass_that_changes_the_facts_is_refused() -> None:
    def more_slots(module: fx.GraphModule) -> fx.GraphModule:
        return new_module(chain_facts(slots=8), (operation_of(node) for node in nodes_of(module)))

    assert_expected_inline(
        refusal(more_slots),
        """pass more_slots failed: it changed the facts of the model, but passes may change only operations""",
    )


def test_a_pass_that_adds_a_node_of_another_kind_is_refused() -> None:
    def printing(module: fx.GraphModule) -> fx.GraphModule:
        with module.graph.inserting_before(nodes_of(module)[0]):
            module.graph.call_function(print)
        return module

    text = refusal(printing)
    assert text.startswith("pass printing failed: node %print_1 ")
    assert text.endswith(" is not an operation of a schedule; see megatrain_fx.graph.append")


def test_a_pass_that_leaves_a_broken_graph_is_refused() -> None:
    def tangling(module: fx.GraphModule) -> fx.GraphModule:
        first, *_, last = nodes_of(module)
        set_fields(first, after=(last,))
        return module

    assert refusal(tangling).startswith("pass tangling failed: ")


def test_a_callable_object_is_named_after_its_class() -> None:
    class Checking:
        def __call__(self, module: fx.GraphModule) -> fx.GraphModule:
            return module

    assert SchedulePass(Checking()).name == "Checking"


def test_a_copy_is_equal_and_separate() -> None:
    module = run_passes(new_module(chain_facts()), pipeline()).module
    copy = copy_of(module)
    assert [operation_of(node) for node in nodes_of(copy)] == [operation_of(node) for node in nodes_of(module)]
    set_fields(nodes_of(copy, Op.FORWARD)[0], template=7)
    assert operation_of(nodes_of(module, Op.FORWARD)[0]).template == 0


def test_a_schedule_graph_does_not_run_as_python() -> None:
    module = run_passes(new_module(chain_facts()), pipeline()).module
    with pytest.raises(megatrain.PassError, match="a schedule graph is not Python to call"):
        fx.Interpreter(module).run()


def keep_prefetches_late(module: fx.GraphModule) -> fx.GraphModule:
    """Undo hoisting: put every prefetch right before the load that needs it."""
    for node in nodes_of(module, Op.PREFETCH):
        slot = operation_of(node).writes[0]
        following = node.next
        while slot not in operation_of(following).reads:
            following = following.next
        following.prepend(node)
    return module


def drop_a_prefetch(module: fx.GraphModule) -> fx.GraphModule:
    """Save one copy too many: the slot then holds another stage's weights, or nothing."""
    node = nodes_of(module, Op.PREFETCH)[-1]
    for user in list(node.users):
        user.args = ()
    module.graph.erase_node(node)
    return module


def drop_an_accumulation(module: fx.GraphModule) -> fx.GraphModule:
    """Lose the gradients of one stage."""
    node = nodes_of(module, Op.ACCUMULATE)[0]
    module.graph.erase_node(node)
    return module


def release_early(module: fx.GraphModule) -> fx.GraphModule:
    """Release a slot before the forward that reads it."""
    node = nodes_of(module, Op.FORWARD)[0]
    slot = operation_of(node).reads[0]
    with module.graph.inserting_before(node):
        append(module.graph, Operation(Op.RELEASE, Lane.COMPUTE, reads=(slot,)))
    return module


def options(*passes: GraphTransform | SchedulePass, slots: int = 1) -> dict[str, object]:
    return {"device": "cpu", "slots": slots, "stage_bytes": 0, "passes": passes}


def traced(passes: Sequence[GraphTransform | SchedulePass]) -> megatrain.Program:
    args, kwargs = example("mlp").make_inputs()
    return megatrain.trace(example("mlp").make_model(), *args, megatrain_options=options(*passes), **kwargs)


def test_a_pass_of_the_users_own_runs_and_is_in_the_history() -> None:
    program = traced([keep_prefetches_late])
    history = dict(program.history)
    assert list(history)[-3:] == ["keep_prefetches_late", "add_dependencies", "prune_dependencies"]
    assert history["keep_prefetches_late"] != history["hoist_prefetches"]
    for index, operation in enumerate(program.schedule):
        if operation.op is Op.PREFETCH:
            assert program.schedule.operations[index + 1].op is Op.LOAD


def test_a_pass_of_the_users_own_may_declare_a_contract() -> None:
    one = SchedulePass(keep_prefetches_late, requires=frozenset({Property.PRUNED}))
    with pytest.raises(megatrain.PassError, match="pass keep_prefetches_late requires .* no dependency is redundant"):
        traced([one])


@pytest.mark.parametrize(
    ("harmful", "reason"),
    [
        (drop_a_prefetch, "slot.0 is read, but holds nothing here"),
        (drop_an_accumulation, "is released before its gradients have left it"),
        (release_early, "slot.0 is read, but holds nothing here"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_harmful_pass_is_refused_with_the_schedule(harmful: GraphTransform, reason: str) -> None:
    with pytest.raises(megatrain.PassError) as caught:
        traced([harmful])
    text = str(caught.value)
    assert reason in text.splitlines()[0]
    assert any(line.strip().startswith("^ ") and reason in line for line in text.splitlines())
    assert text.splitlines()[-1].endswith(f", {harmful.__name__}")


def test_a_refused_pass_leaves_the_model_as_it_was() -> None:
    model = example("mlp").make_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    compiled = megatrain.compile(model, **options(drop_a_prefetch))
    args, kwargs = example("mlp").make_inputs()
    for _ in range(2):
        with pytest.raises(megatrain.PassError, match="drop_a_prefetch"):
            compiled(*args, **kwargs)
    after = dict(compiled.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in after.values())


def test_a_harmless_pass_changes_no_number() -> None:
    expected, model = example("mlp").make_model(), example("mlp").make_model()
    compiled = megatrain.compile(model, **options(keep_prefetches_late, slots=2), chaos=1)
    args, _ = example("mlp").make_inputs()
    outputs = [one(*args) for one in (expected, compiled)]
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs)
    for (name, left), (_, right) in zip(expected.named_parameters(), compiled.named_parameters(), strict=True):
        assert torch.equal(left.grad, right.grad), name


def test_facts_that_differ_only_in_options_give_other_schedules() -> None:
    facts = chain_facts(4)
    schedules = [run_passes(new_module(replace(facts, slots=slots)), pipeline()).schedule for slots in (1, 2, 3)]
    prefetches = [sum(operation.op is Op.PREFETCH for operation in schedule) for schedule in schedules]
    assert prefetches == [7, 6, 5]
