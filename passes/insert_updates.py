"""Pass: the optimizer's step of every region becomes an operation, as early as its gradients allow."""

from torch import fx

from megatrain_fx.facts import UpdateMode
from megatrain_fx.graph import append, facts_of, nodes_of, operation_of, relink
from megatrain_fx.ir import Lane, Op, Operation, number_of


def insert_updates(module: fx.GraphModule) -> fx.GraphModule:
    """Update each region once its last gradients are home and its weights are needed no more in this step.

    With clipping, the norm is known only after the backward pass: every region is measured instead, and all updates
    follow the ``clip`` that the caller's ``optimizer.step()`` stands for, first those that the next forward needs
    first.
    """
    updates = facts_of(module).updates
    if updates.mode is UpdateMode.NONE:
        return module
    homes: dict[int, fx.Node] = {}
    for node in nodes_of(module, Op.ACCUMULATE):
        region = number_of(operation_of(node).writes[0])
        if region in updates.regions:
            homes.pop(region, None)  # so that regions stand in the order in which they are complete
            homes[region] = node
    if updates.mode is UpdateMode.DURING_BACKWARD:
        for region, node in homes.items():
            _insert_after(module.graph, _last_use(module, node, region), _update(region))
    elif homes:
        _clip(module.graph, homes)
    relink(module)
    return module


def _update(region: int, *scale: str) -> Operation:
    reads = (f"gradients.{region}", *scale)
    return Operation(Op.UPDATE, Lane.OPTIMIZER, reads=reads, writes=(f"weights.{region}",))


def _last_use(module: fx.GraphModule, home: fx.Node, region: int) -> fx.Node:
    """The later of the accumulate that brings the gradients home and the last prefetch of the weights."""
    for node in reversed(nodes_of(module, Op.PREFETCH, Op.ACCUMULATE)):
        if node is home or f"weights.{region}" in operation_of(node).reads:
            return node
    return home


def _clip(graph: fx.Graph, homes: dict[int, fx.Node]) -> None:
    for region, node in homes.items():
        reads, writes = (f"gradients.{region}",), (f"norm.{region}",)
        _insert_after(graph, node, Operation(Op.NORM, Lane.HOST, reads=reads, writes=writes))
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):
        norms = tuple(f"norm.{region}" for region in homes)
        append(graph, Operation(Op.CLIP, Lane.HOST, reads=norms, writes=("scale",)))
        for region in sorted(homes):
            append(graph, _update(region, "scale"))


def _insert_after(graph: fx.Graph, anchor: fx.Node, operation: Operation) -> None:
    with graph.inserting_after(anchor):
        append(graph, operation)
