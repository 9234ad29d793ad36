"""Templates: stages share one exactly if they compute the same, whatever their classes and names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from architectures import Block, Gpt
from comparison import WIDTH, features, make_pair
from edge_architectures import BufferedLayer, ReversedGradient


class Layer(nn.Module):
    """A linear layer and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor] = torch.tanh, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(self.linear(hidden))


class Renamed(nn.Module):
    """Computes what `Layer` does, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"map": nn.Linear(WIDTH, WIDTH)})

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.inner["map"](hidden))


def shared(*layers: nn.Module, inputs: Tensor | None = None) -> list[tuple[int, ...]]:
    """The stages of each template of a model whose stages are the given layers."""
    model = nn.Sequential(*layers)
    options = {"device": "cpu", "stage_bytes": 0}
    program = megatrain.trace(model, features() if inputs is None else inputs, megatrain_options=options)
    return [template.stages for template in program.templates]


def test_equal_layers_share_one_template() -> None:
    assert shared(Layer(), Layer(), Layer()) == [(0,), (1, 2)]  # the first needs no gradient of its input
    assert shared(Layer(), Layer(), Layer(), inputs=features().requires_grad_()) == [(0, 1, 2)]


def test_names_and_classes_do_not_matter() -> None:
    assert shared(Layer(), Layer(), Renamed(), Layer()) == [(0,), (1, 2, 3)]


def frozen(layer: nn.Module, name: str) -> nn.Module:
    layer.get_parameter(name).requires_grad_(False)
    return layer


def doubled(hidden: Tensor) -> Tensor:
    return hidden * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Layer, lambda: Layer(torch.relu)),
        (Layer, lambda: Layer(bias=False)),
        (Layer, lambda: frozen(Layer(), "linear.bias")),
        (Layer, lambda: Layer(lambda hidden: torch.tanh(hidden) + 0)),
        (lambda: Layer(doubled), lambda: Layer(lambda hidden: hidden * 3)),
        (lambda: Layer(torch.Tensor.clone), lambda: Layer(ReversedGradient.apply)),
        (lambda: Layer(lambda h: h[:, :8].repeat(1, 2)), lambda: Layer(lambda h: h[:, 8:].repeat(1, 2))),
        (lambda: Layer(nn.Dropout(0.1)), lambda: Layer(nn.Dropout(0.2))),
        (lambda: nn.LayerNorm(WIDTH, eps=1e-5), lambda: nn.LayerNorm(WIDTH, eps=1e-6)),
    ],
    ids=["function", "bias", "frozen", "extra", "constant", "gradient", "slice", "dropout", "eps"],
)
def test_layers_that_differ_do_not_share(one: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> None:
    assert shared(one(), one(), other(), one(), other())[1:] == [(1, 3), (2, 4)]


def test_sliding_windows_do_not_share_with_full_attention() -> None:
    inputs = torch.randn(2, 8, WIDTH)
    assert shared(*(Block(window=window) for window in (2, 2, None, 2, None)), inputs=inputs)[1:] == [(1, 3), (2, 4)]
    model = Gpt(depth=4, dropout=0.0, windows=(2, None))
    pair = make_pair(lambda: Gpt(depth=4, dropout=0.0, windows=(2, None)))
    assert len(list(model.blocks)) == 4
    pair.step(torch.randint(32, (2, 8)))


def test_buffers_belong_to_their_layer_although_the_template_is_shared() -> None:
    assert shared(*(BufferedLayer(factor) for factor in (1.0, 2.0, 3.0)))[1:] == [(1, 2)]
    pair = make_pair(lambda: nn.Sequential(*(BufferedLayer(factor) for factor in (1.0, 2.0, 3.0))))
    pair.step(features())


def test_training_mode_matters() -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(4)]
    layers[2].eval()
    assert shared(*layers)[1:] == [(1, 3), (2,)]


def test_dtypes_and_shapes_matter() -> None:
    class Casting(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(hidden.to(self.linear.weight.dtype)).float()

    kinds = (torch.float32, torch.float32, torch.float64, torch.float32, torch.float64)
    assert shared(*map(Casting, kinds))[1:] == [(1, 3), (2, 4)]
    widths = [nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    assert shared(*widths)[2:] == [(2,), (3, 4)]


def test_units_that_depend_on_values_stay_python_and_say_why() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(hidden) if hidden.sum().item() > 0 else hidden

    options: dict[str, Any] = {"device": "cpu", "stage_bytes": 0}
    model = nn.Sequential(Deciding(), Layer(), Deciding())
    templates = megatrain.trace(model, features(), megatrain_options=options).templates
    assert [template.stages for template in templates] == [(0,), (1,), (2,)]
    assert [template.joint is None for template in templates] == [True, False, True]
    assert templates[0].reason
    assert "stays Python" in str(templates[0])


def test_tensor_constants_matter() -> None:
    def scaled(values: Tensor) -> Layer:
        return Layer(lambda hidden: hidden * values)

    one, other = torch.ones(WIDTH), torch.full((WIDTH,), 2.0)
    assert shared(scaled(one), scaled(one), scaled(other), scaled(one), scaled(other))[1:] == [(1, 3), (2, 4)]
    pair = make_pair(lambda: nn.Sequential(*(scaled(values) for values in (one, one, other, one))))
    pair.step(features())


def test_a_template_prints_as_code() -> None:
    program = megatrain.trace(nn.Sequential(Layer(), Layer()), features(), megatrain_options={"device": "cpu"})
    assert "T0: stages" in str(program.templates[0])
    assert "torch.ops.aten" in str(program.templates[0])
