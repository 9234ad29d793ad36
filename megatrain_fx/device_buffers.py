"""The slots and slabs of one model: allocated once, shared by all its schedules, at fixed addresses."""

from collections.abc import Mapping

import torch

from megatrain_fx.host_memory import HostMemory
from megatrain_fx.ir import BufferKind, kind_of
from megatrain_fx.registration import Registration


class DeviceBuffers:
    """Owns device memory for weights and gradients, and the pinned slabs on the host.

    Schedules of one model never run at the same time, so they share buffers; a schedule that needs more or larger ones
    makes the pool grow.
    """

    def __init__(self, device: torch.device, registration: Registration) -> None:
        self._device = device
        self._registration = registration
        self._pools: dict[str, list[torch.Tensor]] = {}
        self._host_memory: dict[int, HostMemory] = {}

    def pin(self, slab: torch.Tensor) -> None:
        """Register a host slab before its first use: gradients that go straight home never need it.

        Args:
            slab: a host slab that was bound.
        """
        memory = self._host_memory[slab.data_ptr()]
        if not memory.registered:
            self._registration.register(memory)

    def bind(self, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """A 1-D uint8 tensor for each slot and slab of a schedule: the smallest free one that is large enough."""
        bound: dict[str, torch.Tensor] = {}
        for pool in ("slot", "device", "host"):
            names = [name for name in sizes if _pool_of(name) == pool]
            free = sorted(self._pools.setdefault(pool, []), key=torch.Tensor.numel)
            for name in sorted(names, key=lambda name: sizes[name]):
                fitting = next((i for i, tensor in enumerate(free) if tensor.numel() >= sizes[name]), None)
                tensor = self._allocate(pool, sizes[name]) if fitting is None else free.pop(fitting)
                bound[name] = tensor[: sizes[name]]
        return bound

    @property
    def slot_bytes(self) -> int:
        """Device bytes that hold weights."""
        return sum(tensor.numel() for tensor in self._pools.get("slot", ()))

    @property
    def slab_bytes(self) -> int:
        """Device bytes that hold gradients on their way home."""
        return sum(tensor.numel() for tensor in self._pools.get("device", ()))

    @property
    def host_slab_bytes(self) -> int:
        """Host bytes that hold gradients on their way home."""
        return sum(tensor.numel() for tensor in self._pools.get("host", ()))

    def _allocate(self, pool: str, size: int) -> torch.Tensor:
        if pool == "host":
            memory = HostMemory(size)
            tensor = memory.flat()
            self._host_memory[tensor.data_ptr()] = memory
        else:
            tensor = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._pools[pool].append(tensor)
        return tensor


def _pool_of(name: str) -> str | None:
    if kind_of(name) is BufferKind.SLOT:
        return "slot"
    return name.rpartition(".")[2] if kind_of(name) is BufferKind.SLAB else None
