"""Unit trials: one real run of a unit on random inputs, for a unit that cannot be run on fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from megatrain_fx.errors import CaptureError
from megatrain_fx.private_api import (
    DATA_DEPENDENT_ERRORS,
    call_uncompiled,
    named_tensors,
    size_at,
    size_symbols,
    without_fake_mode,
)
from megatrain_fx.signature import Structure
from megatrain_fx.unit_call import flatten_outputs
from megatrain_fx.units import Unit

Size = int | torch.SymInt
Tables = tuple[dict[str, Any], dict[str, Any]]


class Originals:
    """The real parameters and buffers of a model's modules while stand-ins take their place."""

    def __init__(self, model: nn.Module) -> None:
        self._tables = {module: tuple(dict(table) for table in named_tensors(module)) for module in model.modules()}

    def put_copies(self, module: nn.Module, device: torch.device) -> None:
        """Put copies on `device` of the real tensors into `module` and all that it contains; aliases stay aliases."""
        copies: dict[int, torch.Tensor] = {}
        for part in module.modules():
            for table, originals in zip(named_tensors(part), self._tables.get(part, ({}, {})), strict=True):
                for name, tensor in originals.items():
                    if tensor is not None and id(tensor) not in copies:
                        copies[id(tensor)] = tensor.detach().to(device, copy=True)
                    table[name] = None if tensor is None else copies[id(tensor)]

    def on_meta(self, module: nn.Module) -> bool:
        """Whether some real tensor of `module` has no values."""
        tables = itertools.chain.from_iterable(self._tables.get(part, ()) for part in module.modules())
        return any(tensor is not None and tensor.is_meta for table in tables for tensor in table.values())


def run_on_random_inputs(
    unit: Unit,
    arguments: Structure,
    values: Sequence[torch.Tensor | Size],
    originals: Originals,
    device: torch.device,
    reason: Exception,
) -> tuple[list[torch.Tensor], Structure]:
    """What the unit returns for inputs like `values`: fake tensors of the same metadata, and the structure.

    Floating-point inputs are normal, integers 0, booleans true. With symbolic sizes the unit runs twice, with different
    sizes, to see how its results depend on them. Neither the unit nor any random state changes.

    Args:
        reason: why the unit cannot be run on fake tensors.

    Raises:
        CaptureError: the unit depends on the values of tensors, and has no real parameters or fails on such inputs.
        Exception: `reason` itself, if it is the unit's own failure.
    """
    if originals.on_meta(unit.module):
        _refuse(unit, "its parameters are on the meta device: trace the model with real parameters", reason)
    trials = [_run(unit, arguments, values, originals, device, scaled, reason) for scaled in _scalings(values)]
    structure = trials[0][1]
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    results = zip(*(tensors for tensors, _ in trials), strict=True)
    return [_like(result, sizes, unit) for result in results], structure


def _scalings(values: Sequence[torch.Tensor | Size]) -> list[bool]:
    sizes = itertools.chain.from_iterable(v.shape if isinstance(v, torch.Tensor) else (v,) for v in values)
    return [False, True] if any(size_symbols(size) for size in sizes) else [False]


def _run(
    unit: Unit,
    arguments: Structure,
    values: Sequence[torch.Tensor | Size],
    originals: Originals,
    device: torch.device,
    scaled: bool,
    reason: Exception,
) -> tuple[list[torch.Tensor], Structure]:
    with without_fake_mode(), torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
        originals.put_copies(unit.module, device)
        inputs = [_random_like(v, scaled) if isinstance(v, torch.Tensor) else size_at(v, scaled) for v in values]
        args, kwargs = arguments.rebuild(inputs)
        try:
            return flatten_outputs(call_uncompiled(unit.module, *args, **kwargs), f"unit {unit.path}")
        except Exception as error:
            _refuse(unit, f"on random inputs it failed with {type(error).__name__}: {error}", reason)


def _refuse(unit: Unit, found: str, reason: Exception) -> NoReturn:
    if not isinstance(reason, DATA_DEPENDENT_ERRORS):
        raise reason
    raise CaptureError(
        f"unit {unit.path} ({type(unit.module).__name__}) depends on the values of tensors, so a real run is needed to know "
        f"what it returns; but {found}."
    ) from reason


def _random_like(value: torch.Tensor, scaled: bool) -> torch.Tensor:
    shape = [size_at(size, scaled) for size in value.shape]
    if value.dtype == torch.bool:
        return torch.ones(shape, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return torch.randn(shape, device=value.device).to(value.dtype)
    return torch.zeros(shape, dtype=value.dtype, device=value.device)


def _like(trials: tuple[torch.Tensor, ...], sizes: Sequence[Size], unit: Unit) -> torch.Tensor:
    first = trials[0]
    if len({tuple(trial.shape) for trial in trials}) == 1:
        return torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=first.device)
    shape = [_symbolic(seen, sizes, unit) for seen in zip(*(trial.shape for trial in trials), strict=True)]
    return torch.empty(shape, dtype=first.dtype, device=first.device)


def _symbolic(seen: tuple[int, ...], sizes: Sequence[Size], unit: Unit) -> Size:
    """The size, or product of two sizes, that was `seen` in the plain and in the scaled trial."""
    if seen[0] == seen[1]:
        return seen[0]
    products = (one * other for one, other in itertools.combinations_with_replacement(sizes, 2))
    for size in itertools.chain(sizes, products):
        if (size_at(size, False), size_at(size, True)) == seen:
            return size
    raise CaptureError(
        f"unit {unit.path} ({type(unit.module).__name__}) depends on the values of tensors, and how the sizes that it "
        f"returns ({seen[0]}, {seen[1]}) follow from those of its inputs was not understood."
    )
