"""Exactly sized host memory that can be registered with the accelerator's driver."""

import functools

import torch

from megatrain_fx.driver import Driver
from megatrain_fx.extension import runtime as native

REGISTER_AT_MOST = 64 * 2**30
"""Bytes of one registration: drivers refuse larger ones."""


class HostMemory:
    """One anonymous mapping, and the means to make tensors of it.

    The mapping has no more pages than ``size`` needs, asks for huge pages where they help, and lives as long as any
    tensor made of it. It is unregistered just before it goes. A forked process has a copy of it, as of any memory; once
    it is registered, forked processes do not have it (a tensor of it must not be read there).
    """

    def __init__(self, size: int) -> None:
        """Map ``size`` bytes of zeros.

        Raises:
            MemoryError: the system has no more.
        """
        self.size = size
        self.registered = False
        self._mapping = native.HostMapping(size)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._mapping.address

    @property
    def mapped_bytes(self) -> int:
        """Size of its pages."""
        return self._mapping.mapped_bytes

    def flat(self) -> torch.Tensor:
        """All of it as a 1-D uint8 tensor."""
        return self.tensor(0, self.size, torch.uint8)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor with a storage of its own, so that saving or copying it takes no neighbours along.

        Args:
            offset: bytes from the start.
            count: elements.
            dtype: element type.

        Raises:
            ValueError: that is misaligned or reaches outside.
        """
        return self._mapping.tensor(offset, count, dtype)

    def touch(self) -> None:
        """Make all pages resident, before anything is written: PyTorch's threads together, where a driver uses one."""
        self.flat().fill_(0)

    def register(self, driver: Driver, at_most: int = REGISTER_AT_MOST) -> str | None:
        """Lock the pages so that the device copies them directly.

        Args:
            driver: who locks them.
            at_most: bytes of one registration.

        Returns:
            The reason if the driver refuses, nothing being registered then.
        """
        if self.size == 0 or self.registered:
            return None
        self._mapping.set_inherited(False)  # a copy on write would give this process pages that are not the locked ones
        pieces: list[int] = []
        for offset in range(0, self.size, at_most):
            refusal = driver.register(self.address + offset, min(at_most, self.size - offset))
            if refusal is not None:
                _unregister(driver, pieces)
                self._mapping.set_inherited(True)
                return refusal
            pieces.append(self.address + offset)
        self._mapping.before_unmap(functools.partial(_unregister, driver, pieces))
        self.registered = True
        return None


def _unregister(driver: Driver, addresses: list[int]) -> None:
    for address in addresses:
        driver.unregister(address)
