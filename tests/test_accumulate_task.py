"""Gradient accumulation in C++ against torch's own in-place addition, bit for bit."""

from __future__ import annotations

import pytest
import torch

from megatrain_fx.extension import runtime as cpp

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64]
SKIP, COPY, ADD = 0, 1, 2


def random_values(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of very different size, so that every addition rounds."""
    values = torch.randn(count, dtype=torch.float64) * torch.logspace(-3, 3, count, dtype=torch.float64)
    return values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 1000, 100_003])
def test_it_adds_as_torch_does(dtype: torch.dtype, count: int) -> None:
    slab, gradient = random_values(count, dtype), random_values(count, dtype).flip(0)
    expected = gradient.clone().add_(slab)
    task = cpp.AccumulateTask(slab.view(torch.uint8), gradient.view(torch.uint8))
    task.set_segments([(0, count, dtype, ADD)])
    task.run()
    assert torch.equal(gradient, expected)


def test_segments_of_mixed_types_and_modes() -> None:
    slab = torch.randint(0, 60, (256,), dtype=torch.uint8)
    gradient = torch.randint(0, 60, (256,), dtype=torch.uint8)
    expected = gradient.clone()
    expected[0:64].view(torch.float32).add_(slab[0:64].view(torch.float32))
    expected[64:96] = slab[64:96]
    expected[160:256].view(torch.bfloat16).add_(slab[160:256].view(torch.bfloat16))
    task = cpp.AccumulateTask(slab, gradient)
    task.set_segments(
        [
            (0, 16, torch.float32, ADD),
            (64, 16, torch.float16, COPY),
            (96, 16, torch.float32, SKIP),
            (128, 0, torch.float32, ADD),
            (160, 48, torch.bfloat16, ADD),
        ]
    )
    task.run()
    assert torch.equal(gradient, expected)


def test_new_segments_replace_the_old() -> None:
    slab, gradient = torch.ones(4), torch.zeros(4)
    task = cpp.AccumulateTask(slab.view(torch.uint8), gradient.view(torch.uint8))
    task.run()
    assert gradient.tolist() == [0, 0, 0, 0]
    for mode in (COPY, ADD, ADD):
        task.set_segments([(0, 4, torch.float32, mode)])
        task.run()
    assert gradient.tolist() == [3, 3, 3, 3]


def test_it_leaves_autograd_alone() -> None:
    slab, gradient = torch.ones(4), torch.zeros(4)
    task = cpp.AccumulateTask(slab.view(torch.uint8), gradient.view(torch.uint8))
    task.set_segments([(0, 4, torch.float32, ADD)])
    version = gradient._version
    task.run()
    assert gradient._version == version
    assert not gradient.requires_grad


@pytest.mark.parametrize(
    "segment",
    [
        (0, 5, torch.float32, ADD),
        (8, 3, torch.float32, ADD),
        (2, 1, torch.float32, ADD),
        (-4, 1, torch.float32, ADD),
        (0, -1, torch.float32, ADD),
        (20, 0, torch.float32, ADD),
        (0, 2**62, torch.float64, ADD),
    ],
)
def test_segments_outside_or_misaligned_are_refused(segment: tuple[int, int, torch.dtype, int]) -> None:
    short, long = torch.zeros(16, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(ValueError, match="misaligned or outside the slab of 16 bytes"):
        cpp.AccumulateTask(short, long).set_segments([segment])
    with pytest.raises(ValueError, match="misaligned or outside the (slab of 32|gradient of 16) bytes"):
        cpp.AccumulateTask(long, short).set_segments([segment])


def test_other_arguments_are_refused() -> None:
    good = torch.zeros(16, dtype=torch.uint8)
    for bad in (torch.zeros(4), good.view(4, 4), good[::2], good.to("meta")):
        with pytest.raises(ValueError, match="slab"):
            cpp.AccumulateTask(bad, good)
        with pytest.raises(ValueError, match="gradient"):
            cpp.AccumulateTask(good, bad)
    with pytest.raises(ValueError, match="mode"):
        cpp.AccumulateTask(good, good).set_segments([(0, 1, torch.float32, 3)])
