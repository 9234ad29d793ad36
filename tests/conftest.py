"""Fixtures shared by all tests: the device, thread count and seeds; tests marked ``cuda`` need a CUDA device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``cuda`` on a machine without a CUDA device, and say why."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Give the compute device; a test that asks for it runs once on the CPU and once on CUDA."""
    return torch.device(request.param)


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    """Fix the number of intra-op threads: reductions, and so bits, depend on it."""
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Give each test the same random numbers, whatever ran before it, and restore the modes it may have changed."""
    torch.manual_seed(0)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_grad_enabled(True)
