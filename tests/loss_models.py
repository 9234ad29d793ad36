"""Small language models, each with another way from logits to its loss; shared by the tests of chunked losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES = 24, 331

Loss = Callable[[Tensor, Tensor], Any]


class LanguageModel(nn.Module):
    """Embedding, two layers and a linear head; ``loss`` makes of logits and targets what the model returns."""

    def __init__(self, loss: Loss, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.loss = loss

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.loss(self.head(self.norm(hidden)), targets)


def plain(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def with_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)


def by_sizes(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    batch, length, classes = logits.shape
    return {"loss": F.cross_entropy(logits.view(batch * length, classes), targets.view(batch * length))}


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets[..., 1:].reshape(-1), reduction="sum")


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), label_smoothing=0.1)


def smoothed_sum(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.float().reshape(-1, logits.size(-1))
    return F.cross_entropy(flat, targets.view(-1), reduction="sum", label_smoothing=0.3) / 100


def classes_second(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets)


def permuted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.permute(1, 2, 0).float(), targets.t())


def moved(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.movedim(-1, 1), targets)


def one_row(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits[0, -1], targets[0, -1])


def scaled(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits * 0.5 / 2, targets)


def capped(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(5.0 * torch.tanh(logits / 5.0), targets)


def capped_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits.float().mul_(0.2).tanh() * 5.0, targets)


LOSSES: tuple[Loss, ...] = (
    plain,
    with_logits,
    by_sizes,
    shifted,
    smoothed,
    smoothed_sum,
    classes_second,
    permuted,
    moved,
    one_row,
    scaled,
    capped,
    capped_in_place,
)


def batch(rows: int = 3, length: int = 67, ignored: float = 0.2, ignore_index: int = -100) -> tuple[Tensor, Tensor]:
    """Tokens and targets, (rows, length); a share of the targets is ignored."""
    tokens = torch.randint(CLASSES, (rows, length))
    targets = torch.randint(CLASSES, (rows, length))
    return tokens, targets.masked_fill(torch.rand(rows, length) < ignored, ignore_index)


def loss_of(output: Any) -> Tensor:
    """The scalar in an output of these models, or of a Hugging Face model."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[-1]
    return output["loss"]
