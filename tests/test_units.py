"""Units: which modules of a model are units."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from megatrain_fx.units import find_units


def _paths(model: nn.Module) -> list[str]:
    units = find_units(model)
    for unit in units:
        assert model.get_submodule(unit.path) is unit.module
    return [unit.path for unit in units]


def _module(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def test_elements_of_outermost_lists() -> None:
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
    model = _module(embedding=nn.Embedding(3, 2), layers=nn.ModuleList([block, nn.ReLU(), nn.Linear(2, 2)]))
    assert _paths(model) == ["embedding", "layers.0", "layers.2"]


def test_root_that_is_a_list() -> None:
    assert _paths(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))) == ["0", "2"]
    assert _paths(nn.ModuleList([nn.Linear(2, 2)])) == ["0"]


def test_parameters_of_the_root_belong_to_no_unit() -> None:
    assert _paths(nn.Linear(2, 2)) == []
    assert _paths(nn.MultiheadAttention(4, 2)) == ["out_proj"]


def test_module_that_owns_parameters_is_one_unit_with_its_children() -> None:
    assert _paths(_module(attention=nn.MultiheadAttention(4, 2), body=_module(norm=nn.LayerNorm(2)))) == [
        "attention",
        "body.norm",
    ]


def test_lists_in_lists_have_no_forward_and_are_looked_into() -> None:
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
    assert _paths(_module(pairs=pairs)) == ["pairs.0.0", "pairs.0.1", "pairs.1.0", "pairs.1.1"]
    body = nn.ModuleDict({"embedding": nn.Embedding(3, 2), "blocks": nn.ModuleList([nn.Linear(2, 2)])})
    assert _paths(_module(body=body)) == ["body.embedding", "body.blocks.0"]


def test_shared_module_is_one_unit_under_its_first_name() -> None:
    shared = nn.Linear(2, 2)
    assert _paths(_module(first=shared, layers=nn.ModuleList([nn.ReLU(), shared, shared]))) == ["first"]


def test_parameter_lists_belong_to_their_owner() -> None:
    owner = _module(scales=nn.ParameterList([torch.ones(2)]), layer=nn.Linear(2, 2))
    assert _paths(owner) == ["layer"]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(2)])
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.scales[0]

    assert _paths(_module(scaled=Scaled())) == ["scaled"]


def test_parametrized_module_is_one_unit() -> None:
    assert _paths(_module(layer=parametrizations.weight_norm(nn.Linear(2, 2, bias=False)))) == ["layer"]
    assert _paths(parametrizations.weight_norm(nn.Linear(2, 2))) == []


def test_modules_without_parameters_are_no_units() -> None:
    assert _paths(_module(dropout=nn.Dropout(), layers=nn.Sequential(nn.ReLU()))) == []
