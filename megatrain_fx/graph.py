"""Schedules as torch.fx graphs: one node an operation, so that passes are ordinary fx transformations.

A node calls the function named after its op. Its ``args`` are the nodes whose results it uses (data edges, kept up to
date by :func:`relink`); its ``kwargs`` hold the fields of :class:`~megatrain_fx.ir.Operation`, with the event
dependencies ``after`` as nodes. Dependencies on the previous step would point forward in the graph, so these are in
``node.meta`` (see :func:`previous_of`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from megatrain_fx.errors import PassError
from megatrain_fx.facts import ScheduleFacts
from megatrain_fx.ir import BufferKind, Lane, Op, Operation, View, kind_of, number_of, whole
from megatrain_fx.schedule import Schedule

FACTS = "megatrain_facts"
_PREVIOUS = "megatrain_after_previous"


def _refuse(op: str) -> None:
    raise PassError(f"{op}: a schedule graph is not Python to call; Program.run or a compiled model executes it")


def prefetch(*sources: Any, **fields: Any) -> None:
    """One flat copy, host region to slot."""
    _refuse("prefetch")


def load(*sources: Any, **fields: Any) -> None:
    """A view of one parameter in a slot."""
    _refuse("load")


def checkpoint(*sources: Any, **fields: Any) -> None:
    """Keep the inputs of a stage and the state of the random number generators."""
    _refuse("checkpoint")


def forward(*sources: Any, **fields: Any) -> None:
    """Run the template of a stage."""
    _refuse("forward")


def select(*sources: Any, **fields: Any) -> None:
    """Tell the rows of a region that a stage looks up from the others."""
    _refuse("select")


def yield_(*sources: Any, **fields: Any) -> None:
    """Hand outputs to the caller and, later, take their gradients."""
    _refuse("yield")


def recompute(*sources: Any, **fields: Any) -> None:
    """Run the template again from its checkpoint, recording for autograd."""
    _refuse("recompute")


def backward(*sources: Any, **fields: Any) -> None:
    """Take the vector-Jacobian product of a stage."""
    _refuse("backward")


def evacuate(*sources: Any, **fields: Any) -> None:
    """Copy a gradient slab from the device to the host."""
    _refuse("evacuate")


def accumulate(*sources: Any, **fields: Any) -> None:
    """Add a slab to the gradients of the host store."""
    _refuse("accumulate")


def norm(*sources: Any, **fields: Any) -> None:
    """Sum the squares of one region's gradients."""
    _refuse("norm")


def clip(*sources: Any, **fields: Any) -> None:
    """Find the factor that clips the gradients to their largest norm: the caller's ``optimizer.step()``."""
    _refuse("clip")


def update(*sources: Any, **fields: Any) -> None:
    """The optimizer's step of one region."""
    _refuse("update")


def release(*sources: Any, **fields: Any) -> None:
    """Mark buffers as free."""
    _refuse("release")


_TARGETS: dict[Op, Callable[..., None]] = {
    Op.PREFETCH: prefetch,
    Op.LOAD: load,
    Op.CHECKPOINT: checkpoint,
    Op.FORWARD: forward,
    Op.SELECT: select,
    Op.YIELD: yield_,
    Op.RECOMPUTE: recompute,
    Op.BACKWARD: backward,
    Op.EVACUATE: evacuate,
    Op.ACCUMULATE: accumulate,
    Op.NORM: norm,
    Op.CLIP: clip,
    Op.UPDATE: update,
    Op.RELEASE: release,
}
_OPS = {target: op for op, target in _TARGETS.items()}


def op_of(node: fx.Node) -> Op:
    """The op of a node.

    Raises:
        PassError: the node is not an operation of a schedule.
    """
    op = _OPS.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]
    if op is None:
        raise PassError(f"node {node.format_node()} is not an operation of a schedule; see megatrain_fx.graph.append")
    return op


def append(graph: fx.Graph, operation: Operation, after: Sequence[fx.Node] = ()) -> fx.Node:
    """Add an operation at the graph's insertion point; the nodes ``after`` stand for ``operation.after``."""
    view = operation.view
    fields: dict[str, Any] = {
        "lane": operation.lane.value,
        "stage": operation.stage,
        "template": operation.template,
        "reads": operation.reads,
        "writes": operation.writes,
        "after": tuple(after),
        "view": None if view is None else (view.region, view.offset, view.shape, view.dtype),
    }
    return graph.create_node("call_function", _TARGETS[operation.op], (), fields, name=operation.op.value)


def operation_of(node: fx.Node) -> Operation:
    """The operation of a node, without its dependencies (these are nodes: ``node.kwargs['after']``)."""
    fields: Any = node.kwargs
    view = fields["view"]
    return Operation(
        op=op_of(node),
        lane=Lane(fields["lane"]),
        stage=fields["stage"],
        template=fields["template"],
        reads=tuple(fields["reads"]),
        writes=tuple(fields["writes"]),
        view=None if view is None else View(view[0], view[1], tuple(view[2]), view[3]),
    )


