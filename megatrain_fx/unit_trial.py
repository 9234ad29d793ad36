"""Unit trials: runs of a unit on plain sizes, where a run on symbolic sizes or fake values does not serve."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_fx.model_state import preserved
from megatrain_fx.private_api import (
    call_uncompiled,
    named_tensors,
    size_at,
    size_symbols,
    version_of,
    with_autograd,
    without_fake_mode,
)
from megatrain_fx.signature import Structure
from megatrain_fx.unit_call import flatten_outputs
from megatrain_fx.units import Unit

Size = int | torch.SymInt
_FACTORS = (2, 3, 5, 7, 11, 13, 17, 19, 23)
Scaling = Mapping[Any, int] | None


class TrialError(Exception):
    """A trial did not tell what a unit returns; the text says why."""


class Originals:
    """The real parameters and buffers of a model's modules while stand-ins take their place."""

    def __init__(self, model: nn.Module) -> None:
        self._tables: dict[nn.Module, list[dict[str, Any]]] = {
            module: [dict(table) for table in named_tensors(module)] for module in model.modules()
        }

    @contextlib.contextmanager
    def in_place(self, module: nn.Module, device: torch.device) -> Iterator[None]:
        """Let `module` run really: copies of its real tensors on `device`, no fake mode, random states put back.

        Raises:
            TrialError: there are no real tensors.
        """
        parts = list(module.modules())
        tensors = [t for part in parts for table in self._tables.get(part, []) for t in table.values() if t is not None]
        if any(tensor.is_meta for tensor in tensors):
            raise TrialError("its parameters are on the meta device: trace the model with real parameters")
        devices = [device] if device.type != "cpu" else []
        with without_fake_mode(), torch.random.fork_rng(devices, device_type=device.type):
            copies = {id(tensor): tensor.detach().to(device, copy=True) for tensor in tensors}
            for part in parts:
                for table, originals in zip(named_tensors(part), self._tables.get(part, [{}, {}]), strict=True):
                    table.update({k: None if t is None else copies[id(t)] for k, t in originals.items()})
            yield


@dataclasses.dataclass(frozen=True)
class UnitTrial:
    """What is needed to run one call of a unit on plain sizes.

    With symbolic sizes the unit runs twice, with different sizes, to see how its results depend on them.

    Attributes:
        unit: it is left as it was.
        arguments: of the call.
        values: the tensors and sizes for which others stand in: normal random numbers where they are floating-point,
            0 where they are integers, true where they are booleans.
        mutated: positions of the values that real runs have modified in place.
    """

    unit: Unit
    arguments: Structure
    values: Sequence[torch.Tensor | Size]
    mutated: set[int] = dataclasses.field(default_factory=set)

    def run_really(self, originals: Originals, device: torch.device) -> tuple[list[torch.Tensor], Structure]:
        """As `run`, with real tensors on `device`, and with autograd, which a unit may use in its forward."""
        with with_autograd():
            return self._infer(
                [self._run(scaling, originals.in_place(self.unit.module, device)) for scaling in self._scalings()]
            )

    def run(self) -> tuple[list[torch.Tensor], Structure]:
        """Fake tensors with the metadata of the unit's results, and their structure.

        Raises:
            TrialError: the unit failed, or how the sizes of its results follow from those of the values was not seen.
        """
        return self._infer([self._run(scaling, contextlib.nullcontext()) for scaling in self._scalings()])

    def _sizes(self) -> list[Size]:
        return [size for v in self.values for size in (v.shape if isinstance(v, torch.Tensor) else (v,))]

    def _scalings(self) -> list[Scaling]:
        """Sizes as they are, and each symbol multiplied by a prime of its own: products then differ from symbols."""
        symbols = dict.fromkeys(symbol for size in self._sizes() for symbol in size_symbols(size))
        if len(symbols) > len(_FACTORS):
            raise TrialError("its inputs have too many sizes")
        return [None, dict(zip(symbols, _FACTORS, strict=False))] if symbols else [None]

    def _run(
        self, scaling: Scaling, surroundings: contextlib.AbstractContextManager[None]
    ) -> tuple[list[torch.Tensor], Structure]:
        with preserved(self.unit.module), surroundings:
            values = [
                _stand_in(v, scaling) if isinstance(v, torch.Tensor) else size_at(v, scaling) for v in self.values
            ]
            args, kwargs = self.arguments.rebuild(values)
            before = _versions(values)
            try:
                result = call_uncompiled(self.unit.module, *args, **kwargs)
            except Exception as error:
                raise TrialError(f"on random inputs it failed with {type(error).__name__}: {error}") from error
            after = _versions(values)
        self.mutated.update(k for k, (old, new) in enumerate(zip(before, after, strict=True)) if old != new)
        return flatten_outputs(result, f"unit {self.unit.path}")

    def _infer(self, trials: list[tuple[list[torch.Tensor], Structure]]) -> tuple[list[torch.Tensor], Structure]:
        first, last = trials[0], trials[-1]
        if first[1] != last[1]:
            raise TrialError("what it returns depends on the sizes of its inputs")
        return [self._fake(one, other) for one, other in zip(first[0], last[0], strict=True)], first[1]

    def _fake(self, plain: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
        if plain.shape == scaled.shape:
            return torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
        shape = [self._symbolic(one, other) for one, other in zip(plain.shape, scaled.shape, strict=True)]
        return torch.empty(shape, dtype=plain.dtype, device=plain.device)

    def _symbolic(self, plain: int, scaled: int) -> Size:
        """The size, or product of two sizes, of the values that was seen as `plain` and as `scaled`."""
        if plain == scaled:
            return plain
        scaling, sizes = self._scalings()[1], self._sizes()
        products = (one * other for one, other in itertools.combinations_with_replacement(sizes, 2))
        for size in itertools.chain(sizes, products):
            if (size_at(size), size_at(size, scaling)) == (plain, scaled):
                return size
        raise TrialError(f"how its results come by the size {plain} was not understood")


def _versions(values: Sequence[torch.Tensor | int]) -> list[int]:
    return [version_of(value) if isinstance(value, torch.Tensor) else 0 for value in values]


def _stand_in(value: torch.Tensor, scaling: Scaling) -> torch.Tensor:
    shape = [size_at(size, scaling) for size in value.shape]
    if value.dtype == torch.bool:
        return torch.ones(shape, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return torch.randn(shape, device=value.device).to(value.dtype)
    return torch.zeros(shape, dtype=value.dtype, device=value.device)
