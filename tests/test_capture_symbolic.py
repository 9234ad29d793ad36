"""Capture with symbolic sizes: one graph serves other sizes, and refuses those for which it is not right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from captured_and_eager import CPU, assert_equals_eager
from megatrain_fx.capture import Captured, capture
from megatrain_fx.signature import ModelFlags, flatten_inputs
from models import example

WIDTH = 8


def _accepts(captured: Captured, model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    return captured.accepts(ModelFlags(model).signature(*flatten_inputs(model, args, kwargs)))


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "gpt_tied",
        "encoder_decoder",
        "moe",
        "convolution",
        "shared_block",
        "glue_buffer",
        "drop_path",
        "frozen_teacher",
        "dataclass_output",
        "input_gradient",
    ],
)
def test_another_batch_size(name: str) -> None:
    entry = example(name)
    model = entry.make_model()
    args, kwargs = entry.make_inputs(4)
    captured = capture(model, args, kwargs, device=CPU, dynamic=True)
    for batch in (4, 3, 7):
        args, kwargs = entry.make_inputs(batch)
        assert _accepts(captured, model, *args, **kwargs)
        assert_equals_eager(captured, model, args, kwargs)
    args, kwargs = entry.make_inputs(1)
    assert not _accepts(captured, model, *args, **kwargs)


class Text(nn.Module):
    """A small language model with a table of 64 positions, and a mask made in the glue."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.positions = nn.Parameter(torch.randn(64, WIDTH))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions[: ids.shape[1]]
        mask = torch.full((ids.shape[1], ids.shape[1]), float("-inf"), device=ids.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def _text(batch: int, length: int) -> Tensor:
    return torch.randint(11, (batch, length))


def test_stream_of_lengths_is_captured_a_few_times() -> None:
    model = Text()
    flags = ModelFlags(model)
    captures: list[Captured] = []
    for length in range(1, 65):
        ids = _text(2, length)
        signature = flags.signature(*flatten_inputs(model, (ids, ids.clone()), {}))
        if not any(captured.accepts(signature) for captured in captures):
            captures.append(capture(model, (ids, ids.clone()), {}, device=CPU, dynamic=bool(captures)))
    assert len(captures) <= 3
    ids = _text(5, 33)
    assert _accepts(captures[-1], model, ids, ids.clone())
    assert_equals_eager(captures[-1], model, (ids, ids.clone()))


def test_sizes_that_the_graph_is_not_right_for() -> None:
    model = Text()
    captured = capture(model, (_text(2, 12), _text(2, 12)), {}, device=CPU, dynamic=True)
    assert _accepts(captured, model, _text(3, 20), _text(3, 20))
    assert not _accepts(captured, model, _text(3, 65), _text(3, 65)), "more than there are positions"
    assert not _accepts(captured, model, _text(3, 20), _text(3, 21)), "ids and targets differ in length"
    assert not _accepts(captured, model, _text(1, 20), _text(1, 20)), "size 1 broadcasts"
    same = _text(3, 20)
    assert not _accepts(captured, model, same, same), "another aliasing"
    assert not _accepts(captured, model.eval(), _text(3, 20), _text(3, 20)), "another training flag"


class Branches(nn.Module):
    """Glue and a unit that branch on sizes."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            return (self.linear(x), x) if x.shape[0] > 20 else (self.linear(x), None)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.Layer())

    def forward(self, x: Tensor) -> Tensor:
        y, extra = self.layers(x)
        y = y * 2 if x.shape[0] % 2 == 0 else y + x
        return y if extra is None else y + extra


@pytest.mark.parametrize(("captured_with", "accepted"), [(6, (4, 8, 20)), (7, (3, 19)), (30, (22, 100))])
def test_branches_on_sizes_become_conditions(captured_with: int, accepted: Sequence[int]) -> None:
    model = Branches()
    captured = capture(model, (torch.randn(captured_with, WIDTH),), {}, device=CPU, dynamic=True)
    for batch in (2, 3, 4, 8, 19, 20, 21, 22, 100):
        x = torch.randn(batch, WIDTH)
        if _accepts(captured, model, x):
            assert_equals_eager(captured, model, (x,))
        else:
            assert batch not in accepted


def test_sizes_passed_to_units_follow() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor, length: int) -> Tensor:
            return super().forward(x[:length]) * length

    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(WIDTH, WIDTH)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x, x.shape[0] - 1).sum() * x.shape[0]

    model = Sized()
    captured = capture(model, (torch.randn(5, WIDTH),), {}, device=CPU, dynamic=True)
    for batch in (5, 9):
        assert _accepts(captured, model, torch.randn(batch, WIDTH))
        assert_equals_eager(captured, model, (torch.randn(batch, WIDTH),))


class Recurrent(nn.Module):
    """A unit that loops over a sequence in Python."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden, seen = torch.zeros_like(x[:, 0]), []
            for step in range(x.shape[1]):
                hidden = self.cell(x[:, step], hidden)
                seen.append(hidden)
            return torch.stack(seen, 1)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Cell() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def test_unit_that_loops_over_a_size() -> None:
    model = Recurrent()
    captured = capture(model, (torch.randn(3, 6, WIDTH),), {}, device=CPU, dynamic=True)
    for length in (6, 9, 2):
        x = torch.randn(4, length, WIDTH)
        assert _accepts(captured, model, x)
        assert_equals_eager(captured, model, (x,))


def test_gpt_of_another_length() -> None:
    entry = example("gpt")
    model = entry.make_model()
    args, kwargs = entry.make_inputs()
    captured = capture(model, args, kwargs, device=CPU, dynamic=True)
    shorter = (args[0][:, :-3].contiguous(),), {"targets": kwargs["targets"][:, :-3].contiguous()}
    assert _accepts(captured, model, *shorter[0], **shorter[1])
    assert_equals_eager(captured, model, *shorter)
