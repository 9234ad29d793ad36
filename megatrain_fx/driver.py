"""The accelerator's driver, as far as it locks host memory so that the device copies it directly."""

from typing import Protocol

import torch


class Driver(Protocol):
    """What can lock host memory so that a device reaches it."""

    def register(self, address: int, size: int) -> str | None:
        """Lock ``size`` bytes at ``address``; the reason if that is refused."""

    def unregister(self, address: int) -> None:
        """Unlock what was registered at ``address``."""


class CudaDriver:
    """The driver of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> str | None:
        """See :class:`Driver`; a refusal leaves nothing behind that a later CUDA call would report."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()
            error = runtime.cudaHostRegister(address, size, 0)
            if int(error) == 0:
                return None
            self._forget_error()
            return f"cudaHostRegister of {size} bytes failed: {runtime.cudaGetErrorString(error)}"

    def unregister(self, address: int) -> None:
        """See :class:`Driver`."""
        torch.cuda.cudart().cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """A thread's last error stays until it is read, which PyTorch does after each launch, and then raises it."""
        try:
            torch.ones(1, device=self._device).neg()
        except RuntimeError:
            torch.ones(1, device=self._device).neg()  # an error that lasts is no refusal, and must be seen


def driver_of(device: torch.device) -> Driver | None:
    """The driver of a device; None if it reaches host memory as it is, or has no way to lock it."""
    return CudaDriver(device) if device.type == "cuda" else None
