"""Pass: activations, their gradients, checkpoints and tapes are released right after their last use."""

from torch import fx

from megatrain_fx.graph import append, nodes_of, op_of, operation_of, relink, set_fields
from megatrain_fx.ir import BufferKind, Lane, Op, Operation, kind_of

_RELEASED = (BufferKind.VALUE, BufferKind.GRADIENT_VALUE, BufferKind.CHECKPOINT, BufferKind.TAPE)


def release_values(module: fx.GraphModule) -> fx.GraphModule:
    """Release each value after its last use; gradients of the caller's inputs stay, since the caller takes them.

    A checkpoint lives until its stage has gone backward, even if the stage need not be rerun: another call in
    between, or a second backward, makes the backward start from checkpoints alone.
    """
    last_use: dict[str, fx.Node] = {}
    for node in nodes_of(module):
        operation = operation_of(node)
        for name in (*operation.reads, *operation.writes):
            if kind_of(name) in _RELEASED and not name.startswith("grad.input"):
                last_use[name] = node
        if operation.op is Op.BACKWARD and f"checkpoint.{operation.stage}" in last_use:
            last_use[f"checkpoint.{operation.stage}"] = node
    dying: dict[fx.Node, list[str]] = {}
    for name, node in last_use.items():
        dying.setdefault(node, []).append(name)
    for node, names in dying.items():
        _release_after(module.graph, node, tuple(names))
    relink(module)
    return module


def _release_after(graph: fx.Graph, node: fx.Node, names: tuple[str, ...]) -> None:
    """Join the release that already follows on the compute lane, or insert one."""
    following = node.next
    if following.op == "call_function" and op_of(following) is Op.RELEASE:
        release = operation_of(following)
        if release.lane is Lane.COMPUTE:
            set_fields(following, reads=(*release.reads, *names))
            return
    with graph.inserting_after(node):
        append(graph, Operation(Op.RELEASE, Lane.COMPUTE, reads=names))
