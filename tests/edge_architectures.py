"""Small architectures that each hold one difficulty for streaming: odd parameters, odd outputs, odd uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from architectures import WIDTH


class MixedPrecisionBlock(nn.Module):
    """A float32 normalisation inside a bfloat16 layer: the layer's flat region holds two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(self.norm(hidden.float()).bfloat16())


class LowRankLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank update (LoRA)."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.reduce = nn.Linear(WIDTH, rank, bias=False)
        self.expand = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return (self.base(hidden) + self.expand(self.reduce(hidden))).tanh()


class UnusedParameter(nn.Module):
    """One unit is never called and another owns a parameter that its forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.first.spare = nn.Parameter(torch.randn(3))
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).relu())


class OddParameters(nn.Module):
    """Scalar, zero-size and non-contiguous parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.2)
        self.strided = nn.Parameter(torch.randn(WIDTH, 2)[:, 0])

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = torch.cat([hidden, hidden.new_zeros(0, WIDTH) + self.empty.to(hidden.dtype)])
        return mixed @ self.transposed * self.scale + self.strided


class GlueParameter(nn.Module):
    """Parameters of the root are used in the glue, between and after the units."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden * self.scale).relu() + self.shift
        return hidden


class GlueBuffer(nn.Module):
    """The glue updates buffers: normalisation without parameters of its own, and a counter of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.last(self.norm(self.first(inputs)))


class BufferedLayer(nn.Module):
    """A layer whose result depends on a buffer of its own: equal templates must not exchange buffers."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.full((WIDTH,), factor))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden) * self.factor


class DropPath(nn.Module):
    """Stochastic depth by sample: the branch of a random set of samples is dropped in training."""

    def __init__(self, keep: float = 0.7) -> None:
        super().__init__()
        self.keep = keep
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        branch = self.linear(hidden).relu()
        if self.training:
            kept = torch.rand(hidden.shape[0], 1, device=hidden.device) < self.keep
            branch = branch * kept / self.keep
        return hidden + branch


class PassThrough(nn.Module):
    """Each unit returns one of its own inputs unchanged beside its result, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PassThroughLayer() for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, bias = inputs, inputs.mean(-1, keepdim=True)
        for layer in self.layers:
            hidden, _, bias = layer(hidden, bias)
        return hidden * bias


class PassThroughLayer(nn.Module):
    """The unit of ``PassThrough``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, bias: Tensor) -> tuple[Tensor, None, Tensor]:
        return self.linear(hidden + bias).sin(), None, bias


class ReversedGradient(torch.autograd.Function):
    """Identity whose gradient is negated and halved."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class CustomFunctionLayer(nn.Module):
    """A unit that uses a custom autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return ReversedGradient.apply(self.linear(hidden)).tanh()


class FrozenTeacher(nn.Module):
    """A teacher unit runs under ``no_grad`` in the glue; the student is trained towards it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH)
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(inputs).tanh()
        return functional.mse_loss(self.student(inputs), goal)


@dataclass
class Prediction:
    """Output of ``Heads`` in dataclass form."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor | None = None


class Heads(nn.Module):
    """Two heads over a trunk; ``kind`` says how the same results are returned: tuple, dict or dataclass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.first = nn.Linear(WIDTH, 4)
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, *, inputs: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Any:
        hidden = self.trunk(inputs) * scale
        if mask is not None:
            hidden = hidden * mask
        logits, other = self.first(hidden), self.second(hidden)
        if self.kind == "tuple":
            return logits, None, [other, hidden]
        if self.kind == "dict":
            return {"logits": logits, "more": {"other": other, "hidden": (hidden,)}, "scale": scale}
        return Prediction(logits=logits, hidden=(other, hidden))


def sequential(*layers: nn.Module) -> nn.Sequential:
    """Return a model that is itself a ``Sequential``: its elements are the units."""
    return nn.Sequential(*layers)


def weight_normalised() -> nn.Sequential:
    """Return linear layers whose weight is computed from a magnitude and a direction (a parametrization)."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    )