def set_fields(node: fx.Node, **fields: Any) -> None:
    """Change some fields of a node in place."""
    node.kwargs = {**node.kwargs, **fields}


def rename_buffers(node: fx.Node, names: dict[str, str]) -> None:
    """Replace buffer names among the reads and writes of a node."""
    fields: Any = node.kwargs
    set_fields(
        node,
        reads=tuple(names.get(name, name) for name in fields["reads"]),
        writes=tuple(names.get(name, name) for name in fields["writes"]),
    )


def previous_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operations of the previous step that a node waits for."""
    return tuple(node.meta.get(_PREVIOUS, ()))


def set_previous(node: fx.Node, previous: Sequence[fx.Node]) -> None:
    """Let a node wait for operations of the previous step."""
    node.meta[_PREVIOUS] = tuple(previous)


def nodes_of(module: fx.GraphModule, *ops: Op) -> list[fx.Node]:
    """Operation nodes in order, only those of the given ops if any are given.

    Raises:
        PassError: a node is not an operation of a schedule.
    """
    found = [(node, op_of(node)) for node in module.graph.nodes if node.op != "output"]
    return [node for node, op in found if not ops or op in ops]


def facts_of(module: fx.GraphModule) -> ScheduleFacts:
    """What passes may know of the model: stages, regions, sizes, and the options that shape the schedule."""
    facts = module.meta.get(FACTS)
    if not isinstance(facts, ScheduleFacts):
        raise PassError(
            "the graph carries no facts about its model: a pass must return the module it was given, or a copy"
        )
    return facts


def new_module(facts: ScheduleFacts, operations: Iterable[Operation] = ()) -> fx.GraphModule:
    """A schedule graph with the given operations (their ``after`` indices become nodes)."""
    graph = fx.Graph()
    operations = tuple(operations)
    nodes: list[fx.Node] = []
    for operation in operations:
        nodes.append(append(graph, operation, [nodes[i] for i in operation.after]))
    for node, operation in zip(nodes, operations, strict=True):
        set_previous(node, [nodes[i] for i in operation.after_previous])
    graph.output(None)
    module = fx.GraphModule({}, graph, "Schedule")
    module.meta[FACTS] = facts
    relink(module)
    return module


def relink(module: fx.GraphModule) -> None:
    """Set the data edges of every node: the last writers before it of the buffers that it reads."""
    writer: dict[str, fx.Node] = {}
    for node in nodes_of(module):
        fields: Any = node.kwargs
        node.args = tuple(dict.fromkeys(writer[name] for name in fields["reads"] if name in writer))
        writer.update(dict.fromkeys(fields["writes"], node))
    module.graph.lint()


def schedule_of(module: fx.GraphModule) -> Schedule:
    """The schedule of a graph, with the buffers that it uses in the order of the facts."""
    nodes = nodes_of(module)
    index = {node: i for i, node in enumerate(nodes)}
    operations = []
    for node in nodes:
        dependencies: Any = node.kwargs["after"]
        after = tuple(sorted(index[dependency] for dependency in dependencies))
        previous = tuple(sorted(index[dependency] for dependency in previous_of(node)))
        operations.append(replace(operation_of(node), after=after, after_previous=previous))
    return Schedule(tuple(operations), _sizes(module, operations))


def _sizes(module: fx.GraphModule, operations: Sequence[Operation]) -> tuple[tuple[str, int], ...]:
    """Bytes of every allocated buffer: host regions from the facts; slots and slabs as large as their largest content.

    Operations are visited last to first, so that a slab's destination is known when the copy that fills it is met.
    """
    regions = facts_of(module).regions
    sizes: dict[str, int] = {}
    arriving: dict[str, int] = {}
    for operation in reversed(operations):
        source, target = whole((*operation.reads, "")[0]), whole((*operation.writes, "")[0])
        if operation.op is Op.PREFETCH:
            sizes[source] = arriving[target] = regions[number_of(source)].bytes
        elif operation.op is Op.UPDATE:
            sizes[target] = regions[number_of(target)].bytes
            continue
        elif operation.op is Op.ACCUMULATE:
            sizes[target] = arriving[source] = regions[number_of(target)].gradient_bytes
        elif operation.op is Op.EVACUATE:
            arriving[source] = arriving.setdefault(target, 0)
        else:
            continue
        for name in (source, target):
            if kind_of(name) in (BufferKind.SLOT, BufferKind.SLAB):
                sizes[name] = max(sizes.get(name, 0), arriving[name])
    return tuple(sorted(sizes.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> tuple[object, ...]:
    """Sort key: slots, slabs, weights, gradients; numbers by value."""
    order = ("slot", "slab", "weights", "gradients")
    prefix, number, *rest = name.split(".")
    return (order.index(prefix), int(number) if number.isdigit() else 10**9, number, *rest)
