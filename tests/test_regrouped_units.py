"""Calls that use other units, or in another order, than the first call, whose stages the host store is laid out for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from comparison import WIDTH, features, make_pair

SOME_UNITS = 2500


class EarlyExit(nn.Module):
    """Blocks, and a head after as many of them as the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, hidden: torch.Tensor, depth: int) -> torch.Tensor:
        for block in self.blocks[:depth]:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


@pytest.mark.parametrize("accumulated", [False, True])
def test_stages_of_another_call_share_a_region(accumulated: bool, device: torch.device) -> None:
    """The first call puts the head with the first block; later ones use each in a stage of its own."""
    pair = make_pair(EarlyExit, device, stage_bytes=SOME_UNITS, chaos=1)
    for step, depth in enumerate((1, 4, 2, 4)):
        for model in pair.both:
            if not accumulated:
                model.zero_grad()
        pair.step(features(seed=step, device=device), depth)


class TwoHeads(nn.Module):
    """Two heads on a frozen trunk; the caller says which are used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, 3) for name in "ab"})

    def forward(self, hidden: torch.Tensor, names: str) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(hidden))
        return sum(self.heads[name](hidden) for name in names)


def test_a_call_keeps_the_gradients_of_what_it_does_not_use(device: torch.device) -> None:
    pair = make_pair(TwoHeads, device, stage_bytes=2**30, chaos=1)
    for step, names in enumerate(("ab", "a", "a", "b", "ab")):
        if step == 1:
            for model in pair.both:
                model.zero_grad()
        pair.step(features(seed=step, device=device), names)
