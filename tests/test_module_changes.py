"""Changes to a model after it was compiled: hooks, replaced parts, changed constants; each is followed or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from architectures import MultilayerPerceptron
from comparison import WIDTH, Pair, features, make_pair, perceptron
from models import example


class Custom(nn.Module):
    """A model with a method, a plain attribute, a property and buffers of both kinds."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.scale = scale
        self.register_buffer("offset", torch.ones(WIDTH))
        self.register_buffer("passing", torch.zeros(WIDTH), persistent=False)

    @property
    def width(self) -> int:
        return self.first.in_features

    def features(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) * self.scale + self.offset

    def forward(self, inputs: Tensor, key: str = "a") -> Tensor:
        """Documented."""
        return self.layers[key](self.features(inputs)) + self.passing


def stepped(build: Callable[[], nn.Module] = Custom, **options: Any) -> Pair:
    pair = make_pair(build, **options)
    pair.step(features())
    return pair


def test_hooks_of_the_model() -> None:
    pair = make_pair(perceptron)
    seen: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for model, gradients in zip(pair.both, seen, strict=True):
        model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        model.register_forward_hook(lambda _, args, output: output * args[0])
        model.register_full_backward_hook(lambda _, inner, outer, kept=gradients: kept.append((inner[0], outer[0])))
    inputs = features().requires_grad_()
    pair.step(inputs)
    for expected, actual in zip(*(found[0] for found in seen), strict=True):
        assert torch.equal(expected, actual)
    assert len(seen[0]) == len(seen[1])


@pytest.mark.parametrize("called", [False, True], ids=["before_the_first_call", "after_it"])
@pytest.mark.parametrize("part", [2, 1], ids=["unit", "glue"])
def test_forward_hooks_of_parts(part: int, called: bool) -> None:
    """A hook that changes a result counts, whenever it was registered, on a unit and on a module without parameters."""
    pair = stepped(perceptron) if called else make_pair(perceptron)
    handles = [model[part].register_forward_hook(lambda _, args, output: output * args[0]) for model in pair.both]
    pair.step(features())
    for handle in handles:
        handle.remove()
    pair.step(features())


def test_backward_hooks_of_units_change_gradients() -> None:
    pair = make_pair(perceptron)
    for model in pair.both:
        model[2].register_full_backward_hook(lambda _, inner, outer: (inner[0] * 2,))
        model[4].register_full_backward_pre_hook(lambda _, outer: (outer[0] * 3,))
    for seed in range(2):
        pair.step(features(seed=seed))


def test_observing_hooks_see_the_same_values() -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    seen: list[list[Tensor]] = [[], []]
    for model, kept in zip(pair.both, seen, strict=True):
        model[2].register_forward_hook(lambda _, args, output, kept=kept: kept.append(output.detach().clone()))
    pair.step(features(seed=2))
    assert all(torch.equal(seen[0][0], output) for output in seen[1])


def _step_or_refusal(pair: Pair, refusal: str | None) -> None:
    """The step equals eager's, or, where ``refusal`` is given, is refused with an error that names it."""
    try:
        pair.step(features(seed=3))
    except megatrain.MegatrainError as error:
        assert refusal is not None
        assert refusal in str(error)  # noqa: PT017


def test_replaced_parameter_is_followed_or_refused() -> None:
    pair = stepped()
    for model in pair.both:
        torch.manual_seed(5)
        model.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        model.zero_grad()
    _step_or_refusal(pair, "replaced")


def test_added_module_is_followed_or_refused() -> None:
    pair = stepped(perceptron)
    for model in pair.both:
        torch.manual_seed(5)
        model.append(nn.Linear(WIDTH, WIDTH))
        model.zero_grad()
    _step_or_refusal(pair, "added")


def test_replaced_buffers_are_followed() -> None:
    pair = stepped(lambda: nn.Sequential(example("layer_buffers").make_model(), example("glue_buffer").make_model()))
    for model in pair.both:
        model[0][1].factor = torch.full((WIDTH,), 5.0)
        model[1].norm.running_mean = torch.full((WIDTH,), 2.0)
    pair.step(features(seed=2))
    pair = stepped()
    for model in pair.both:
        model.offset = torch.full((WIDTH,), 3.0)
    pair.step(features(seed=2))


def test_changed_constants_of_units_are_followed() -> None:
    pair = stepped(lambda: nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 8) for _ in range(2))))
    for model in pair.both:
        model[0].dropout.p = 0.9
        model[1].norm_first = True
    pair.step(features())


@pytest.mark.parametrize("change", ["attribute", "dropout"])
def test_changed_constants_of_the_glue_are_followed(change: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.dropout = nn.Dropout(0.1)
            self.scale = 1.0

        def forward(self, inputs: Tensor) -> Tensor:
            return self.dropout(self.layer(inputs)) * self.scale

    pair = stepped(Scaled)
    for model in pair.both:
        if change == "attribute":
            model.scale = 3.0
        else:
            model.dropout.p = 0.9
    pair.step(features(seed=2))


def test_training_flag_of_a_part() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))

    pair = make_pair(build)
    for part in (1, 2, 3, 1):
        for model in pair.both:
            model[part].train(not model[part].training)
        pair.step(features())


def test_conversion_after_compile_is_refused_with_a_remedy() -> None:
    model = stepped(MultilayerPerceptron).compiled
    with pytest.raises(megatrain.ModelDeviceError, match="before"):
        model.double()(features().double())
