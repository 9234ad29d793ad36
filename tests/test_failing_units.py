"""A unit that fails, forward, backward or when it is rerun: the user sees the own exception, and nothing is lost."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from comparison import WIDTH, Pair, features, make_pair
from models import scalar_loss


class Interrupted(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


class FailingGradient(torch.autograd.Function):
    """Identity whose backward raises what the unit holds."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, unit: Fragile) -> Tensor:
        context.unit = unit
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if context.unit.backward_error is not None:
            raise context.unit.backward_error
        return gradient, None


class Fragile(nn.Module):
    """A unit that fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.forward_error: BaseException | None = None
        self.backward_error: BaseException | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.forward_error is not None:
            raise self.forward_error
        return FailingGradient.apply(self.norm(self.linear(hidden)), self)


def fragile() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Fragile(), nn.Linear(WIDTH, WIDTH))


CONFIGURATIONS = ({"slots": 1}, {"slots": 2, "chaos": 0}, {"slots": 3, "stage_bytes": 2**30})


ERRORS = (ValueError("of the user"), KeyboardInterrupt(), Interrupted())


@pytest.fixture(params=CONFIGURATIONS, ids=str)
def pair(request: pytest.FixtureRequest) -> Pair:
    return make_pair(fragile, **request.param)


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_failing_forward(pair: Pair, error: BaseException) -> None:
    pair.step(features())
    pair.compiled[1].forward_error = error
    with pytest.raises(type(error)) as caught:
        pair.compiled(features(seed=2))
    assert caught.value is error
    assert "raise self.forward_error" in "".join(traceback.format_exception(caught.value))
    pair.check()
    pair.compiled[1].forward_error = None
    pair.step(features(seed=3))


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_failing_backward_after_zero_grad(pair: Pair, error: BaseException) -> None:
    pair.step(features())
    for model in pair.both:
        model.zero_grad()
        model[1].backward_error = error
        with pytest.raises(type(error)) as caught:
            scalar_loss(model(features(seed=2))).backward()
        assert "raise context.unit.backward_error" in "".join(traceback.format_exception(caught.value))
        model[1].backward_error = None
    assert all(parameter.grad is None for parameter in pair.compiled.parameters()), "none of it may be half home"
    for model in pair.both:
        model.zero_grad()
    for seed in range(2):
        pair.step(features(seed=seed))


def test_failing_backward_harms_no_weights(pair: Pair) -> None:
    pair.step(features())
    before = {name: tensor.clone() for name, tensor in pair.compiled.named_parameters()}
    pair.compiled[1].backward_error = ValueError("of the user")
    loss = scalar_loss(pair.compiled(features(seed=2)))
    with pytest.raises(ValueError, match="of the user"):
        loss.backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in pair.compiled.named_parameters())


def test_failing_rerun() -> None:
    """The unit works in the forward pass and fails when the backward pass reruns it."""
    pair = make_pair(fragile, chaos=0)
    pair.step(features())
    loss = scalar_loss(pair.compiled(features(seed=2)))
    pair.compiled[1].forward_error = ValueError("of the user")
    with pytest.raises(ValueError, match="of the user"):
        loss.backward()
    pair.compiled[1].forward_error = None
    pair.eager(features(seed=2))
    for model in pair.both:
        model.zero_grad()
    pair.step(features(seed=3))


def test_failure_in_the_first_call_leaves_a_usable_model() -> None:
    pair = make_pair(fragile)
    pair.compiled[1].forward_error = ValueError("of the user")
    with pytest.raises((ValueError, megatrain.CaptureError), match="of the user") as caught:
        pair.compiled(features())
    message = "".join(traceback.format_exception(caught.value))
    assert "raise self.forward_error" in message
    assert "ValueError" in message
    pair.compiled[1].forward_error = None
    pair.step(features())
