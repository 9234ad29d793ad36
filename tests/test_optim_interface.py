"""Overlapped optimizers as PyTorch's: groups, schedulers, hooks, closures, and any gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from optimizer_training import (
    build,
    compiled,
    loss_of,
    modes,
    needs_aten_fma,
    one_torch_thread,  # noqa: F401  a fixture
    train,
)

optim = megatrain.optim

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


@needs_aten_fma
@modes
def test_groups_schedulers_and_hooks(options: dict[str, Any]) -> None:
    model, eager = compiled(), build()
    calls: list[str] = []

    def groups(of: nn.Module) -> list[dict[str, Any]]:
        decayed = [p for p in of.parameters() if p.ndim > 1]
        return [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [p for p in of.parameters() if p.ndim == 1], "lr": 0.02},
        ]

    mine = optim.AdamW(model, groups(model), lr=0.01, **options)
    theirs = torch.optim.AdamW(groups(eager), lr=0.01, fused=True)
    mine.register_step_pre_hook(lambda *_: calls.append("before"))
    mine.register_step_post_hook(lambda *_: calls.append("after"))
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, 0.02, total_steps=8) for each in (mine, theirs)]
    for step in range(6):
        for each, optimizer, scheduler in zip((model, eager), (mine, theirs), schedulers, strict=True):
            loss_of(each, step).backward()
            if optimizer is theirs and "max_grad_norm" in options:
                torch.nn.utils.clip_grads_with_norm_(eager.parameters(), 0.1, torch.tensor(mine.grad_norm))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    mine.synchronize()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), eager.parameters(), strict=True))
    assert calls == ["before", "after"] * 6
    assert "weight_decay: 0.1" in repr(mine)


@needs_aten_fma
@pytest.mark.parametrize("during_backward", [True, False])
def test_parameters_may_join_later(during_backward: bool) -> None:
    model, eager = compiled(), build()
    mine = optim.AdamW(model, list(model[0].parameters()), lr=0.01, during_backward=during_backward)
    theirs = torch.optim.AdamW(eager[0].parameters(), lr=0.01, fused=True)
    for unit in (1, 3, 4):
        steps = range(2 * unit, 2 * unit + 2)
        train(model, mine, steps, serial=True)
        train(eager, theirs, steps)
        for each, optimizer in ((model, mine), (eager, theirs)):
            for parameter in each.parameters():
                parameter.grad = None
            optimizer.add_param_group({"params": list(each[unit].parameters()), "lr": 0.05})
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), eager.parameters(), strict=True))
    assert [len(group["params"]) for group in mine.param_groups] == [2] * 4


@needs_aten_fma
def test_closures() -> None:
    model, eager = compiled(), build()
    mine, theirs = optim.AdamW(model, lr=0.01), torch.optim.AdamW(eager.parameters(), lr=0.01, fused=True)
    for step in range(3):
        losses = []
        for each, optimizer in ((model, mine), (eager, theirs)):

            def closure(each: nn.Module = each, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(each, step)
                loss.backward()
                return loss

            losses.append(optimizer.step(closure))
        assert torch.equal(*losses)


@needs_aten_fma
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_not_the_stores(set_to_none: bool) -> None:
    """Set by the user, left from an earlier pass, or missing."""
    model, eager = compiled(), build()
    mine = optim.AdamW(model, lr=0.01, during_backward=False)
    theirs = torch.optim.AdamW(eager.parameters(), lr=0.01, fused=True)
    for step in range(4):
        for each, optimizer in ((model, mine), (eager, theirs)):
            loss_of(each, step).backward()
            first, second, *_ = each.parameters()
            first.grad = None if step == 1 else torch.full_like(first, 0.5)
            second.grad.add_(1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
        mine.synchronize()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), eager.parameters(), strict=True))
    steps = [int(mine.state[parameter]["step"]) for parameter in model.parameters()]
    assert steps[:2] == [3, 4]
