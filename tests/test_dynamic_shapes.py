"""Changing shapes: captures are few, and every size gives the results of eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from architectures import VOCABULARY, Gpt
from comparison import WIDTH, Pair, features, make_pair, perceptron
from models import EXAMPLES, Example


def captures(pair: Pair) -> int:
    return len(pair.compiled.__dict__["_megatrain"].programs)


def text(batch: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(100 * batch + length)
    return torch.randint(VOCABULARY, (batch, length), generator=generator).to(device)


def test_a_stream_of_lengths_is_captured_a_few_times(device: torch.device) -> None:
    """Sizes of 1 are captured for themselves; everything else is one symbolic program after the first shape."""
    pair = make_pair(Gpt, device)
    shapes = [(batch, length) for batch in (4, 2, 3, 5) for length in range(2, 9)]
    for batch, length in shapes:
        pair.step(text(batch, length, device), seed=length)
    assert len(shapes) > 20
    assert captures(pair) <= 2
    for batch, length in [(1, 5), (1, 6), (1, 7), (3, 1), (2, 1), (1, 1), (4, 4)]:
        pair.step(text(batch, length, device), seed=length)
    assert captures(pair) <= 7


def test_a_last_smaller_batch(device: torch.device) -> None:
    pair = make_pair(perceptron, device)
    for _ in range(2):
        for batch in (8, 8, 8, 3):
            pair.step(features(batch, device=device))
    assert captures(pair) == 2


def test_batches_of_one_and_of_none() -> None:
    pair = make_pair(perceptron)
    for batch in (4, 1, 0, 2, 1, 5, 0):
        pair.step(features(batch), loss=lambda output: output.square().sum())


SEVERAL_SHAPES = ("encoder_decoder", "moe", "skip", "convolution", "lora", "drop_path", "glue_buffer", "dict_output")


@pytest.mark.parametrize("entry", [entry for entry in EXAMPLES if entry.name in SEVERAL_SHAPES], ids=str)
def test_zoo_with_three_batch_sizes(entry: Example) -> None:
    pair = make_pair(entry.make_model, reused=entry.reused)
    for batch in (4, 6, 3):
        args, kwargs = entry.make_inputs(batch)
        pair.step(*args, **kwargs, seed=batch)
    assert captures(pair) <= 3


def test_shapes_change_between_forward_and_backward() -> None:
    pair = make_pair(perceptron, chaos=0)
    for model in pair.both:
        losses = [model(features(batch, seed=batch)).square().sum() for batch in (4, 2, 7, 3)]
        for index in (2, 0, 3, 1):
            losses[index].backward()
    pair.check()


def test_evaluation_and_training_have_shapes_of_their_own() -> None:
    pair = make_pair(Gpt)
    for length in (4, 6, 3):
        pair.step(text(2, length), seed=length)
        for model in pair.both:
            model.eval()
        with torch.no_grad():
            pair.forward(text(3, length))
        for model in pair.both:
            model.train()
    assert captures(pair) <= 4


def test_strides_of_inputs_may_change() -> None:
    class Flattening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH * WIDTH, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(self.first(inputs).reshape(len(inputs), -1)) + inputs.reshape(len(inputs), -1).sum()

    pair = make_pair(Flattening)
    for batch in (2, 3):
        inputs = torch.randn(batch, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
        pair.step(inputs)
        pair.step(inputs.transpose(1, 2))
        pair.step(inputs.transpose(0, 1).contiguous().transpose(0, 1))
        pair.step(inputs.expand(batch, WIDTH, WIDTH)[:, ::2].repeat_interleave(2, 1))


def test_sizes_that_select_a_branch() -> None:
    """Python branches on sizes are legal in the glue: each side is a program of its own."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            if inputs.shape[0] > 4:
                hidden = hidden.tanh()
            return self.last(hidden)

    pair = make_pair(Branching)
    for batch in (2, 3, 4, 5, 6, 7, 3, 8, 2):
        pair.step(features(batch))
    assert captures(pair) <= 3


def test_constants_made_of_sizes_follow_the_size() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Tensor) -> tuple[Tensor, int]:
            count = inputs.shape[0]
            return self.layer(inputs).sum(0) / count + torch.arange(count, device=inputs.device).sum(), count

    pair = make_pair(Averaging)
    for batch in (2, 3, 4, 7):
        expected, actual = pair.forward(features(batch))
        assert expected[1] == actual[1] == batch
        pair.step(features(batch))


def test_dtypes_of_inputs_select_programs() -> None:
    pair = make_pair(lambda: nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, WIDTH)))
    for dtype in (torch.int64, torch.int32, torch.int64):
        pair.step(torch.tensor([1, 2, 3], dtype=dtype))
    assert captures(pair) == 2
