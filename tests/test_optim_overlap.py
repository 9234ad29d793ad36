"""Overlapped updates against the serial order, bit for bit, and when they run."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from megatrain_fx.extension import runtime as native
from models import EXAMPLES, Example, example, scalar_loss
from optimizer_training import (
    WIDTH,
    assert_equal,
    batch,
    build,
    compiled,
    loss_of,
    master_of,
    modes,
    one_torch_thread,  # noqa: F401  a fixture
    train,
    values,
)

optim = megatrain.optim

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


@modes
@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (optim.AdamW, "fp32"),
        (optim.AdamW, "bf16-split"),
        (optim.AdamW, "bf16"),
        (optim.AdamW, "bf16 stochastic"),
        (optim.SGD, "bf16-split"),
        (optim.Lion, "bf16-split"),
    ],
)
def test_overlap_does_not_change_the_numbers(kind: Any, precision: str, options: dict[str, Any]) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    config = {"precision": precision.split()[0], "chaos": 3}
    extra = {"momentum": 0.9} if kind is optim.SGD else {}
    optimizers = []
    for serial in (False, True):
        torch.manual_seed(1)
        model = compiled(dtype, **config)
        given = {**options, "during_backward": False} if serial else options
        optimizer = kind(model, lr=1e-2, stochastic_rounding=precision.endswith("stochastic"), **extra, **given)
        train(model, optimizer, range(6), serial=serial)
        optimizers.append(optimizer)
    assert_equal(*optimizers)
    assert optimizers[0].grad_norm == optimizers[1].grad_norm


@pytest.mark.parametrize("entry", EXAMPLES, ids=str)
def test_the_zoo_is_the_same_overlapped_and_by_torch(entry: Example) -> None:
    """Odd sizes, mixed types, frozen and unused parameters, and such that several stages share.

    Torch's numbers are equal to rounding only, since ATen's last vector differs.
    """
    overlapped, serial = (megatrain.compile(entry.make_model(), device="cpu", stage_bytes=0) for _ in range(2))
    optimizers = [optim.AdamW(overlapped, lr=0.01), optim.AdamW(serial, lr=0.01, during_backward=False)]
    copies = {parameter: parameter.detach().float().clone() for parameter in serial.parameters()}
    theirs = torch.optim.AdamW(list(copies.values()), lr=0.01)
    for step in range(3):
        args, kwargs = entry.make_inputs(seed=step)
        for model, optimizer in zip((overlapped, serial), optimizers, strict=True):
            torch.manual_seed(step)
            scalar_loss(model(*args, **kwargs)).backward()
            if model is serial:
                for parameter, twin in copies.items():
                    twin.grad = None if parameter.grad is None else parameter.grad.float().clone()
            optimizer.step()
            optimizer.zero_grad()
        theirs.step()
    assert_equal(*optimizers)
    for parameter, twin in copies.items():
        state = optimizers[1].state.get(parameter, {})
        value = master_of(optimizers[1], parameter) if "remainder" in state else parameter.detach().float()
        assert torch.allclose(value, twin, rtol=1e-4, atol=1e-5)
        assert bool(state) == (twin in theirs.state)


@modes
def test_accumulation(options: dict[str, Any]) -> None:
    optimizers = []
    for given in (options, {**options, "during_backward": False}):
        model = compiled()
        optimizer = optim.AdamW(model, lr=0.01, accumulation_steps=3, **given)
        for step in range(4):
            for part in range(3 if step != 2 else 2):  # the last batch of an epoch may be short of one
                (loss_of(model, 10 * step + part) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizers.append(optimizer)
    assert_equal(*optimizers)
    assert optimizers[0].grad_norm == optimizers[1].grad_norm


def test_updates_run_during_the_backward_pass() -> None:
    model = compiled()
    optimizer = optim.AdamW(model, lr=0.1)
    loss_of(model, 0).backward()
    optimizer.synchronize()
    assert all(state["step"] == 1 for state in optimizer.state.values())
    after_backward = [parameter.detach().clone() for parameter in model.parameters()]
    assert not any(torch.equal(*pair) for pair in zip(after_backward, build().parameters(), strict=True))
    optimizer.step()
    optimizer.synchronize()
    assert all(torch.equal(*pair) for pair in zip(after_backward, model.parameters(), strict=True))


def test_step_returns_while_gates_are_closed() -> None:
    class Blocked(optim.SGD):
        def make_update(self, group: Any, **step: Any) -> native.Update:
            if self.queue.pending == 0:
                self.queue.submit(-1, self.blocker, native.Gate())
            return super().make_update(group, **step)

    model = compiled()
    optimizer = Blocked(model, lr=0.1, during_backward=False)
    optimizer.blocker = native.NormTask(torch.zeros(2**24).view(torch.uint8), optimizer.queue.pool)
    optimizer.blocker.set_segments([(0, 2**24, torch.float32)] * 40)
    loss_of(model, 0).backward()
    store = model.__dict__["_megatrain"].store
    regions = [region.index for region in store.layout.regions]
    optimizer.step()
    closed = [not store.gate(region).is_open for region in regions]
    pending = optimizer.queue.pending
    assert pending == len(regions) + 1, "the blocker ended before step() returned"
    assert all(closed)
    expected = build()
    train(expected, torch.optim.SGD(expected.parameters(), lr=0.1), range(1))
    with torch.no_grad():
        assert torch.equal(model(batch(1)), expected(batch(1))), "a forward pass waits for the updates"
    assert all(store.gate(region).is_open for region in regions)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READINGS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "parameters": lambda model: list(model.parameters()),
    "get_parameter": lambda model: [model.get_parameter(f"{k}.weight") for k in range(6)],
    "parameters of a module around it": lambda model: list(nn.ModuleList([model]).parameters()),
    "state_dict of a module around it": lambda model: list(nn.ModuleList([model]).state_dict().values()),
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "torch.save": lambda model: list(saved_and_loaded(model).parameters()),
}


@pytest.mark.parametrize("reading", READINGS)
def test_reading_all_parameters_waits_for_their_updates(reading: str) -> None:
    model = megatrain.compile(
        nn.Sequential(*(nn.Linear(900, 900, bias=False) for _ in range(6))), device="cpu", stage_bytes=0
    )
    optimizer = optim.AdamW(model, lr=0.1, threads=1, during_backward=False)
    model(torch.randn(2, 900)).square().mean().backward()
    optimizer.step()
    assert optimizer.queue.pending, "the updates ended before they could be waited for"
    found = [parameter.detach().clone() for parameter in READINGS[reading](model)]
    optimizer.synchronize()
    assert all(torch.equal(*pair) for pair in zip(found, model.parameters(), strict=True))


def test_narrowing_leaves_parameters_without_gradient_alone() -> None:
    model = compiled()
    optimizer = optim.AdamW(model, lr=0.1)
    train(model, optimizer, range(1))
    optimizer.synchronize()
    before = [value.clone() for value in values(optimizer)]
    optimizer.begin_backward([name for name, _ in model.named_parameters()])
    layout = model.__dict__["_megatrain"].store.layout
    for region in layout.regions:
        optimizer.narrow(region.index, [])  # no stage that was run until now gave it any
        optimizer.narrow(region.index, ["0.weight"])
        task = optimizer.update_task(region.index)
        assert task is not None
        task.run()
    optimizer.end_backward(["0.weight"])
    after = values(optimizer)
    assert [k for k, pair in enumerate(zip(before, after, strict=True)) if not torch.equal(*pair)] == [0, 1, 2]
    assert [state["step"] for state in optimizer.state.values()] == [2] + [1] * (len(optimizer.state) - 1)
    optimizer.step()


def test_parameters_without_gradient_are_left_alone_during_the_backward_pass() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.used = 0

        def forward(self, hidden: Tensor) -> Tensor:
            return self.layers[self.used](hidden)

    class Switches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Switch() for _ in range(2))

        def forward(self, hidden: Tensor) -> Tensor:
            for part in self.parts:
                hidden = part(hidden)
            return hidden

    torch.manual_seed(0)
    model = megatrain.compile(Switches(), device="cpu", stage_bytes=0)
    optimizer = optim.AdamW(model, lr=0.1)
    unused = [model.parts[0].layers[1].weight, model.parts[1].layers[1].weight]
    before = [parameter.detach().clone() for parameter in unused]
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    assert all(torch.equal(*pair) for pair in zip(before, unused, strict=True))
    assert not any(parameter in optimizer.state for parameter in unused)


def test_frozen_parameters() -> None:
    model = compiled()
    model[0].requires_grad_(False)
    optimizer = optim.AdamW(model, model.parameters(), lr=0.1)
    train(model, optimizer, range(2))
    optimizer.synchronize()
    assert torch.equal(model[0].weight, build()[0].weight)
    assert model[0].weight not in optimizer.state
    model[0].requires_grad_(True)
    train(model, optimizer, range(2, 4))
    optimizer.synchronize()
    assert not torch.equal(model[0].weight, build()[0].weight)
    assert optimizer.state[model[0].weight]["step"] == 2
    assert optimizer.state[model[1].weight]["step"] == 4


def test_a_shared_parameter_is_updated_once() -> None:
    entry = example("gpt_tied")
    model = megatrain.compile(entry.make_model(), device="cpu", stage_bytes=0)
    optimizer = optim.AdamW(model, lr=0.01)
    for step in range(3):
        args, kwargs = entry.make_inputs(seed=step)
        scalar_loss(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {state["step"] for state in optimizer.state.values()} == {3}
