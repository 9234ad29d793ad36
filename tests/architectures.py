"""Small plain PyTorch architectures of the common families, shared by the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 32
CONTEXT = 8
WIDTH = 16


class MultilayerPerceptron(nn.Module):
    """Linear layers in a ``ModuleList`` with parameter-free activations between them, and a head outside it."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = functional.gelu(layer(hidden))
        return self.head(hidden)


class Attention(nn.Module):
    """Multi-head attention of a query over a memory; causal when asked, limited to ``window`` positions when given."""

    def __init__(self, heads: int = 2, causal: bool = True, window: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.window, self.dropout = heads, causal, window, dropout
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        memory = hidden if memory is None else memory
        query, key, value = (
            self.split(tensor) for tensor in (self.query(hidden), self.key(memory), self.value(memory))
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if self.causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            visible = ones.tril() if self.window is None else ones.tril().triu(1 - self.window)
            scores = scores.masked_fill(~visible, float("-inf"))
        if mask is not None:
            scores = scores + mask
        weights = functional.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.output((weights @ value).transpose(1, 2).flatten(2))

    def split(self, tensor: Tensor) -> Tensor:
        """Split [batch, time, width] into [batch, heads, time, width / heads]."""
        return tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, dropout: float = 0.0, window: int | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(window=window, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class Gpt(nn.Module):
    """Decoder-only transformer: positions are a parameter of the root, dropout stands in the glue and in the blocks."""

    def __init__(
        self, depth: int = 3, dropout: float = 0.1, tied: bool = False, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.1)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout, windows[index % len(windows)]) for index in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class DecoderLayer(nn.Module):
    """Decoder layer: its cross-attention reads the encoder's output twice (keys and values)."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = Attention()
        self.cross_attention = Attention(causal=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden = hidden + self.self_attention(hidden)
        hidden = hidden + self.cross_attention(hidden, memory, mask)
        return self.norm(hidden), None


class EncoderDecoder(nn.Module):
    """Sequence-to-sequence transformer: every decoder layer reads one encoder output; masks may be None."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderLayer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        memory = self.embedding(source)
        for block in self.encoder:
            memory = block(memory)
        hidden = self.embedding(target)
        for layer in self.decoder:
            hidden, _ = layer(hidden, memory, mask)
        return self.head(hidden)


class Experts(nn.Module):
    """Top-k mixture of experts: the rows given to an expert depend on the data. Returns (output, balance loss)."""

    def __init__(self, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden.flatten(0, -2)
        probabilities = self.router(rows).softmax(-1)
        weights, indices = probabilities.topk(self.chosen, dim=-1)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (indices == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        load = functional.one_hot(indices, len(self.experts)).to(rows.dtype).sum(1).mean(0)
        balance = (load * probabilities.mean(0)).sum() * len(self.experts)
        return hidden + mixed.view_as(hidden), balance


class MixtureOfExperts(nn.Module):
    """Experts in each layer. With ``auxiliary`` returns (logits, sum of the balance losses), else logits."""

    def __init__(self, depth: int = 2, auxiliary: bool = False) -> None:
        super().__init__()
        self.auxiliary = auxiliary
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden, balances = self.embedding(tokens), []
        for layer in self.layers:
            hidden, balance = layer(hidden)
            balances.append(balance)
        logits = self.head(hidden)
        return (logits, torch.stack(balances).sum()) if self.auxiliary else logits


class Skip(nn.Module):
    """U-Net style: each upward layer adds what the downward layer of the same level gave several units before."""

    def __init__(self, levels: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(levels))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(levels))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, saved = inputs, []
        for layer in self.down:
            hidden = layer(hidden).relu()
            saved.append(hidden)
        hidden = self.middle(hidden).tanh()
        for layer in self.up:
            hidden = layer(torch.cat([hidden, saved.pop()], dim=-1)).relu()
        return hidden + inputs


class ConvolutionBlock(nn.Module):
    """Convolution, batch normalisation and a residual: the forward updates the running statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, image: Tensor) -> Tensor:
        return image + self.norm(self.convolution(image)).relu()


class ConvolutionNetwork(nn.Module):
    """Residual convolutional classifier with batch normalisation in every block."""

    def __init__(self, depth: int = 2, channels: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(ConvolutionBlock(channels) for _ in range(depth)))
        self.head = nn.Linear(channels, 5)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


class SharedBlock(nn.Module):
    """One block called ``times`` times (ALBERT), between an embedding and a head of their own."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.times = times
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block(dropout=0.1)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for _ in range(self.times):
            hidden = self.block(hidden)
        return self.head(hidden)
