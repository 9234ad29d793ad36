"""Compares a compiled model with the same model in eager PyTorch, bit for bit, step by step."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from models import scalar_loss, tensors

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it, before CUDA starts

WIDTH = 16


@dataclasses.dataclass
class Pair:
    """An eager model on a device, and an equal one that is compiled for it.

    ``reused`` says that a parameter is used more than once, so that gradients are equal to rounding only.
    """

    eager: nn.Module
    compiled: nn.Module
    device: torch.device
    reused: bool = False

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.eager, self.compiled

    def forward(self, *args: Any, seed: int = 0, **kwargs: Any) -> tuple[Any, Any]:
        """Call both models with equal random numbers; outputs and the random states afterwards must be equal."""
        outputs, states = [], []
        for model in self.both:
            torch.manual_seed(seed)
            random.seed(seed)
            outputs.append(model(*args, **kwargs))
            states.append((torch.get_rng_state(), random.getstate()[1]))
        assert torch.equal(states[0][0], states[1][0])
        assert states[0][1] == states[1][1]
        assert_trees_equal(*outputs)
        return outputs[0], outputs[1]

    def step(self, *args: Any, seed: int = 0, loss: Callable[[Any], Tensor] = scalar_loss, **kwargs: Any) -> None:
        """Forward and backward of both models; losses, outputs, gradients, parameters and buffers must be equal."""
        expected, actual = self.forward(*args, seed=seed, **kwargs)
        expected_loss, actual_loss = loss(expected), loss(actual)
        assert torch.equal(expected_loss, actual_loss)
        expected_loss.backward()
        actual_loss.backward()
        self.check()

    def check(self) -> None:
        """Parameters, gradients and buffers of both models must be equal."""
        pairs = zip(self.eager.named_parameters(), self.compiled.named_parameters(), strict=True)
        for (name, expected), (other, actual) in pairs:
            assert name == other
            assert torch.equal(expected.cpu(), actual), f"parameter {name}"
            assert (expected.grad is None) == (actual.grad is None), f"gradient of {name}: eager {expected.grad}"
            if expected.grad is not None and actual.grad is not None:
                assert actual.grad.device.type == "cpu"
                assert self._close(expected.grad.cpu(), actual.grad), f"gradient of {name}"
        for (name, expected), (_, actual) in zip(
            self.eager.named_buffers(), self.compiled.named_buffers(), strict=True
        ):
            assert torch.equal(expected, actual), f"buffer {name}"

    def _close(self, expected: Tensor, actual: Tensor) -> bool:
        if self.reused:
            return torch.allclose(expected, actual, rtol=1e-4, atol=1e-6)
        return torch.equal(expected, actual)


def make_pair(
    build: Callable[[], nn.Module], device: torch.device | str = "cpu", *, reused: bool = False, **options: Any
) -> Pair:
    """Build a model twice with equal random numbers, one for eager PyTorch and one compiled, a unit a stage."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.use_deterministic_algorithms(True)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    options = {"device": device, "slots": 2, "stage_bytes": 0, **options}
    return Pair(models[0].to(device), megatrain.compile(models[1], **options), device, reused)


def assert_trees_equal(expected: Any, actual: Any) -> None:
    """Both trees hold equal tensors that agree on whether they require gradients."""
    assert type(expected) is type(actual)
    for one, other in zip(tensors(expected), tensors(actual), strict=True):
        assert one.dtype == other.dtype
        assert one.device == other.device
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad


def features(batch: int = 4, *, seed: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Random rows [batch, WIDTH], equal for an equal seed."""
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


def perceptron(depth: int = 3) -> nn.Sequential:
    """Linear layers with tanh between them: each is a unit."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
