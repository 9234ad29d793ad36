"""Unit calls: the modules of a captured graph that run one call of one unit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatrain_fx.errors import CaptureError, OutputTreeError
from megatrain_fx.execution_modes import ExecutionModes
from megatrain_fx.private_api import is_data_dependent_size
from megatrain_fx.signature import Constant, Structure, Value, constant
from megatrain_fx.tree import flatten, leaf_names


class OpaqueCall(nn.Module):
    """Runs one call that the captured graph does not look into, on flat values.

    Attributes:
        name: of what is called, for errors.
        arguments: how the arguments of the call are made of the values and constants.
        outputs: the structure that the call returns; its tensors, in order, are the results.
    """

    def __init__(self, name: str, arguments: Structure, outputs: Structure) -> None:
        super().__init__()
        self.name = name
        self.arguments = arguments
        self.outputs = outputs

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call; a subclass says what is called."""
        raise NotImplementedError

    def forward(self, *values: torch.Tensor | int) -> tuple[torch.Tensor, ...]:
        """The tensors that the call returns, given its distinct tensors and then its symbolic sizes.

        Raises:
            CaptureError: the call returned another structure than it did when it was captured.
        """
        args, kwargs = self.arguments.rebuild(values)
        tensors, found = flatten_outputs(self.call(*args, **kwargs), self.name)
        if found != self.outputs:
            raise CaptureError(
                f"{self.name} returned {_describe(found)}, but {_describe(self.outputs)} when it was captured. What it "
                "returns, other than the values of tensors, may depend only on its arguments and on the training "
                "flags: return tensors in place of changing constants."
            )
        return tuple(tensors)


class UnitCall(OpaqueCall):
    """One call of a unit, hooks included.

    Attributes:
        unit: the model's own module.
        path: its name in the model.
        modes: the gradient mode and autocast of the region in which the model calls the unit.
        mutated_inputs: positions of the values that the unit's real run, if it needed one, modified in place.
    """

    def __init__(
        self, unit: nn.Module, path: str, arguments: Structure, outputs: Structure, modes: ExecutionModes
    ) -> None:
        super().__init__(f"unit {path} ({type(unit).__name__})", arguments, outputs)
        self.unit = unit
        self.path = path
        self.modes = modes
        self.mutated_inputs: tuple[int, ...] = ()
        self.training = unit.training

    def call(self, *args: Any, **kwargs: Any) -> Any:
        with self.modes.active():
            return self.unit(*args, **kwargs)

    def extra_repr(self) -> str:
        return f"path={self.path!r}"


class FunctionCall(OpaqueCall):
    """One call of a custom autograd function in the glue: its backward would be lost if tracing looked into it."""

    def __init__(self, function: type[torch.autograd.Function], arguments: Structure, outputs: Structure) -> None:
        super().__init__(f"autograd function {function.__name__}", arguments, outputs)
        self.function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def extra_repr(self) -> str:
        return self.function.__name__


def flatten_outputs(value: object, returned_by: str) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of an output tree, in order and repeated where they are, and its structure.

    Raises:
        OutputTreeError: a leaf is neither a tensor nor a constant; the message tells its position and type.
    """
    found, tree = flatten(value)
    tensors: list[torch.Tensor] = []
    leaves: list[Value | Constant] = []
    for position, leaf in enumerate(found):
        if isinstance(leaf, torch.Tensor):
            leaves.append(Value(len(tensors)))
            tensors.append(leaf)
            continue
        if is_data_dependent_size(leaf):
            plain = None
        else:
            plain = constant(int(leaf) if isinstance(leaf, torch.SymInt) else leaf)
        if plain is None:
            _refuse(leaf, leaf_names(tree, "output")[position], returned_by)
        else:
            leaves.append(plain)
    return tensors, Structure(tree, tuple(leaves))


def _refuse(leaf: object, name: str, returned_by: str) -> None:
    remedy = "Return tensors and plain constants, in tuples, lists, dicts or dataclasses"
    if is_data_dependent_size(leaf):
        remedy = "It is computed from the values of a tensor: return the tensor, and call item() outside the model"
    elif "Cache" in type(leaf).__name__:
        remedy = "Training needs no cache: pass use_cache=False, or set model.config.use_cache = False"
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    raise OutputTreeError(f"{name} of {returned_by} is a {kind}, which is no tree of tensors. {remedy}.")


def _describe(structure: Structure) -> str:
    values = ["tensor" if isinstance(leaf, Value) else leaf.value for leaf in structure.leaves]
    return repr(structure.rebuild(["tensor"] * structure.arity)) if len(values) < 20 else f"{len(values)} leaves"
