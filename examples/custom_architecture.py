"""Train an architecture of one's own: skip connections over several layers, two towers, a custom autograd function.

    python examples/custom_architecture.py

Inside a unit (here ``Layer``) is ordinary Python. Between the units only tensor operations and fixed loops are needed.
The same model is trained eagerly from the same start, and the losses are printed side by side.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import megatrain_fx as megatrain

WIDTH = 64


class ClippedGradient(torch.autograd.Function):
    """Identity whose gradient is limited to [-0.1, 0.1] elementwise."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.1, 0.1)


class Layer(nn.Module):
    """One unit, [batch, WIDTH] -> [batch, WIDTH]; an optional second input is concatenated."""

    def __init__(self, inputs: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inputs * WIDTH)
        self.linear = nn.Linear(inputs * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, skipped: Tensor | None = None) -> Tensor:
        joined = hidden if skipped is None else torch.cat([hidden, skipped], dim=-1)
        return ClippedGradient.apply(torch.nn.functional.silu(self.linear(self.norm(joined))))


class Tower(nn.Module):
    """U-Net in miniature: each upward layer also reads the output of the downward layer at its level."""

    def __init__(self, levels: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(Layer() for _ in range(levels))
        self.up = nn.ModuleList(Layer(inputs=2) for _ in range(levels))

    def forward(self, hidden: Tensor) -> Tensor:
        skipped = []
        for layer in self.down:
            hidden = layer(hidden)
            skipped.append(hidden)
        for layer in self.up:
            hidden = layer(hidden, skipped.pop())
        return hidden


class TwoTowers(nn.Module):
    """Scores how well the rows of two feature matrices belong together; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(), Tower()
        self.temperature = nn.Parameter(torch.tensor(0.1))

    def forward(self, *, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        scores = self.left(left) @ self.right(right).t() * self.temperature
        matching = torch.arange(scores.shape[0], device=scores.device)
        return {"loss": torch.nn.functional.cross_entropy(scores, matching), "scores": scores}


def train(model: nn.Module, device: str, steps: int = 20) -> list[float]:
    """Train on random pairs that share their signal; returns the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        left = torch.randn(16, WIDTH, generator=generator)
        right = left.flip(-1) + 0.1 * torch.randn(16, WIDTH, generator=generator)
        loss = model(left=left.to(device), right=right.to(device))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train the model streamed and eager, and compare."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = TwoTowers()
    eager = copy.deepcopy(model).to(device)
    model = megatrain.compile(model, device=device, slots=2, stage_bytes=64 * 1024)

    pairs = list(zip(train(model, device), train(eager, device), strict=True))
    for step, (streamed, reference) in enumerate(pairs, start=1):
        print(f"step {step:2d}   streamed {streamed:.6f}   eager {reference:.6f}")
    print(f"largest difference {max(abs(streamed - reference) for streamed, reference in pairs):g}")


if __name__ == "__main__":
    main()
