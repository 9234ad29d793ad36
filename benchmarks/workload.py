"""The work that every system is given: one random Qwen2 model of a known shape, and one batch of tokens."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SEED = 0
HEAD_WIDTH = 128


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 model; `tied` says whether embedding and head are one matrix."""

    layers: int
    width: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    tied: bool

    def widened(self, width: int) -> Shape:
        """The same proportions at another width, a multiple of twice the head width."""
        if width % (2 * HEAD_WIDTH):
            raise ValueError(f"width={width} is not a multiple of {2 * HEAD_WIDTH}, which two heads of width 128 need")
        intermediate = round(self.intermediate * width / self.width / HEAD_WIDTH) * HEAD_WIDTH
        return replace(self, width=width, intermediate=intermediate, heads=width // HEAD_WIDTH, key_value_heads=2)


SHAPES = {
    "tiny": Shape(2, 64, 128, 4, 2, 512, tied=True),
    "3b": Shape(36, 2048, 11008, 16, 2, 151936, tied=True),
    "7b": Shape(28, 3584, 18944, 28, 4, 152064, tied=False),
}


@dataclass(frozen=True)
class Workload:
    """One model and one batch.

    Attributes:
        shape: a name in `SHAPES`.
        batch: sequences a step.
        sequence: tokens a sequence.
        layers: instead of the shape's own number.
        width: instead of the shape's own hidden size; other sizes follow.
    """

    shape: str
    batch: int
    sequence: int
    layers: int | None = None
    width: int | None = None

    @property
    def sizes(self) -> Shape:
        """The shape with layers and width as asked for."""
        sizes = SHAPES[self.shape] if self.width is None else SHAPES[self.shape].widened(self.width)
        return sizes if self.layers is None else replace(sizes, layers=self.layers)

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.sequence

    @property
    def checkpoint_bytes(self) -> int:
        """What the inputs of all layers take in bfloat16: what activation checkpointing must keep."""
        return self.sizes.layers * self.tokens * self.sizes.width * 2

    def config(self) -> Qwen2Config:
        """The configuration of the model."""
        sizes = self.sizes
        return Qwen2Config(
            num_hidden_layers=sizes.layers,
            hidden_size=sizes.width,
            intermediate_size=sizes.intermediate,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.key_value_heads,
            vocab_size=sizes.vocabulary,
            tie_word_embeddings=sizes.tied,
            max_position_embeddings=32768,
            attn_implementation="sdpa",
            use_cache=False,
        )

    def token_ids(self, device: torch.device) -> torch.Tensor:
        """Random token numbers, int64 (batch, sequence): the same on every device."""
        generator = torch.Generator().manual_seed(SEED)
        size = (self.batch, self.sequence)
        return torch.randint(0, self.sizes.vocabulary, size, generator=generator).to(device)


def build_model(config: Qwen2Config, device: torch.device, home: torch.device) -> Qwen2ForCausalLM:
    """A bfloat16 model in training mode with seeded random weights.

    Args:
        config: its configuration.
        device: where random numbers are drawn, if the weights fit there; a GPU does it much faster than a CPU.
        home: where the parameters lie in the end. They move one at a time, so the host never holds two copies.
    """
    if not _fits(config, device):
        device = home
    model = _initialised(config, device)
    if device != home:
        model = model.to(home)
        gc.collect()
        torch.cuda.empty_cache()
    model.train()
    return model


def count_parameters(model: torch.nn.Module) -> int:
    """Elements of all parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _initialised(config: Qwen2Config, device: torch.device) -> Qwen2ForCausalLM:
    previous = torch.get_default_dtype()
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)


def _fits(config: Qwen2Config, device: torch.device) -> bool:
    """Whether the weights take less than the free memory of a GPU, with a tenth to spare."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    weights = count_parameters(_initialised(config, torch.device("meta"))) * torch.bfloat16.itemsize
    return weights < 0.9 * free
