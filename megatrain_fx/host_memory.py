"""Exactly sized host memory, registered with the accelerator's driver so that copies are fast and asynchronous."""

import logging
import mmap
import weakref

import torch

logger = logging.getLogger(__name__)

_HUGE_PAGE = 2**21
_REGISTER_AT_MOST = 64 * 2**30


class HostMemory:
    """One anonymous mapping, and the means to make tensors of it.

    The mapping lives as long as any tensor made of it, and is unregistered just before it goes.
    """

    def __init__(self, size: int) -> None:
        """Map ``size`` bytes of zeros (at least one), asking for huge pages where they help."""
        self.size = size
        self._mapping = mmap.mmap(-1, max(size, 1))
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._registered: list[int] = []

    def flat(self) -> torch.Tensor:
        """All of it as a 1-D uint8 tensor."""
        return self.tensor(0, self.size, torch.uint8)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor with a storage of its own, so that saving or copying it takes no neighbours along.

        Args:
            offset: bytes from the start.
            count: elements.
            dtype: element type.
        """
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset)

    def register(self) -> str | None:
        """Lock the pages and let the driver copy them directly; the reason if it refuses, nothing being registered then."""
        if self.size == 0:
            return None
        runtime = torch.cuda.cudart()
        start = self.flat().data_ptr()
        for offset in range(0, self.size, _REGISTER_AT_MOST):
            piece = min(_REGISTER_AT_MOST, self.size - offset)
            error = int(runtime.cudaHostRegister(start + offset, piece, 0))
            if error != 0:
                _unregister(self._registered)
                self._registered = []
                return f"cudaHostRegister of {piece} bytes failed with error {error}"
            self._registered.append(start + offset)
        weakref.finalize(self._mapping, _unregister, list(self._registered)).atexit = False
        return None


def _unregister(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
