"""Pass: every prefetch is issued as soon as its slot is free."""

from torch import fx

from megatrain_fx.graph import nodes_of, operation_of, relink
from megatrain_fx.ir import Op


def hoist_prefetches(module: fx.GraphModule) -> fx.GraphModule:
    """Move each prefetch up to just after the last operation that touches its slot or writes its region.

    The order among prefetches does not change: it is the order in which the weights are needed.
    """
    previous: fx.Node | None = None
    for node in nodes_of(module, Op.PREFETCH):
        anchor = _last_touch(node, previous)
        if anchor is None:
            first = next(iter(module.graph.nodes))
            if first is not node:
                first.prepend(node)
        else:
            anchor.append(node)
        previous = node
    relink(module)
    return module


def _last_touch(node: fx.Node, previous: fx.Node | None) -> fx.Node | None:
    """The nearest node above that this prefetch must stay below."""
    prefetch = operation_of(node)
    touched = {*prefetch.writes, *prefetch.reads}
    above = node.prev
    while above.op == "call_function":
        operation = operation_of(above)
        conflicting = (touched & set(operation.writes)) | (set(prefetch.writes) & set(operation.reads))
        if above is previous or conflicting:
            return above
        above = above.prev
    return None
