"""What overlapped optimizers refuse, and that they go on after a failure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from megatrain_fx.extension import runtime as native
from megatrain_fx.optim.processors import available_processors
from optimizer_training import (
    WIDTH,
    build,
    compiled,
    loss_of,
    one_torch_thread,  # noqa: F401  a fixture
    train,
)

optim = megatrain.optim

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


def test_a_second_backward_pass_before_the_step_is_refused() -> None:
    model = compiled()
    optimizer = optim.AdamW(model, lr=0.01)
    loss_of(model, 0).backward()
    with pytest.raises(megatrain.OptimizerError, match="backward pass 2 since the last .*accumulation_steps=N"):
        loss_of(model, 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(2, 4))
    assert {state["step"] for state in optimizer.state.values()} == {3}


def test_changes_after_the_update_are_refused() -> None:
    model = compiled()
    optimizer = optim.AdamW(model, lr=0.01)
    loss_of(model, 0).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(megatrain.OptimizerError, match=r"gradient of 0\.weight was changed between .*max_grad_norm"):
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(megatrain.OptimizerError, match=r"lr of parameter group 0 \(from 0\.01 to 0\.5\) was changed"):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, range(2, 3))
    assert {state["step"] for state in optimizer.state.values()} == {3}


def test_a_failed_update_is_raised() -> None:
    model = compiled()
    optimizer = optim.AdamW(model)
    closed = native.UpdateQueue(1)
    closed.close()
    norm = native.NormTask(torch.zeros(4, dtype=torch.uint8), closed.pool)
    optimizer.queue.submit(
        0, native.SubmitTask(closed, 0, norm, native.Gate()), native.Gate(), "the update of weights.0"
    )
    with pytest.raises(megatrain.ExecutionError, match=r"the update of weights\.0 failed"):
        optimizer.synchronize()
    train(model, optimizer, range(1))


def test_a_failed_backward_pass_leaves_the_optimizer_usable() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: Tensor) -> Tensor:
            hidden.register_hook(self.check) if hidden.requires_grad else None
            return self.linear(hidden)

        fails = False

        def check(self, gradient: Tensor) -> None:
            if Fragile.fails:
                raise ValueError("planned")

    torch.manual_seed(0)
    model = megatrain.compile(nn.Sequential(*(Fragile() for _ in range(4))), device="cpu", stage_bytes=0)
    optimizer = optim.AdamW(model, lr=0.01)
    train(model, optimizer, range(1))
    Fragile.fails = True
    with pytest.raises(ValueError, match="planned"):
        loss_of(model, 1).backward()
    Fragile.fails = False
    optimizer.zero_grad()
    train(model, optimizer, range(2, 4))
    assert {state["step"] for state in optimizer.state.values()} <= {3, 4}
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_one_optimizer_a_model() -> None:
    model = compiled()
    optimizer = optim.AdamW(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(megatrain.ConfigError, match="has an optimizer already, a AdamW"):
        optim.SGD(model)
    train(model, optimizer, range(2))
    del optimizer, scheduler
    other = optim.SGD(model, lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, other, range(2))
    other.synchronize()
    assert not any(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(state["step"] == 2 for state in other.state.values())


def test_refusals() -> None:
    with pytest.raises(megatrain.ConfigError, match="Sequential is not a compiled model"):
        optim.AdamW(build())
    with pytest.raises(megatrain.ConfigError, match="generator is not a compiled model"):
        optim.AdamW(build().parameters())  # type: ignore[arg-type]
    with pytest.raises(megatrain.ConfigError, match="not one of this Sequential's"):
        optim.AdamW(compiled(), [nn.Parameter(torch.zeros(3))])
    with pytest.raises(megatrain.ConfigError, match=r"0\.weight is torch\.float64; megatrain\.optim updates"):
        optim.AdamW(compiled(torch.float64))
    with pytest.raises(megatrain.ConfigError, match=r"0\.weight is bfloat16: convert with model\.float\(\)"):
        optim.AdamW(compiled(torch.bfloat16, precision="fp32"))
    for options, text in (
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, "betas="),
        ({"eps": -1e-8}, "eps="),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0"),
        ({"accumulation_steps": 0}, "accumulation_steps=0"),
        ({"threads": 0}, "threads=0"),
        ({"threads": True}, "threads=True"),
        ({"stochastic_rounding": True}, "precision='auto'"),
    ):
        with pytest.raises(megatrain.ConfigError, match=text):
            optim.AdamW(compiled(), **options)
    with pytest.raises(megatrain.ConfigError, match="nesterov=True needs momentum"):
        optim.SGD(compiled(), nesterov=True)
    with pytest.raises(TypeError, match="unknown option 'amsgrad'"):
        optim.AdamW(compiled(), amsgrad=True)  # type: ignore[call-arg]


def test_a_gradient_without_a_store_is_refused() -> None:
    model = compiled()
    optimizer = optim.AdamW(model)
    optimizer.step()
    next(model.parameters()).grad = torch.zeros(WIDTH, WIDTH)
    with pytest.raises(megatrain.OptimizerError, match="was never called"):
        optimizer.step()


def test_an_optimizer_is_not_copied() -> None:
    with pytest.raises(TypeError, match="keep its state_dict"):
        copy.deepcopy(optim.AdamW(compiled()))


def test_the_number_of_processors(tmp_path: Any) -> None:
    assert 1 <= available_processors() <= 4096
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_processors(quota=tmp_path / "cpu.max") == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_processors(quota=tmp_path / "cpu.max") == available_processors(quota=tmp_path / "missing")


def test_a_gradient_scaler_needs_updates_after_the_backward_pass() -> None:
    model = compiled()
    optimizer, scaler = optim.SGD(model, lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(megatrain.OptimizerError, match="GradScaler .*during_backward=False"):
        scaler.step(optimizer)


def test_a_step_cannot_be_skipped_after_its_updates() -> None:
    model = compiled()
    optimizer = optim.AdamW(model, lr=0.01)
    loss_of(model, 0).backward()
    with pytest.raises(megatrain.OptimizerError, match="cannot be skipped.*during_backward=False"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
