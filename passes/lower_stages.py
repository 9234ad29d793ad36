"""Pass: the stages of the captured graph become bare forward and backward operations around one yield."""

from torch import fx

from megatrain_fx.facts import ScheduleFacts, StageFacts
from megatrain_fx.graph import facts_of, new_module
from megatrain_fx.ir import Lane, Op, Operation, gradient_name


def lower_stages(module: fx.GraphModule) -> fx.GraphModule:
    """Replace whatever the graph holds by forwards in order, a yield, and backwards in reverse order."""
    facts = facts_of(module)
    operations = []
    if not facts.resume:
        operations += [_forward(number, stage) for number, stage in enumerate(facts.stages)]
    operations.append(_yield(facts))
    if facts.training:
        operations += _backwards(facts)
    return new_module(facts, operations)


def _forward(number: int, stage: StageFacts) -> Operation:
    return Operation(Op.FORWARD, Lane.COMPUTE, number, stage.template, reads=stage.inputs, writes=stage.outputs)


def _yield(facts: ScheduleFacts) -> Operation:
    gradients = tuple(dict.fromkeys(map(gradient_name, facts.differentiable_outputs))) if facts.training else ()
    outputs = () if facts.resume else tuple(dict.fromkeys(facts.outputs))
    return Operation(Op.YIELD, Lane.COMPUTE, reads=outputs, writes=gradients)


def _backwards(facts: ScheduleFacts) -> list[Operation]:
    """Backward operations of the stages that a gradient reaches, last stage first.

    A gradient that a later stage has already written is read again by an earlier stage that adds to it: autograd then
    sums the contributions in the same order as it would for the whole model.
    """
    written = set(map(gradient_name, facts.differentiable_outputs))
    operations = []
    for number in reversed(range(len(facts.stages))):
        stage = facts.stages[number]
        arriving = tuple(g for g in map(gradient_name, stage.differentiable_outputs) if g in written)
        if not arriving or not stage.has_backward:
            continue
        leaving = tuple(map(gradient_name, stage.differentiable_inputs))
        begun = tuple(g for g in leaving if g in written)
        regions = tuple(f"gradients.{region}" for region in stage.trainable_regions)
        reads = (*stage.inputs, *arriving, *begun)
        operations.append(Operation(Op.BACKWARD, Lane.COMPUTE, number, reads=reads, writes=(*leaving, *regions)))
        written.update(leaving)
    return operations
