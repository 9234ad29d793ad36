"""The norm of all gradients: measured region by region as they come home, and again where that is out of date."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatrain_fx.optim.region_memory import RegionMemory
from megatrain_fx.private_api import version_of
from megatrain_fx.store import HostStore


@dataclass(frozen=True)
class Measurement:
    """What a region's last measurement measured: parameters by name, and the versions of their gradients."""

    memory: RegionMemory
    versions: Mapping[str, int]


class GradientNorm:
    """Knows which regions' measurements still hold."""

    def __init__(self) -> None:
        self._measurements: dict[int, Measurement] = {}

    def note(self, store: HostStore, region: int, memory: RegionMemory, names: Sequence[str]) -> None:
        """A region was measured with the gradients that the store holds now."""
        self._measurements[region] = Measurement(memory, _versions(store, names))

    def forget(self, region: int) -> None:
        """A region's gradients are about to change."""
        self._measurements.pop(region, None)

    def total(
        self, store: HostStore, regions: Mapping[int, Sequence[str]], memory_of: Callable[[int], RegionMemory]
    ) -> float:
        """The 2-norm of the gradients of these parameters, by region; infinite or NaN if any of them is."""
        squares = 0.0
        for region, names in regions.items():
            memory = memory_of(region)
            if self._measurements.pop(region, None) != Measurement(memory, _versions(store, names)):
                memory.set_norm(names)
                memory.norm.run()
            squares += memory.norm.value
        return math.sqrt(squares)


def clip_coefficient(norm: float, max_norm: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies gradients of this norm by, in its float32 arithmetic."""
    total = torch.tensor(norm, dtype=torch.float32)
    return float(torch.clamp(max_norm / (total + 1e-6), max=1.0))


def _versions(store: HostStore, names: Sequence[str]) -> dict[str, int]:
    return {name: version_of(store.gradient_view(name)) for name in names}
