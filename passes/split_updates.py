"""Pass: rows of a tied matrix that the batch does not look up are updated long before the backward pass ends."""

from dataclasses import dataclass

from torch import fx

from megatrain_fx.facts import UpdateMode
from megatrain_fx.graph import append, facts_of, nodes_of, operation_of, relink, set_fields
from megatrain_fx.ir import Lane, Op, Operation, Rows, is_hosted, number_of


def split_updates(module: fx.GraphModule) -> fx.GraphModule:
    """Update a region that is looked up last in two parts.

    The first stage of a model with tied embeddings goes backward last, and adds to the gradients of the rows that it
    looked up only. All other rows, most of the matrix, have their gradients as soon as the head has gone backward.
    Without this pass the next forward, which begins with the same matrix, waits for all of its update.
    """
    if facts_of(module).updates.mode is UpdateMode.DURING_BACKWARD:
        for node in nodes_of(module, Op.UPDATE):
            if (split := _split(module, number_of(operation_of(node).writes[0]))) is not None:
                _rewrite(module, node, split)
        relink(module)
    return module


@dataclass(frozen=True)
class _Split:
    """A region that can be updated in two parts.

    Attributes:
        region: its number.
        indices: name of the value that holds the numbers of the looked-up rows.
        forward: of the stage that looks them up.
        home: the last accumulate of other stages' gradients.
        last: the accumulate of that stage's gradients, the last of all.
    """

    region: int
    indices: str
    forward: fx.Node
    home: fx.Node
    last: fx.Node


def _split(module: fx.GraphModule, region: int) -> _Split | None:
    """How to split the update of a region; None if it cannot be, or nothing would be gained."""
    facts = facts_of(module)
    looking = [
        (number, found.indices)
        for number, stage in enumerate(facts.stages)
        for found in stage.lookups
        if found.region == region
    ]
    gradients, weights = f"gradients.{region}", f"weights.{region}"
    homes = [node for node in nodes_of(module, Op.ACCUMULATE) if gradients in operation_of(node).writes]
    if len(looking) != 1 or len(homes) < 2:
        return None
    stage, indices = looking[0]
    forwards = [node for node in nodes_of(module, Op.FORWARD) if operation_of(node).stage == stage]
    later = nodes_of(module)[nodes_of(module).index(homes[-2]) :]
    fetched = any(operation_of(node).op is Op.PREFETCH and weights in operation_of(node).reads for node in later)
    if not forwards or fetched or _source(module, homes[-1]) != stage:
        return None
    return _Split(region, indices, forwards[0], homes[-2], homes[-1])


def _source(module: fx.GraphModule, home: fx.Node) -> int | None:
    """The stage whose gradients an accumulate brings home."""
    slab = operation_of(home).reads[0].removesuffix(".host") + ".device"
    above = nodes_of(module)[: nodes_of(module).index(home)]
    return next(operation_of(node).stage for node in reversed(above) if slab in operation_of(node).writes)


def _rewrite(module: fx.GraphModule, update: fx.Node, split: _Split) -> None:
    graph, rows = module.graph, f"rows.{split.region}"
    for node in nodes_of(module, Op.PREFETCH, Op.ACCUMULATE):
        operation = operation_of(node)
        parts = (Rows.CHOSEN,) if node is split.last else (Rows.CHOSEN, Rows.REST)
        selected = (rows,) if node is split.last else ()
        reads = (*_in_parts(operation.reads, split.region, parts), *selected)
        set_fields(node, reads=reads, writes=_in_parts(operation.writes, split.region, parts))
    with graph.inserting_after(split.forward):
        stage = operation_of(split.forward).stage
        append(graph, Operation(Op.SELECT, Lane.COMPUTE, stage, reads=(split.indices,), writes=(rows,)))
    with graph.inserting_after(split.home):
        append(graph, _update(split.region, Rows.REST))
    with graph.inserting_after(update):
        append(graph, _update(split.region, Rows.CHOSEN))
    graph.erase_node(update)


def _update(region: int, rows: Rows) -> Operation:
    reads = (f"gradients.{region}{rows.value}", f"rows.{region}")
    return Operation(Op.UPDATE, Lane.OPTIMIZER, reads=reads, writes=(f"weights.{region}{rows.value}",))


def _in_parts(names: tuple[str, ...], region: int, parts: tuple[Rows, ...]) -> tuple[str, ...]:
    """The names with the region's weights and gradients in parts."""
    found: list[str] = []
    for name in names:
        split = is_hosted(name) and number_of(name) == region
        found += [f"{name}{part.value}" for part in parts] if split else [name]
    return tuple(found)
