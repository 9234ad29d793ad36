"""Finds the parameters of which a template only looks up rows, as an embedding does."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from megatrain_fx.joint_graph import results

_aten = torch.ops.aten
_SAME_ELEMENTS = frozenset((_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.view.default))


def looked_up(joint: fx.Graph, parameters: int, gradients: Mapping[int, int]) -> dict[int, int]:
    """The placeholders that hold the row numbers of such parameters.

    Then the parameter's gradient is zero in all other rows, and a rerun of the stage reads no other row either.

    Args:
        joint: forward and backward of the template; its first placeholders are the parameters.
        parameters: how many these are.
        gradients: by position of a trainable parameter, the position of its gradient among the results.

    Returns:
        By position of a parameter, the position of the placeholder, which is no parameter. A parameter that is used in
        any other way, or looked up by values that the template computes, or whose gradient is not that of lookups (that
        of a custom autograd function), is left out.
    """
    placeholders = joint.find_nodes(op="placeholder")
    position = {node: index for index, node in enumerate(placeholders)}
    found = {}
    for index, result in gradients.items():
        node = placeholders[index]
        indices = {_origin(user) for user in _uses(node)}
        source = indices.pop() if len(indices) == 1 else None
        if source is None or position.get(source, -1) < parameters or node.meta["val"].ndim != 2:
            continue
        if _is_of_lookup(results(joint)[result], source):
            found[index] = position[source]
    return found


def _uses(node: fx.Node) -> list[fx.Node]:
    """What uses a value as it is, seen through views of all of it that keep its shape."""
    uses = []
    for user in node.users:
        uses += _uses(user) if user.target is _aten.detach.default else [user]
        if user.target is _aten.embedding.default and node in user.args[1:]:
            uses.append(node)  # among the indices, which is no lookup of it
    return uses


def _is_of_lookup(gradient: object, source: fx.Node) -> bool:
    """Whether a gradient is zero in all rows but those that ``source`` names: that of lookups, or a sum of such."""
    if not isinstance(gradient, fx.Node):
        return False
    if gradient.target in (_aten.detach.default, _aten.alias.default):
        return _is_of_lookup(gradient.args[0], source)
    if gradient.target is _aten.add.Tensor:
        return all(_is_of_lookup(term, source) for term in gradient.args)
    return gradient.target is _aten.embedding_dense_backward.default and _seen_through(gradient.args[1]) is source


def _origin(use: fx.Node) -> fx.Node | None:
    """The value that holds the row numbers of a lookup; None if the use is something else."""
    if use.target is not _aten.embedding.default or len(use.args) > 4:  # the fifth asks for sparse gradients
        return None
    return _seen_through(use.args[1])


def _seen_through(indices: object) -> fx.Node | None:
    """The value of which row numbers are a view or a copy."""
    while isinstance(indices, fx.Node) and indices.target in _SAME_ELEMENTS:
        indices = indices.args[0]
    return indices if isinstance(indices, fx.Node) else None
