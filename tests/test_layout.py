"""The layout: every parameter has one place, aligned, apart from others, in the region of the stages that use it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatrain_fx as megatrain
from comparison import features
from megatrain_fx.layout import ALIGNMENT, Layout, align, plan_layout
from models import EXAMPLES, Example, example


def traced_layout(entry: Example, **options: object) -> tuple[nn.Module, Layout]:
    model = entry.make_model()
    args, kwargs = entry.make_inputs()
    return model, megatrain.trace(model, *args, megatrain_options={"device": "cpu", **options}, **kwargs).layout


@pytest.mark.parametrize("entry", EXAMPLES, ids=str)
def test_every_parameter_has_one_place_of_its_own(entry: Example) -> None:
    model, layout = traced_layout(entry, stage_bytes=2500)
    parameters = dict(model.named_parameters())
    names = [place.name for region in layout.regions for place in region.places]
    assert sorted(names) == sorted(parameters)
    for region in layout.regions:
        end = 0
        for place in region.places:
            parameter = parameters[place.name]
            assert (place.shape, place.dtype) == (tuple(parameter.shape), parameter.dtype)
            assert place.offset % ALIGNMENT == 0
            assert place.offset >= end
            end = place.offset + parameter.numel() * parameter.element_size()
        assert end <= region.bytes < end + ALIGNMENT


@pytest.mark.parametrize("entry", [example("odd_parameters"), example("mixed_dtype"), example("convolution")], ids=str)
def test_views_give_back_values_and_strides(entry: Example) -> None:
    model, layout = traced_layout(entry)
    for name, parameter in model.named_parameters():
        place = layout.places[name]
        flat = torch.zeros(layout.regions[place.region].bytes, dtype=torch.uint8)
        view = place.view(flat)
        with torch.no_grad():
            view.copy_(parameter)
        assert torch.equal(view, parameter)
        assert view.stride() == torch.empty_like(parameter).stride()


def test_dtypes_and_frozen_parameters_are_apart() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3), nn.LayerNorm(3))
    model[2].requires_grad_(False)
    (region,) = plan_layout(model, [list(model.parameters())]).regions
    kinds = [(not model.get_parameter(place.name).requires_grad, str(place.dtype)) for place in region.places]
    assert len(set(kinds)) == sum(1 for one, other in zip([None, *kinds], kinds, strict=False) if one != other)
    assert kinds == sorted(kinds, key=lambda kind: kind[0])
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [place.offset for place in region.places if place.name not in trainable]
    assert region.gradient_bytes(trainable) <= min(frozen)
    assert region.gradient_bytes(()) == 0


def test_shared_parameters_lie_in_a_region_of_their_own() -> None:
    model, layout = traced_layout(example("gpt_tied"), stage_bytes=0)
    shared = layout.places["tokens.weight"]
    assert [place.name for place in layout.regions[shared.region].places] == ["tokens.weight"]
    assert "head.weight" not in layout.places
    assert model.head.weight is model.tokens.weight


def test_units_of_one_stage_share_a_region() -> None:
    _, apart = traced_layout(example("mlp"), stage_bytes=0)
    _, together = traced_layout(example("mlp"), stage_bytes=2**30)
    assert (len(apart.regions), len(together.regions)) == (4, 1)


def test_unused_parameters_have_a_place() -> None:
    _, layout = traced_layout(example("unused_parameter"), stage_bytes=0)
    assert {"never.weight", "never.bias", "first.spare"} <= set(layout.places)


def test_meta_and_real_models_have_one_layout() -> None:
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    real = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    options = {"device": "cpu", "stage_bytes": 0}
    layouts = [megatrain.trace(model, features(), megatrain_options=options).layout for model in (meta, real)]
    assert layouts[0] == layouts[1]


def test_text_names_every_parameter_with_its_offset() -> None:
    _, layout = traced_layout(example("mlp"), stage_bytes=0)
    assert "+1024       layers.0.bias float32[16]" in str(layout)
    assert str(layout).count("weights.") == 4


@pytest.mark.parametrize(("offset", "expected"), [(0, 0), (1, ALIGNMENT), (ALIGNMENT, ALIGNMENT), (ALIGNMENT + 1, 512)])
def test_align(offset: int, expected: int) -> None:
    assert align(offset) == expected
