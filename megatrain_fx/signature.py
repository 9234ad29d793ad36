"""Input signatures: everything about a call that the captured graph depends on, except the values of tensors."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import numbers
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megatrain_fx.errors import DataDependentGlueError, UnsupportedInputError
from megatrain_fx.glue_state import GlueState
from megatrain_fx.private_api import is_data_dependent_size
from megatrain_fx.tree import Tree, flatten, leaf_names, unflatten

_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format)
_BY_VALUE = (numbers.Number, enum.Enum, range, frozenset, type(Ellipsis))
_BY_IDENTITY = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Value(NamedTuple):
    """A leaf that the graph receives: the tensor, or after all tensors the symbolic size, of this number."""

    number: int


class Constant(NamedTuple):
    """A leaf that is part of the graph; `key` tells apart what `==` does not, such as 1, 1.0 and True."""

    key: Hashable
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclasses.dataclass(frozen=True)
class Structure:
    """How a call (or any tree) is made of tensors and constants: the tree, and for each leaf what stands there."""

    tree: Tree
    leaves: tuple[Value | Constant, ...]

    def rebuild(self, values: Sequence[object]) -> Any:
        """The tree with `values` in it: each distinct tensor, then each symbolic size."""
        filled = [values[leaf.number] if isinstance(leaf, Value) else leaf.value for leaf in self.leaves]
        return unflatten(self.tree, filled)

    @property
    def arity(self) -> int:
        """How many values `rebuild` takes."""
        return 1 + max((leaf.number for leaf in self.leaves if isinstance(leaf, Value)), default=-1)


class TensorSignature(NamedTuple):
    """What the graph depends on of one distinct input tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Modes(NamedTuple):
    """The modes of PyTorch that a capture depends on: autocast is (device type, enabled, dtype) for each type."""

    grad: bool
    inference: bool
    default_dtype: torch.dtype
    autocast: tuple[tuple[str, bool, torch.dtype], ...]


@dataclasses.dataclass(frozen=True)
class InputSignature:
    """The key of a captured graph: calls of equal signature run the same graph.

    `training` and `requires_grad` hold one byte for each module and each parameter of the model; `glue` is what
    :class:`megatrain_fx.glue_state.GlueState` tells.
    """

    structure: Structure
    tensors: tuple[TensorSignature, ...]
    training: bytes
    requires_grad: bytes
    modes: Modes
    glue: Hashable = ()

    def differs_only_in_sizes(self, other: InputSignature) -> bool:
        """Whether the two are equal when each shape is replaced by its number of dimensions."""
        return self.without_sizes() == other.without_sizes()

    def without_sizes(self) -> Hashable:
        """A key that all signatures share that differ only in sizes."""
        tensors = tuple((len(t.shape), t.dtype, t.device, t.requires_grad) for t in self.tensors)
        return self.structure, tensors, self.training, self.requires_grad, self.modes, self.glue


class ModelFlags:
    """Reads the flags of a model that a capture depends on; made once a model, since listing modules is slow."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.modules())
        self._parameters = tuple(model.parameters())
        self._glue = GlueState(model)
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._device_types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)

    def signature(self, tensors: Sequence[torch.Tensor], structure: Structure) -> InputSignature:
        """The signature of a call whose distinct tensors and structure `flatten_inputs` gave."""
        return InputSignature(
            structure=structure,
            tensors=tuple(TensorSignature(tuple(t.shape), t.dtype, t.device, t.requires_grad) for t in tensors),
            training=bytes([module.training for module in self._modules]),
            requires_grad=bytes([parameter.requires_grad for parameter in self._parameters]),
            modes=read_modes(self._device_types),
            glue=self._glue.read(),
        )


def read_modes(device_types: Sequence[str]) -> Modes:
    """The modes in force now, with autocast for the given device types."""
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types]
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return Modes(grad, inference, torch.get_default_dtype(), tuple(autocast))


def flatten_inputs(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[torch.Tensor], Structure]:
    """The distinct tensors of a call, in flatten order, and its structure, which rebuilds `(args, kwargs)`.

    A tensor object that is passed twice appears once: the structure records where.

    Raises:
        UnsupportedInputError: a leaf is neither a tensor nor a constant; the message names it.
    """
    tensors, sizes, structure = flatten_call(args, kwargs, f"the call of {type(model).__name__}")
    if sizes:
        raise UnsupportedInputError(f"a symbolic size was passed to {type(model).__name__}; pass a plain int")
    return tensors, structure


def flatten_call(
    args: Sequence[object], kwargs: Mapping[str, object], called: str
) -> tuple[list[torch.Tensor], list[torch.SymInt], Structure]:
    """As `flatten_inputs`, for any call (`called` names it in errors); symbolic sizes are values too."""
    found, tree = flatten((tuple(args), dict(kwargs)))
    tensors = {id(leaf): leaf for leaf in found if isinstance(leaf, torch.Tensor)}
    sizes = [leaf for leaf in found if isinstance(leaf, torch.SymInt)]
    tensor_index = {identity: index for index, identity in enumerate(tensors)}
    next_size = itertools.count(len(tensors))
    leaves: list[Value | Constant] = []
    for position, leaf in enumerate(found):
        if isinstance(leaf, torch.Tensor):
            leaves.append(Value(tensor_index[id(leaf)]))
        elif is_data_dependent_size(leaf):
            raise DataDependentGlueError(
                f"argument {_argument_name(tree, position)} of {called} is a number computed from the values of a "
                "tensor; pass the tensor in place of its item()."
            )
        elif isinstance(leaf, torch.SymInt):
            leaves.append(Value(next(next_size)))
        else:
            leaves.append(constant(leaf) or _refuse(leaf, tree, position, called))
    return list(tensors.values()), sizes, Structure(tree, tuple(leaves))


def constant(value: object) -> Constant | None:
    """`value` as a constant, or None if it is not one: its value may change while its identity stays."""
    if isinstance(value, _PLAIN):
        return Constant((type(value), value), value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        specialised = float(value) if isinstance(value, torch.SymFloat) else bool(value)
        return Constant((type(specialised), repr(specialised)), specialised)
    if isinstance(value, _BY_VALUE):
        by_text = isinstance(value, numbers.Number) and not isinstance(value, numbers.Integral)
        return Constant((type(value), repr(value) if by_text else value), value)
    if isinstance(value, _BY_IDENTITY):
        return Constant((type(value), value), value)
    return None


def _argument_name(tree: Tree, position: int) -> str:
    return leaf_names(tree)[position][len("[0]") :]


def _refuse(leaf: object, tree: Tree, position: int, called: str) -> Constant:
    name = _argument_name(tree, position)
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    remedy = "Pass tensors and plain constants, in tuples, lists, dicts or dataclasses"
    if "Cache" in type(leaf).__name__:
        remedy = "Training needs no cache: pass use_cache=False, or set model.config.use_cache = False"
    raise UnsupportedInputError(
        f"argument {name} of {called} is a {kind}, which is neither a tensor nor a plain constant, so a captured graph "
        f"cannot stand for the call. {remedy}."
    )
