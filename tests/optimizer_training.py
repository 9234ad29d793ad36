"""A small model, trained with an overlapped optimizer in each of its modes, and what to compare afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain

optim = megatrain.optim
WIDTH = 64  # whole vectors for ATen, whose last, incomplete vector is computed with other roundings
ATEN_FUSES_MULTIPLY_ADD = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
needs_aten_fma = pytest.mark.skipif(not ATEN_FUSES_MULTIPLY_ADD, reason="ATen runs without fused multiply-add")
MODES: dict[str, dict[str, Any]] = {
    "during backward": {},
    "after backward": {"during_backward": False},
    "clipped": {"max_grad_norm": 0.1},
}
modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Keeps ATen from dividing a tensor into ranges that end inside a vector."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def compiled(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    return megatrain.compile(build(dtype), device="cpu", stage_bytes=0, slots=2, **options)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(step, dtype)).float().square().mean() * 10


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, serial: bool = False) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        if serial:
            optimizer.synchronize()
        optimizer.zero_grad()


def equal_bits(one: Tensor, other: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(integer), other.view(integer))


def values(optimizer: optim.StageOptimizer) -> list[Tensor]:
    """All parameters and all their state."""
    optimizer.synchronize()
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found += [parameter.detach(), *(state[key] for key in sorted(state) if key != "step")]
    return found


def assert_equal(one: optim.StageOptimizer, other: optim.StageOptimizer) -> None:
    pairs = list(zip(values(one), values(other), strict=True))
    assert all(equal_bits(*pair) for pair in pairs)
    steps = [[state["step"] for state in each.state.values()] for each in (one, other)]
    assert steps[0] == steps[1]


def master_of(optimizer: optim.StageOptimizer, parameter: Tensor) -> Tensor:
    """The float32 number whose rounded upper half a bfloat16 parameter is."""
    optimizer.synchronize()
    bits = parameter.detach().view(torch.int16).to(torch.int64) << 16
    return (bits + optimizer.state[parameter]["remainder"]).to(torch.int32).view(torch.float32)
