"""Pass on a captured graph: a linear head and the cross-entropy of its logits become one unit that works by chunks.

It runs before the graph is cut into stages. Where the whole logits would be small, or are used for anything but the
loss, it leaves the graph alone, and with it the bits of the result.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections.abc import Collection

import torch
from torch import fx

from megatrain_fx.capture import Captured, OutputTree
from megatrain_fx.chunked_loss import ChunkedLoss
from megatrain_fx.glue_heads import call_heads
from megatrain_fx.head_loss import HeadLoss, cross_entropies, find_head_losses, whole_logits
from megatrain_fx.logit_chunk import LossSettings
from megatrain_fx.logit_steps import LogitStep, Pointwise
from megatrain_fx.signature import Structure, Value, constant
from megatrain_fx.stages import is_unit_call
from megatrain_fx.unit_call import UnitCall

logger = logging.getLogger(__name__)


def chunk_loss(captured: Captured, most_bytes: int, *, keep_logits: bool = False, compiled: bool = False) -> Captured:
    """Compute every loss of a linear head by chunks whose logits take ``most_bytes``, if whole ones would take more.

    What stands between head and loss may arrange rows, cast, scale or cap; it is done to hidden states or to chunks
    instead. Logits that the model returned are None in its output from then on.

    Args:
        captured: left as it is.
        most_bytes: counted in the dtype that the loss reads; where sizes are symbolic, with those that were captured.
        keep_logits: leave a head alone whose logits the model returns.
        compiled: fuse the elementwise part of a chunk with ``torch.compile``.

    Returns:
        What was captured, if there is nothing to do: it has no gradients, or no such loss.
    """
    if not captured.signature.modes.grad:
        return captured
    root = _copy(captured.graph_module)
    call_heads(root, cross_entropies(root))
    found = [loss for loss in find_head_losses(root) if loss.bytes > most_bytes]
    losses = [loss for loss in found if not (keep_logits and loss.returns_logits)]
    _warn_of_whole(whole_logits(root, most_bytes), len(found))
    if not losses:
        return captured
    for number, loss in enumerate(losses):
        _call_chunked(root, f"chunked_loss_{number}", loss, _settings(loss, most_bytes, compiled))
    logits = {node for loss in losses for node in loss.logits}
    structure = _without_outputs(root.graph, captured.output_tree.structure, logits)
    for loss in losses:
        _remove_head(root, loss)
    root.graph.lint()
    root.recompile()
    return dataclasses.replace(
        captured, graph_module=root, unit_calls=_unit_calls(root), output_tree=OutputTree(structure)
    )


def _warn_of_whole(sizes: list[int], recognised: int) -> None:
    """Say that memory is not bounded where a loss is not that of a head as :mod:`megatrain_fx.head_loss` knows it."""
    if len(sizes) > recognised:
        logger.warning(
            "logits of up to %.2f GiB will exist as a whole: to be taken by chunks they must come from an nn.Linear or "
            "a product with a parameter, and go to functional.cross_entropy alone, past casts, scales, caps, reshapes",
            max(sizes) / 2**30,
        )


def _copy(root: fx.GraphModule) -> fx.GraphModule:
    """A graph module with nodes of its own and the same attributes."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in root.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(root, graph, class_name=type(root).__name__)


def _call_chunked(root: fx.GraphModule, name: str, loss: HeadLoss, settings: LossSettings) -> None:
    """Put a call of a :class:`ChunkedLoss` in the place of the loss."""
    head = root.get_submodule(str(loss.head.target))
    assert isinstance(head, UnitCall)
    dtype = loss.loss.meta["val"].dtype
    root.add_submodule(name, ChunkedLoss(head, settings, dtype, loss.glue.class_dim))
    with root.graph.inserting_before(loss.loss):
        hidden = _arrange(root.graph, loss)
        call = root.graph.call_module(name, (hidden, loss.arguments.target))
        call.meta = {**loss.loss.meta, "val": (loss.loss.meta["val"],)}
        result = root.graph.call_function(operator.getitem, (call, 0))
        result.meta = dict(loss.loss.meta)
    loss.loss.replace_all_uses_with(result)


def _arrange(graph: fx.Graph, loss: HeadLoss) -> fx.Node:
    """The hidden states, their rows arranged as those of the logits were."""
    (hidden,) = loss.head.args
    assert isinstance(hidden, fx.Node)
    for operation in loss.glue.row_operations:
        arranged = graph.call_function(operation.target, (hidden, *operation.arguments))
        arguments = fx.map_arg(arranged.args, lambda node: node.meta["val"])
        arranged.meta = {**loss.logits[-1].meta, "val": operation.target(*arguments)}
        hidden = arranged
    return hidden


def _settings(loss: HeadLoss, most_bytes: int, compiled: bool) -> LossSettings:
    read = loss.logits[-1].meta["val"].dtype
    dtype = torch.promote_types(read, torch.float32)
    return LossSettings(
        mean=loss.arguments.mean,
        ignore_index=loss.arguments.ignore_index,
        label_smoothing=loss.arguments.label_smoothing,
        steps=_without_last_cast(loss.glue.steps, dtype),
        dtype=dtype,
        chunk_bytes=most_bytes,
        compiled=compiled,
    )


def _without_last_cast(steps: tuple[LogitStep, ...], dtype: torch.dtype) -> tuple[LogitStep, ...]:
    """The steps but a last cast to the dtype of the cross-entropy, which casts by itself, in the same kernel."""
    last = LogitStep(Pointwise.CAST, dtype=dtype)
    return steps[:-1] if steps[-1:] == (last,) else steps


def _without_outputs(graph: fx.Graph, structure: Structure, dropped: Collection[fx.Node]) -> Structure:
    """Let the graph return the other nodes only; returns the structure with None where the dropped ones stood."""
    (output,) = graph.find_nodes(op="output")
    returned: tuple[fx.Node, ...] = output.args[0]
    kept = [position for position, node in enumerate(returned) if node not in dropped]
    output.args = (tuple(returned[position] for position in kept),)
    numbers = {position: Value(number) for number, position in enumerate(kept)}
    nothing = constant(None)
    assert nothing is not None
    leaves = [numbers.get(leaf.number, nothing) if isinstance(leaf, Value) else leaf for leaf in structure.leaves]
    return Structure(structure.tree, tuple(leaves))


def _remove_head(root: fx.GraphModule, loss: HeadLoss) -> None:
    for node in (loss.loss, *reversed(loss.logits), loss.head):
        root.graph.erase_node(node)
    root.delete_submodule(str(loss.head.target))


def _unit_calls(root: fx.GraphModule) -> tuple[UnitCall, ...]:
    calls = [root.get_submodule(str(node.target)) for node in root.graph.nodes if is_unit_call(node)]
    return tuple(call for call in calls if isinstance(call, UnitCall))
