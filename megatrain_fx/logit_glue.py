"""Logit glue: what a captured graph does to logits, split into arranging rows and elementwise steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from megatrain_fx.logit_steps import LogitStep, Pointwise

_ATEN = torch.ops.aten

_COPIES = frozenset({_ATEN.alias.default, _ATEN.clone.default, _ATEN.contiguous.default})
_CASTS = frozenset({_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN.to.device, _ATEN.to.other})
_ARITHMETIC = {
    _ATEN.mul.Tensor: Pointwise.MULTIPLY,
    _ATEN.mul_.Tensor: Pointwise.MULTIPLY,
    _ATEN.div.Tensor: Pointwise.DIVIDE,
    _ATEN.div_.Tensor: Pointwise.DIVIDE,
    _ATEN.tanh.default: Pointwise.TANH,
    _ATEN.tanh_.default: Pointwise.TANH,
}
_RESHAPES = frozenset({_ATEN.view.default, _ATEN.reshape.default})


@dataclasses.dataclass(frozen=True)
class RowOperation:
    """An operation that arranges rows, to be done to hidden states; ``arguments`` are those after the tensor."""

    target: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class LogitGlue:
    """What a chain of operations does to logits.

    The two kinds do not mix, so the rows of hidden states can be arranged before the head, and the steps taken after
    it, whatever the order was.

    Attributes:
        class_dim: the dimension of the result that counts the classes.
        row_operations: on rows, in order, as they are done to hidden states.
        steps: on elements, in order.
    """

    class_dim: int
    row_operations: tuple[RowOperation, ...] = ()
    steps: tuple[LogitStep, ...] = ()

    def followed_by(self, node: fx.Node, width: int) -> LogitGlue | None:
        """This glue and then ``node``, whose first argument is the result so far; None if it does anything else.

        Args:
            node: of a captured graph.
            width: size of the hidden states.
        """
        if node.target in _COPIES:
            return self
        if node.target in _CASTS:
            return self._cast(node)
        if node.target in _ARITHMETIC:
            return self._calculate(node)
        if node.target in _RESHAPES:
            return self._reshape(node, width)
        follow = _ARRANGEMENTS.get(node.target)
        return None if follow is None else follow(self, node)

    def _cast(self, node: fx.Node) -> LogitGlue | None:
        before, after = _source(node), node.meta["val"]
        if before.device != after.device or not after.dtype.is_floating_point:
            return None
        step = LogitStep(Pointwise.CAST, dtype=after.dtype)
        return self if before.dtype is after.dtype else self._with_step(step)

    def _calculate(self, node: fx.Node) -> LogitGlue | None:
        operation = _ARITHMETIC[node.target]  # type: ignore[index]
        if operation is Pointwise.TANH:
            return self._with_step(LogitStep(operation))
        number = node.args[1]
        plain = isinstance(number, (int, float)) and not node.kwargs
        return self._with_step(LogitStep(operation, float(number))) if plain else None  # type: ignore[arg-type]

    def _reshape(self, node: fx.Node, width: int) -> LogitGlue | None:
        """Logits lie row by row: where the last dimension stays the classes, any reshape is one of rows."""
        before, after = _source(node), node.meta["val"]
        if self.class_dim != before.ndim - 1 or after.shape[-1:] != before.shape[-1:]:
            return None
        sizes: Any = node.args[1]
        operation = RowOperation(_ATEN.reshape.default, ([*sizes[:-1], width],))
        return self._with_row_operation(operation, after.ndim - 1)

    def _flatten(self, node: fx.Node) -> LogitGlue | None:
        before, after = _source(node), node.meta["val"]
        if self.class_dim != before.ndim - 1 or after.shape[-1:] != before.shape[-1:]:
            return None
        return self._repeat(node, after.ndim - 1)

    def _slice(self, node: fx.Node) -> LogitGlue | None:
        dim = _dim(node, 1) if len(node.args) > 1 else 0
        if dim == self.class_dim:
            return self if node.meta["val"].shape[dim] == _source(node).shape[dim] else None
        return self._repeat(node, self.class_dim)

    def _select(self, node: fx.Node) -> LogitGlue | None:
        dim = _dim(node, 1)
        return None if dim == self.class_dim else self._repeat(node, self.class_dim - (dim < self.class_dim))

    def _transpose(self, node: fx.Node) -> LogitGlue | None:
        first, second = _dim(node, 1), _dim(node, 2)
        return self._repeat(node, {first: second, second: first}.get(self.class_dim, self.class_dim))

    def _permute(self, node: fx.Node) -> LogitGlue | None:
        dims: Any = node.args[1]
        return self._repeat(node, [dim % len(dims) for dim in dims].index(self.class_dim))

    def _movedim(self, node: fx.Node) -> LogitGlue | None:
        order = list(range(_source(node).ndim))
        moved = order.pop(_dim(node, 1))
        order.insert(_dim(node, 2), moved)
        return self._repeat(node, order.index(self.class_dim))

    def _repeat(self, node: fx.Node, class_dim: int) -> LogitGlue | None:
        """``node`` done to hidden states as it is to logits."""
        return None if node.kwargs else self._with_row_operation(RowOperation(node.target, node.args[1:]), class_dim)  # type: ignore[arg-type]

    def _with_row_operation(self, operation: RowOperation, class_dim: int) -> LogitGlue:
        return LogitGlue(class_dim, (*self.row_operations, operation), self.steps)

    def _with_step(self, step: LogitStep) -> LogitGlue:
        return dataclasses.replace(self, steps=(*self.steps, step))


_ARRANGEMENTS: dict[Any, Callable[[LogitGlue, fx.Node], LogitGlue | None]] = {
    _ATEN.flatten.using_ints: LogitGlue._flatten,  # noqa: SLF001
    _ATEN.slice.Tensor: LogitGlue._slice,  # noqa: SLF001
    _ATEN.select.int: LogitGlue._select,  # noqa: SLF001
    _ATEN.transpose.int: LogitGlue._transpose,  # noqa: SLF001
    _ATEN.permute.default: LogitGlue._permute,  # noqa: SLF001
    _ATEN.movedim.int: LogitGlue._movedim,  # noqa: SLF001
}


def _source(node: fx.Node) -> torch.Tensor:
    """The fake tensor that ``node`` takes first."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value: torch.Tensor = source.meta["val"]
    return value


def _dim(node: fx.Node, position: int) -> int:
    """A dimension among the arguments, counted from the front."""
    dim = node.args[position]
    assert isinstance(dim, int)
    return dim % _source(node).ndim
