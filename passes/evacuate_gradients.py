"""Pass: gradients leave the device through slabs and are added to the host store."""

from torch import fx

from megatrain_fx.graph import append, nodes_of, operation_of, relink, set_fields
from megatrain_fx.ir import BufferKind, Lane, Op, Operation, kind_of


def evacuate_gradients(module: fx.GraphModule) -> fx.GraphModule:
    """Let each backward write a slab instead of the host's gradients, followed by evacuate and accumulate.

    Every slab is one of its own (``slab.use<n>``); :func:`assign_slabs` makes them few.
    """
    count = 0
    for node in nodes_of(module, Op.BACKWARD):
        writes = []
        anchor = node
        for name in operation_of(node).writes:
            if kind_of(name) is not BufferKind.GRADIENTS:
                writes.append(name)
                continue
            device, host = f"slab.use{count}.device", f"slab.use{count}.host"
            writes.append(device)
            anchor = _carry_home(module.graph, anchor, device, host, name)
            count += 1
        set_fields(node, writes=tuple(writes))
    relink(module)
    return module


def _carry_home(graph: fx.Graph, anchor: fx.Node, device: str, host: str, gradients: str) -> fx.Node:
    """Insert the four operations that bring one slab home, after ``anchor``; returns the last of them."""
    operations = (
        Operation(Op.EVACUATE, Lane.D2H, reads=(device,), writes=(host,)),
        Operation(Op.RELEASE, Lane.D2H, reads=(device,)),
        Operation(Op.ACCUMULATE, Lane.HOST, reads=(host,), writes=(gradients,)),
        Operation(Op.RELEASE, Lane.HOST, reads=(host,)),
    )
    for operation in operations:
        with graph.inserting_after(anchor):
            anchor = append(graph, operation)
    return anchor
