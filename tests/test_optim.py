"""Overlapped optimizers against torch.optim and against their own serial order, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from megatrain_fx.extension import runtime as native
from megatrain_fx.optim.processors import available_cores
from models import EXAMPLES, Example, example, scalar_loss

optim = megatrain.optim
WIDTH = 64  # whole vectors for ATen, whose last, incomplete vector is computed with other roundings
ATEN_FUSES_MULTIPLY_ADD = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
needs_aten_fma = pytest.mark.skipif(not ATEN_FUSES_MULTIPLY_ADD, reason="ATen runs without fused multiply-add")
MODES: dict[str, dict[str, Any]] = {
    "during backward": {},
    "after backward": {"during_backward": False},
    "clipped": {"max_grad_norm": 0.1},
}
modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Keeps ATen from dividing a tensor into ranges that end inside a vector."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(dtype)


def compiled(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    return megatrain.compile(build(dtype), device="cpu", stage_bytes=0, slots=2, **options)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(step, dtype)).float().square().mean() * 10


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, serial: bool = False) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        if serial:
            optimizer.synchronize()
        optimizer.zero_grad()


def equal_bits(one: Tensor, other: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(integer), other.view(integer))


def values(optimizer: optim.StageOptimizer) -> list[Tensor]:
    """All parameters and all their state."""
    optimizer.synchronize()
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found += [parameter.detach(), *(state[key] for key in sorted(state) if key != "step")]
    return found


def assert_equal(one: optim.StageOptimizer, other: optim.StageOptimizer) -> None:
    pairs = list(zip(values(one), values(other), strict=True))
    assert all(equal_bits(*pair) for pair in pairs)
    steps = [[state["step"] for state in each.state.values()] for each in (one, other)]
    assert steps[0] == steps[1]


def master_of(optimizer: optim.StageOptimizer, parameter: Tensor) -> Tensor:
    """The float32 number whose rounded upper half a bfloat16 parameter is."""
    optimizer.synchronize()
    bits = parameter.detach().view(torch.int16).to(torch.int64) << 16
    return (bits + optimizer.state[parameter]["remainder"]).to(torch.int32).view(torch.float32)


# Against torch.optim


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


# Overlapped and serial order


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


def test_a_gate_is_closed_while_its_region_is_updated() -> None:
    model = compiled()
    optimizer = optim.AdamW(model, during_backward=False)
    loss_of(model, 0).backward()
    store = model.__dict__["_megatrain"].store
    pool, blocker = optimizer.queue.pool, torch.zeros(2**24)
    large = native.NormTask(blocker.view(torch.uint8), pool)
    large.set_segments([(0, 2**24, torch.float32)] * 40)
    optimizer.queue.submit(-1, large, native.Gate())
    optimizer.step()
    closed = [not store.gate(region.index).is_open for region in store.layout.regions]
    pending = optimizer.queue.pending
    optimizer.synchronize()
    assert pending == len(closed) + 1, "the blocker ended before step() returned"
    assert all(closed)
    assert all(store.gate(region.index).is_open for region in store.layout.regions)


# Clipping


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


# State


@modes
@pytest.mark.parametrize(
    ("precision", "first"), [("fp32", "model"), ("bf16-split", "model"), ("bf16-split", "optimizer"), ("bf16", "model")]
)
def test_training_resumes_to_the_bit(tmp_path: Any, options: dict[str, Any], first: str, precision: Any) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    stochastic = {"stochastic_rounding": precision == "bf16"}
    model = compiled(dtype, precision=precision)
    optimizer = optim.AdamW(model, lr=0.01, **options, **stochastic)
    train(model, optimizer, range(3))
    optimizer.synchronize()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    train(model, optimizer, range(3, 6))
    torch.manual_seed(99)
    again = compiled(dtype, precision=precision)
    resumed = optim.AdamW(again, lr=0.5, **options, **stochastic)
    saved = torch.load(tmp_path / "checkpoint.pt")
    parts = {"model": again, "optimizer": resumed}
    for part in (first, *(parts.keys() - {first})):
        parts[part].load_state_dict(saved[part])
    train(again, resumed, range(3, 6))
    assert_equal(resumed, optimizer)


def test_a_state_is_loaded_into_a_running_optimizer() -> None:
    model = compiled(torch.bfloat16)
    optimizer = optim.AdamW(model, lr=0.01)
    train(model, optimizer, range(2))
    optimizer.synchronize()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    state["state"] = {
        k: {n: torch.clone(v) if torch.is_tensor(v) else v for n, v in s.items()} for k, s in state["state"].items()
    }
    train(model, optimizer, range(2, 4))
    expected = [value.clone() for value in values(optimizer)]
    optimizer.synchronize()
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 4))
    assert all(equal_bits(*pair) for pair in zip(values(optimizer), expected, strict=True))


@needs_aten_fma
def test_the_state_of_torch_adamw_is_taken_over() -> None:
    eager = build()
    theirs = torch.optim.AdamW(eager.parameters(), lr=0.01, fused=True)
    train(eager, theirs, range(3))
    model = compiled()
    mine = optim.AdamW(model, lr=0.5)
    mine.load_state_dict(theirs.state_dict())
    model.load_state_dict(eager.state_dict())
    train(model, mine, range(3, 5))
    train(eager, theirs, range(3, 5))
    mine.synchronize()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), eager.parameters(), strict=True))
    back = torch.optim.AdamW(eager.parameters(), lr=0.5)
    back.load_state_dict(mine.state_dict())
    train(eager, back, range(5, 6))


def test_a_modified_parameter_loses_its_remainder() -> None:
    model = compiled(torch.bfloat16)
    optimizer = optim.AdamW(model, lr=0.01)
    train(model, optimizer, range(2))
    optimizer.synchronize()
    changed, kept = list(model.parameters())[:2]
    kept_before = master_of(optimizer, kept)
    with torch.no_grad():
        changed.fill_(0.5)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, range(2, 3))
    assert bool((master_of(optimizer, changed) == 0.5).all())
    assert torch.equal(master_of(optimizer, kept), kept_before)


def test_wrong_states_are_refused() -> None:
    model = compiled()
    optimizer = optim.AdamW(model)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "params": [0]}]})
    with pytest.raises(megatrain.ConfigError, match=r"loaded exp_avg of parameter 0\.weight has shape \[3\]"):
        optimizer.load_state_dict({**state, "state": {0: {"step": 1, "exp_avg": torch.zeros(3)}}})


def test_host_memory_of_split_bfloat16_is_14_bytes_a_parameter() -> None:
    model = megatrain.compile(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).bfloat16(), device="cpu")
    optimizer = optim.AdamW(model)
    model(torch.randn(2, 256).bfloat16()).float().sum().backward()
    optimizer.step()
    optimizer.synchronize()
    store = model.__dict__["_megatrain"].store
    regions = [region.index for region in store.layout.regions]
    memories = [optimizer._steps.states.memory(store, region) for region in regions]
    state = sum(part.size for memory in memories for part in memory._memory.values())
    weights = sum(region.bytes for region in store.layout.regions)
    gradients = sum(store.gradient_bytes(region) for region in regions)
    assert (state + weights + gradients) / sum(p.numel() for p in model.parameters()) <= 14.05


# As a torch.optim.Optimizer


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


def test_narrowing_leaves_parameters_without_gradient_alone() -> None:
    model = compiled()
    optimizer = optim.AdamW(model, lr=0.1)
    train(model, optimizer, range(1))
    optimizer.synchronize()
    before = [value.clone() for value in values(optimizer)]
    optimizer.begin_backward([name for name, _ in model.named_parameters()])
    layout = model.__dict__["_megatrain"].store.layout
    for region in layout.regions:
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


# Refusals


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


def test_the_number_of_cores(tmp_path: Any) -> None:
    assert 1 <= available_cores() <= 4096
    for number in range(64):
        directory = tmp_path / f"cpu{number}" / "topology"
        directory.mkdir(parents=True)
        (directory / "physical_package_id").write_text("0\n")
        (directory / "core_id").write_text("7\n")
    assert available_cores(tmp_path, tmp_path / "missing") == 1, "threads of one core count once"
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_cores(quota=tmp_path / "cpu.max") == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(quota=tmp_path / "cpu.max") == available_cores(quota=tmp_path / "missing")


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
