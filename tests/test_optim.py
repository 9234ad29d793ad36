"""Overlapped optimizers against torch.optim, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megatrain_fx as megatrain
from optimizer_training import (
    assert_equal,
    build,
    compiled,
    equal_bits,
    loss_of,
    master_of,
    modes,
    needs_aten_fma,
    one_torch_thread,  # noqa: F401  a fixture
    train,
    values,
)

optim = megatrain.optim

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


@needs_aten_fma
@modes
@pytest.mark.parametrize("lr", [1e-3, 0.1])
def test_adamw_is_torch_fused_adamw(options: dict[str, Any], lr: float) -> None:
    model, eager = compiled(), build()
    mine = optim.AdamW(model, lr=lr, weight_decay=0.1, **options)
    theirs = torch.optim.AdamW(eager.parameters(), lr=lr, weight_decay=0.1, fused=True)
    for step in range(20):
        for each, optimizer in ((model, mine), (eager, theirs)):
            loss_of(each, step).backward()
            if optimizer is theirs and "max_grad_norm" in options:
                torch.nn.utils.clip_grads_with_norm_(eager.parameters(), 0.1, torch.tensor(float(mine.grad_norm or 0)))
            optimizer.step()
            optimizer.zero_grad()
            if optimizer is mine:
                mine.synchronize()
    for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert equal_bits(parameter.detach(), expected.detach())
        for key in ("exp_avg", "exp_avg_sq"):
            assert equal_bits(mine.state[parameter][key], theirs.state[expected][key])
        assert mine.state[parameter]["step"] == theirs.state[expected]["step"] == 20


@needs_aten_fma
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_is_torch_sgd(momentum: float, nesterov: bool) -> None:
    model, eager = compiled(), build()
    given = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.01, "nesterov": nesterov}
    mine, theirs = optim.SGD(model, **given), torch.optim.SGD(eager.parameters(), foreach=False, **given)
    train(model, mine, range(10), serial=True)
    train(eager, theirs, range(10))
    for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert equal_bits(parameter.detach(), expected.detach())
        assert ("momentum_buffer" in mine.state[parameter]) == (momentum != 0)


def test_lion_is_its_formula() -> None:
    """The program of the paper in float64: signs, and so steps, are equal except where the sum is almost zero."""
    model, eager = compiled(), build()
    mine = optim.Lion(model, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    averages = [torch.zeros_like(parameter) for parameter in eager.parameters()]
    for step in range(5):
        train(model, mine, range(step, step + 1), serial=True)
        loss_of(eager, step).backward()
        for parameter, average in zip(eager.parameters(), averages, strict=True):
            gradient = parameter.grad
            assert gradient is not None
            direction = (0.9 * average + 0.1 * gradient).sign()
            parameter.data.mul_(1 - 1e-3 * 0.1).sub_(1e-3 * direction)
            average.mul_(0.99).add_(0.01 * gradient)
        eager.zero_grad()
    for parameter, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=1e-5, atol=1e-6)


@needs_aten_fma
def test_split_bfloat16_follows_a_float32_master_for_100_steps() -> None:
    model = compiled(torch.bfloat16)
    mine = optim.AdamW(model, lr=1e-3, weight_decay=0.1)
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    theirs = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1, fused=True)
    start = [master.clone() for master in masters]
    for step in range(100):
        loss_of(model, step).backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        mine.step()
        mine.zero_grad()
        theirs.step()
    for parameter, master, before in zip(model.parameters(), masters, start, strict=True):
        assert equal_bits(master_of(mine, parameter), master)
        assert (parameter.float() - master).abs().max() <= master.abs().max() * 2**-8
        assert not torch.equal(master, before)


def test_the_norm_is_that_of_torch() -> None:
    model, eager = compiled(), build()
    optimizer = optim.AdamW(model, max_grad_norm=0.5)
    for step in range(3):
        for each in (model, eager):
            loss_of(each, step).backward()
        expected = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.synchronize()
        assert optimizer.grad_norm == pytest.approx(float(expected), rel=1e-5)
        after = [parameter.grad for parameter in model.parameters()]
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "gradients stay as they are"
        for parameter, other in zip(model.parameters(), eager.parameters(), strict=True):
            other.data.copy_(parameter.data)
            other.grad = None
        optimizer.zero_grad()


def test_a_norm_is_measured_again_if_a_gradient_was_changed() -> None:
    model = compiled()
    optimizer = optim.SGD(model, max_grad_norm=1e9)
    loss_of(model, 0).backward()
    first, second = list(model.parameters())[:2]
    assert first.grad is not None
    first.grad.mul_(3)
    second.grad = torch.full_like(second, 2.0)
    squares = sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters())
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(squares**0.5, rel=1e-12)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_without_a_finite_norm_is_skipped(bad: float) -> None:
    model, other = compiled(), compiled()
    optimizer, reference = (optim.AdamW(each, lr=0.1, max_grad_norm=1.0) for each in (model, other))
    for each, mine in ((model, optimizer), (other, reference)):
        train(each, mine, range(2))
    before = [value.clone() for value in values(optimizer)]
    (loss_of(model, 2) * bad).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(*pair) for pair in zip(before, values(optimizer), strict=True))
    for each, mine in ((model, optimizer), (other, reference)):
        train(each, mine, range(3, 5))
    assert optimizer.skipped_steps == 1
    assert_equal(optimizer, reference)
