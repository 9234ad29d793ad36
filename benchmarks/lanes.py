"""What the lanes of this project's schedule take when each runs alone: copies in, copies out, updates."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from systems import Training

REPEATS = 3


def lanes_alone(training: Training, tokens: torch.Tensor, device: torch.device, *, clipped: bool) -> dict[str, Any]:
    """Seconds and bytes of each lane of one step, alone.

    Args:
        training: by `systems.megatrain`, after some steps.
        tokens: of the call whose schedule is meant.
        device: where the model computes.
        clipped: all updates begin when `update` is called, so that their time alone can be told; without clipping they
            belong to the backward pass, and `update_seconds` is None.
    """
    from megatrain_fx import trace
    from megatrain_fx.edge import STATE
    from megatrain_fx.homecoming import find_journeys
    from megatrain_fx.ir import Op, number_of

    training.drain()
    program = trace(training.model, input_ids=tokens, labels=tokens)
    store = training.model.__dict__[STATE].store
    prefetches = [operation for operation in program.schedule if operation.op is Op.PREFETCH]
    weights = [store.weights(number_of(operation.reads[0])) for operation in prefetches]
    regions = [journey.region for journey in find_journeys(program.schedule)]
    gradients = [store.gradients(region)[: program.facts.regions[region].gradient_bytes] for region in regions]
    return {
        "h2d_seconds": _copy_seconds(weights, device, inward=True),
        "h2d_bytes": sum(region.numel() for region in weights),
        "d2h_seconds": _copy_seconds(gradients, device, inward=False),
        "d2h_bytes": sum(region.numel() for region in gradients),
        "update_seconds": min(_update_rounds(training, device)) if clipped else None,
    }


def _copy_seconds(regions: list[torch.Tensor], device: torch.device, *, inward: bool) -> float:
    """Copies between host regions (1-D uint8) and one device buffer, back to back; the shortest of some rounds."""
    buffer = torch.zeros(max(region.numel() for region in regions), dtype=torch.uint8, device=device)
    rounds = []
    for _ in range(REPEATS):
        _wait(device)
        begin = time.perf_counter()
        for region in regions:
            part = buffer[: region.numel()]
            target, source = (part, region) if inward else (region, part)
            target.copy_(source, non_blocking=True)
        _wait(device)
        rounds.append(time.perf_counter() - begin)
    return min(rounds)


def _update_rounds(training: Training, device: torch.device) -> Iterator[float]:
    """Seconds from the call of the optimizer to the end of its last update, with nothing else running."""
    for _ in range(REPEATS):
        training.differentiate()
        _wait(device)
        begin = time.perf_counter()
        training.update()
        training.drain()
        yield time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
