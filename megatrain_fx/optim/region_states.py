"""The state of all trained parameters: where it lives, and whether it still belongs to the parameter."""

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch

from megatrain_fx.extension import runtime as native
from megatrain_fx.optim.region_memory import REMAINDER, RegionMemory
from megatrain_fx.optim.trained_parameters import TrainedParameters
from megatrain_fx.private_api import version_of
from megatrain_fx.store import HostStore


class RegionStates:
    """Maps the memory of a region when it is first needed, and again when its gradients have grown."""

    def __init__(self, trained: TrainedParameters, state_names: Sequence[str], pool: native.WorkerPool) -> None:
        self._trained = trained
        self._state_names = state_names
        self._pool = pool
        self._memories: dict[int, RegionMemory] = {}
        self._versions: dict[str, int] = {}

    @property
    def bytes(self) -> int:
        """Size of the memory of all regions."""
        return sum(memory.bytes for memory in self._memories.values())

    def memory(self, store: HostStore, region: int) -> RegionMemory:
        """The memory of a region whose gradients are reserved."""
        memory = self._memories.get(region)
        if memory is None or memory.gradient_bytes != store.gradient_bytes(region):
            weights, gradients = store.weights(region), store.gradients(region)
            layout, splits = store.layout.regions[region], self._trained.splits
            memory = RegionMemory(layout, weights, gradients, self._state_names, splits, self._pool)
            self._memories[region] = memory
        return memory

    def adopt(self, memory: RegionMemory, name: str, state: MutableMapping[str, Any], states: Iterable[str]) -> None:
        """Make a parameter's state, new or loaded, live in its region.

        Args:
            memory: of the region.
            name: of the parameter.
            state: of the parameter; what it lacks becomes zero.
            states: names of the float32 state that it is to have.
        """
        state.setdefault("step", 0)
        for key in states:
            state[key] = memory.adopt(key, name, state.get(key))
        if memory.keeps_remainder(name):
            held = state.get(REMAINDER) if self._is_unmodified(name) else None
            state[REMAINDER] = memory.adopt(REMAINDER, name, held)

    def note_update(self, names: Iterable[str]) -> None:
        """Tell autograd that parameters change, and remember that the change was ours."""
        names = list(names)
        parameters = [self._trained.by_name[name] for name in names]
        torch.autograd.graph.increment_version(parameters)
        self._versions.update(zip(names, map(version_of, parameters), strict=True))

    def trust(self) -> None:
        """Take all remainders, loaded just now, to belong to whatever values the parameters have at the next update."""
        self._versions.clear()

    def _is_unmodified(self, name: str) -> bool:
        version = version_of(self._trained.by_name[name])
        return self._versions.get(name, version) == version
