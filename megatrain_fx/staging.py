"""Staging buffers: the way of host memory that is not registered to the device and back."""

from dataclasses import dataclass

import torch

from megatrain_fx.extension import runtime as native

STAGING_BYTES = 32 * 2**20
"""Size of one buffer: large enough for a copy at full speed, small beside a stage."""

_MOST_THREADS = 8


@dataclass(frozen=True)
class StagingLanes:
    """The staging buffers of both copy lanes.

    Attributes:
        inbound: of lane h2d.
        outbound: of lane d2h.
        bytes: size of all buffers together.
    """

    inbound: native.Staging
    outbound: native.Staging
    bytes: int


def allocate_staging(device: torch.device, chunk_bytes: int = STAGING_BYTES) -> StagingLanes:
    """Two pinned buffers of ``chunk_bytes`` for each lane, and a few threads that copy between them and the store."""
    threads = max(1, min(_MOST_THREADS, torch.get_num_threads() // 2))
    buffers = [_pinned(device, chunk_bytes) for _ in range(4)]
    inbound = native.Staging(buffers[0], buffers[1], device, threads)
    return StagingLanes(inbound, native.Staging(buffers[2], buffers[3], device, threads), 4 * chunk_bytes)


def _pinned(device: torch.device, size: int) -> torch.Tensor:
    """Pinned bytes; pageable ones, from which copies are right but not asynchronous, where the driver gives none."""
    if device.type != "cpu":
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            pass
    return torch.empty(size, dtype=torch.uint8, device="cpu")
