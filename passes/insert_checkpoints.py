"""Pass: stage inputs are kept in checkpoints, and each backward works on the tape of a recompute."""

from torch import fx

from megatrain_fx.graph import append, facts_of, nodes_of, operation_of, relink, set_fields
from megatrain_fx.ir import BufferKind, Lane, Op, Operation, kind_of


def insert_checkpoints(module: fx.GraphModule) -> fx.GraphModule:
    """Keep a checkpoint before each forward that has a backward, and rerun the stage from it before that backward.

    The last stage's forward records its tape at once, since its backward follows immediately: it is not run twice.
    """
    backwards = {operation_of(node).stage: node for node in nodes_of(module, Op.BACKWARD)}
    forwards = {operation_of(node).stage: node for node in nodes_of(module, Op.FORWARD)}
    for stage, node in forwards.items():
        if stage in backwards:
            _keep_inputs(module.graph, node)
    last = max(forwards, default=None, key=lambda stage: stage if stage is not None else -1)
    for stage, node in backwards.items():
        if stage is not None and stage == last:
            set_fields(forwards[stage], writes=(*operation_of(forwards[stage]).writes, f"tape.{stage}"))
        else:
            _recompute_before(module, node)
        _read_tape(node)
    relink(module)
    return module


def _keep_inputs(graph: fx.Graph, node: fx.Node) -> None:
    forward = operation_of(node)
    kept = (f"checkpoint.{forward.stage}",)
    with graph.inserting_before(node):
        append(graph, Operation(Op.CHECKPOINT, Lane.COMPUTE, forward.stage, reads=forward.reads, writes=kept))


def _recompute_before(module: fx.GraphModule, node: fx.Node) -> None:
    stage = operation_of(node).stage
    assert stage is not None
    template = facts_of(module).stages[stage].template
    kept, tape = (f"checkpoint.{stage}",), (f"tape.{stage}",)
    with module.graph.inserting_before(node):
        append(module.graph, Operation(Op.RECOMPUTE, Lane.COMPUTE, stage, template, reads=kept, writes=tape))


def _read_tape(node: fx.Node) -> None:
    backward = operation_of(node)
    gradients = tuple(name for name in backward.reads if kind_of(name) is BufferKind.GRADIENT_VALUE)
    set_fields(node, reads=(f"tape.{backward.stage}", *gradients))
