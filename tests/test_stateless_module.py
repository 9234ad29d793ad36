"""A module called with other tensors: shared modules, tied parameters and replaced buffers come out as they went in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatrain_fx.stateless_module import StatelessModule


class Shared(nn.Module):
    """One layer under two names, and its weight in another module too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3))
        self.second = self.first
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first[0].weight
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.tied(self.second(self.first(inputs)))


def test_every_place_is_exchanged_and_restored() -> None:
    model, other = Shared(), Shared()
    originals = dict(model.named_parameters())
    inputs = torch.randn(2, 3)
    expected = other(inputs)
    result = StatelessModule(model)(dict(other.named_parameters()), (inputs,))
    assert torch.equal(result, expected)
    assert all(parameter is originals[name] for name, parameter in model.named_parameters())
    assert model.second[0].weight is model.first[0].weight is model.tied.weight


def test_gradients_reach_the_given_tensors() -> None:
    model = Shared()
    inputs = torch.randn(2, 3)
    state = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    StatelessModule(model)(state, (inputs,)).sum().backward()
    model(inputs).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(state[name].grad, parameter.grad), name


def test_a_replaced_buffer_is_replaced_in_the_state_only() -> None:
    model = Shared()
    state = {"count": torch.tensor(5.0)}
    StatelessModule(model)(state, (torch.randn(2, 3),))
    assert state["count"] == 6
    assert model.count == 0


def test_arguments_by_name() -> None:
    model = Shared()
    inputs = torch.randn(2, 3)
    assert torch.equal(StatelessModule(model)({}, (), {"inputs": inputs}), model(inputs))
