"""Head losses: where a captured graph takes the cross-entropy of the logits of a linear head."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from megatrain_fx.logit_glue import LogitGlue
from megatrain_fx.private_api import has_hooks, size_at, writes_first_argument
from megatrain_fx.stages import is_unit_call
from megatrain_fx.unit_call import UnitCall

_LOSS = torch.ops.aten.cross_entropy_loss.default
_MEAN, _SUM = 1, 2


@dataclass(frozen=True)
class LossArguments:
    """The arguments of ``aten.cross_entropy_loss`` after the logits, in their order."""

    target: fx.Node
    weight: object = None
    reduction: object = _MEAN
    ignore_index: int = -100
    label_smoothing: float = 0.0

    @property
    def mean(self) -> bool:
        """Whether losses are averaged, not summed."""
        return self.reduction == _MEAN

    def supported(self, logits: torch.Tensor) -> bool:
        """Whether it is a mean or sum over class numbers, without class weights."""
        targets = self.target.meta["val"]
        by_class_number = targets.dtype is torch.int64 and targets.ndim == logits.ndim - 1
        return by_class_number and self.weight is None and self.reduction in (_MEAN, _SUM)


@dataclass(frozen=True)
class HeadLoss:
    """A cross-entropy of the logits of a linear head.

    Attributes:
        head: the call of the unit.
        logits: the head's result, and what becomes of it up to the loss, each the first argument of the next.
        glue: what is done to them.
        loss: the node of the cross-entropy.
        arguments: of the cross-entropy.
    """

    head: fx.Node
    logits: tuple[fx.Node, ...]
    glue: LogitGlue
    loss: fx.Node
    arguments: LossArguments

    @property
    def bytes(self) -> int:
        """Size of the whole logits that the loss reads; where sizes are symbolic, with those that were captured."""
        return _bytes(self.logits[-1].meta["val"])

    @property
    def returns_logits(self) -> bool:
        """Whether the model returns any of the logits."""
        return any(user.op == "output" for node in self.logits for user in node.users)


def cross_entropies(root: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a captured graph that take a cross-entropy."""
    return list(root.graph.find_nodes(op="call_function", target=_LOSS))


def find_head_losses(root: fx.GraphModule) -> list[HeadLoss]:
    """The head losses of a captured graph whose logits nothing else uses, except that the model may return them."""
    return [found for found in (_recognise(root, node) for node in cross_entropies(root)) if found is not None]


def whole_logits(root: fx.GraphModule, most_bytes: int) -> list[int]:
    """Sizes in bytes of what cross-entropies of a captured graph take, of those above ``most_bytes``."""
    inputs: list[Any] = [node.args[0] for node in cross_entropies(root)]
    return [size for size in (_bytes(logits.meta["val"]) for logits in inputs) if size > most_bytes]


def _bytes(value: torch.Tensor) -> int:
    return math.prod(map(size_at, value.shape)) * int(value.dtype.itemsize)


def _recognise(root: fx.GraphModule, loss: fx.Node) -> HeadLoss | None:
    logits = _logits(root, loss)
    arguments = LossArguments(*loss.args[1:], **loss.kwargs)  # type: ignore[arg-type]
    if not logits or not arguments.supported(logits[-1].meta["val"]) or not _used_only_here(logits, loss):
        return None
    glue = _glue(root, logits)
    if glue is None or glue.class_dim != min(1, logits[-1].meta["val"].ndim - 1):
        return None
    return HeadLoss(logits[0].all_input_nodes[0], logits, glue, loss, arguments)


def _logits(root: fx.GraphModule, loss: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes from the result of a head to the loss, the loss left out; none if they do not start at a head."""
    path: list[fx.Node] = []
    source = loss.args[0]
    while isinstance(source, fx.Node) and source.op == "call_function" and source.args:
        path.append(source)
        source = source.args[0]
    starts = isinstance(source, fx.Node) and path and path[-1].target is operator.getitem and _calls_head(root, source)
    return tuple(reversed(path)) if starts else ()


def _calls_head(root: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node calls a unit that does no more than ``linear(hidden)``, with gradients, for one user."""
    call = root.get_submodule(str(node.target)) if is_unit_call(node) and len(node.users) == 1 else None
    if type(call) is not UnitCall or type(call.unit) is not nn.Linear or call.modes.grad_enabled is False:
        return False
    if has_hooks(call.unit) or parametrize.is_parametrized(call.unit) or "forward" in vars(call.unit):
        return False
    hidden = object()
    plain = [((hidden,), {}), ((), {"input": hidden})]
    return len(node.args) == call.arguments.arity == 1 and call.arguments.rebuild([hidden]) in plain


def _glue(root: fx.GraphModule, logits: Sequence[fx.Node]) -> LogitGlue | None:
    call: Any = root.get_submodule(str(logits[0].all_input_nodes[0].target))
    glue: LogitGlue | None = LogitGlue(logits[0].meta["val"].ndim - 1)
    for node in logits[1:]:
        glue = glue and glue.followed_by(node, call.unit.in_features)
    return glue


def _used_only_here(logits: Sequence[fx.Node], loss: fx.Node) -> bool:
    """Whether each of the logits is used by the next only, or returned, and nothing else is modified on the way."""
    for node, following in itertools.pairwise([*logits, loss]):
        users = [user for user in node.users if user.op != "output"]
        if users != [following] or _reads_again(following, node):
            return False
    return not any(_modifies_floats(node) for node in _between(logits[0], loss) if node not in logits)


def _reads_again(node: fx.Node, source: fx.Node) -> bool:
    """Whether ``node`` reads ``source``, its first argument, in another place too."""
    sources: list[fx.Node] = []
    fx.map_arg((node.args[1:], node.kwargs), sources.append)
    return source in sources


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _modifies_floats(node: fx.Node) -> bool:
    """Whether a node may modify hidden states in place, which the head would then read too late."""
    if not writes_first_argument(node.target) or not isinstance(node.args[0], fx.Node):
        return False
    value = node.args[0].meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dtype.is_floating_point
