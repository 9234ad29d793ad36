"""Pass: parameter accesses become loads from streamed buffers, with a prefetch before and a release after each use."""

from torch import fx

from megatrain_fx.graph import append, facts_of, nodes_of, operation_of, relink, set_fields
from megatrain_fx.ir import Lane, Op, Operation


def stream_weights(module: fx.GraphModule) -> fx.GraphModule:
    """Give every use of a region a slot of its own (``slot.use<n>``); :func:`assign_slots` makes them few.

    A use is a forward, or a recompute with its backward, since autograd keeps views of the weights until then; for a
    forward that records a tape it lasts until that stage's backward.
    """
    backwards = {operation_of(node).stage: node for node in nodes_of(module, Op.BACKWARD)}
    count = 0
    for node in nodes_of(module, Op.FORWARD, Op.RECOMPUTE):
        operation = operation_of(node)
        assert operation.stage is not None
        records_tape = f"tape.{operation.stage}" in operation.writes
        last = backwards[operation.stage] if records_tape else node
        for region in facts_of(module).stages[operation.stage].regions:
            _stream(module, node, last, region, f"slot.use{count}")
            count += 1
    relink(module)
    return module


def _stream(module: fx.GraphModule, first: fx.Node, last: fx.Node, region: int, slot: str) -> None:
    """Insert prefetch and loads before ``first``, the release after ``last``, and let both read the slot."""
    graph, weights = module.graph, f"weights.{region}"
    stage = operation_of(first).stage
    assert stage is not None
    with graph.inserting_before(first):
        append(graph, Operation(Op.PREFETCH, Lane.H2D, reads=(weights,), writes=(slot,)))
        for name, view in facts_of(module).stages[stage].views:
            if view.region == weights:
                append(graph, Operation(Op.LOAD, Lane.COMPUTE, stage, reads=(slot,), writes=(f"<{name}>",), view=view))
    for node in dict.fromkeys((first, last)):
        reads = operation_of(node).reads
        slots = sum(1 for name in reads if name.startswith("slot."))
        set_fields(node, reads=(*reads[:slots], slot, *reads[slots:]))
    with graph.inserting_after(last):
        append(graph, Operation(Op.RELEASE, Lane.COMPUTE, reads=(slot,)))
