"""A compiled model equals eager PyTorch bit for bit: the whole zoo, every slot count and stage size, training loops."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import megatrain_fx as megatrain
from comparison import WIDTH, Pair, features, make_pair, perceptron
from models import EXAMPLES, Example, example, scalar_loss, tensors

ONE_UNIT, SOME_UNITS, ALL_UNITS = 0, 2500, 2**30
CONFIGURATIONS = (
    {"slots": 1, "stage_bytes": ONE_UNIT, "chaos": 1},
    {"slots": 2, "stage_bytes": SOME_UNITS},
    {"slots": 3, "stage_bytes": ONE_UNIT, "slabs": 1, "chaos": 2},
)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd_foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=False),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


def example_pair(entry: Example, device: torch.device, **options: Any) -> Pair:
    return make_pair(entry.make_model, device, reused=entry.reused, **options)


def accumulate_and_compare(pair: Pair, entry: Example, seed: int) -> None:
    """Two batches, with gradients of the inputs too."""
    for draw in (seed, seed + 1):
        expected_inputs = entry.make_inputs(seed=draw, device=pair.device)
        actual_inputs = entry.make_inputs(seed=draw, device=pair.device)
        losses = []
        for model, (args, kwargs) in zip(pair.both, (expected_inputs, actual_inputs), strict=True):
            torch.manual_seed(draw)
            losses.append(scalar_loss(model(*args, **kwargs)))
            losses[-1].backward()
        assert torch.equal(*losses)
        for expected, actual in zip(tensors(expected_inputs), tensors(actual_inputs), strict=True):
            if expected.requires_grad:
                assert torch.equal(expected.grad, actual.grad)
        pair.check()


def _configured() -> list[Any]:
    """Every example with one slot and with three; those of several stages in a special order with two as well."""
    several = ("mlp", "gpt_tied", "encoder_decoder", "skip", "convolution", "shared_block", "unused_parameter")
    return [
        pytest.param(entry, options, id=f"{entry}-slots{options['slots']}")
        for entry in EXAMPLES
        for options in CONFIGURATIONS
        if options["slots"] != 2 or entry.name in several
    ]


@pytest.mark.parametrize(("entry", "options"), _configured())
def test_zoo(entry: Example, options: dict[str, Any], device: torch.device) -> None:
    pair = example_pair(entry, device, **options)
    args, kwargs = entry.make_inputs(seed=9, device=device)
    pair.forward(*args, **kwargs, seed=9)
    accumulate_and_compare(pair, entry, seed=1)
    for model in pair.both:
        model.zero_grad()
    accumulate_and_compare(pair, entry, seed=5)


@pytest.mark.parametrize(
    ("slots", "stage_bytes", "chaos"),
    list(itertools.product((1, 2, 3), (ONE_UNIT, SOME_UNITS, ALL_UNITS), (None, 0))),
)
def test_slots_stage_sizes_and_chaos(slots: int, stage_bytes: int, chaos: int | None) -> None:
    pair = make_pair(perceptron, slots=slots, stage_bytes=stage_bytes, chaos=chaos)
    for step in range(3):
        pair.step(features(seed=step))


@pytest.mark.parametrize(("slabs", "pin"), [(1, "register"), (2, "staging"), (5, "none")])
def test_slabs_and_pinning(slabs: int, pin: str, device: torch.device) -> None:
    pair = make_pair(perceptron, device, slabs=slabs, pin=pin, chaos=0)
    for step in range(2):
        pair.step(features(seed=step, device=device))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_made_before_or_after_compile(name: str, when: str) -> None:
    entry = example("mlp")
    eager, compiled = entry.make_model(), entry.make_model()
    optimizers = [OPTIMIZERS[name](eager.parameters())]
    if when == "before":
        optimizers.append(OPTIMIZERS[name](compiled.parameters()))
    pair = Pair(eager, megatrain.compile(compiled, device="cpu", slots=2, stage_bytes=0), torch.device("cpu"))
    if when == "after":
        optimizers.append(OPTIMIZERS[name](compiled.parameters()))
    for step in range(3):
        args, kwargs = entry.make_inputs(seed=step)
        pair.step(*args, **kwargs, seed=step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.check()


def test_training_loop_on_the_device(device: torch.device) -> None:
    """Steps of SGD, whose arithmetic does not depend on the device in float32 without momentum."""
    entry = example("mlp")
    pair = example_pair(entry, device)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, foreach=False) for model in pair.both]
    for step in range(4):
        args, kwargs = entry.make_inputs(seed=step, device=device)
        pair.step(*args, **kwargs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pair.check()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_clipping_and_a_schedule_of_learning_rates(set_to_none: bool) -> None:
    entry = example("gpt")
    pair = example_pair(entry, torch.device("cpu"), chaos=4)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.02) for model in pair.both]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5) for optimizer in optimizers]
    for step in range(4):
        for micro in range(3):
            args, kwargs = entry.make_inputs(seed=10 * step + micro)
            pair.step(*args, **kwargs, seed=micro, loss=lambda output: scalar_loss(output) / 3)
        norms = [clip_grad_norm_(model.parameters(), 0.05) for model in pair.both]
        assert torch.equal(*norms)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        pair.check()


def test_parameter_groups_and_clipping_by_value() -> None:
    pair = make_pair(lambda: example("gpt").make_model())
    optimizers = []
    for model in pair.both:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.001}]
        optimizers.append(torch.optim.AdamW(groups, lr=0.01))
    for step in range(3):
        args, kwargs = example("gpt").make_inputs(seed=step)
        pair.step(*args, **kwargs)
        for model, optimizer in zip(pair.both, optimizers, strict=True):
            clip_grad_value_(model.parameters(), 0.001)
            optimizer.step()
            model.zero_grad()
        pair.check()


def test_infinite_and_nan_gradients_reach_the_norm() -> None:
    pair = make_pair(perceptron)
    for factor in (float("inf"), float("nan")):
        for model in pair.both:
            (model(features()).sum() * factor).backward()
        norms = [clip_grad_norm_(model.parameters(), 1.0) for model in pair.both]
        assert all(not norm.isfinite() for norm in norms)
        for model in pair.both:
            model.zero_grad()
    pair.step(features())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    pair = make_pair(lambda: perceptron().to(dtype), chaos=0)
    for seed in range(2):
        pair.step(features(seed=seed).to(dtype), loss=lambda output: output.abs().float().square().sum())


@pytest.mark.parametrize("inside", [True, False], ids=["backward_inside", "backward_outside"])
def test_autocast(inside: bool, device: torch.device) -> None:
    pair = make_pair(perceptron, device, chaos=0)
    for seed in range(2):
        losses = []
        for model in pair.both:
            with torch.autocast(device.type, torch.bfloat16):
                output = model(features(seed=seed, device=device))
                assert output.dtype == torch.bfloat16
                losses.append(output.float().square().mean())
                if inside:
                    losses[-1].backward()
            if not inside:
                losses[-1].backward()
        assert torch.equal(*losses)
        pair.check()
    pair.step(features(device=device))


def test_autocast_of_a_transformer() -> None:
    entry = example("gpt")
    pair = example_pair(entry, torch.device("cpu"))
    losses = []
    args, kwargs = entry.make_inputs()
    for model in pair.both:
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(model(*args, **kwargs))
        losses[-1].backward()
    assert torch.equal(*losses)
    pair.check()


def test_gradient_scaler() -> None:
    pair = make_pair(perceptron)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair.both]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in pair.both]
    for step in range(3):
        for model, optimizer, scaler in zip(pair.both, optimizers, scalers, strict=True):
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(scalar_loss(model(features(seed=step))) * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.check()


def test_frozen_and_thawed_parameters_between_steps(device: torch.device) -> None:
    pair = make_pair(perceptron, device, chaos=5)
    flags = [(True, True, True), (False, True, True), (False, False, True), (True, False, False), (True, True, True)]
    for step, wanted in enumerate(flags):
        for model in pair.both:
            for index, flag in zip((0, 2, 4), wanted, strict=True):
                model[index].requires_grad_(flag)
        pair.step(features(seed=step, device=device))
        if step == 2:
            for model in pair.both:
                model.zero_grad()


def test_single_parameters_frozen_and_thawed_in_one_unit() -> None:
    pair = make_pair(perceptron, stage_bytes=ALL_UNITS)
    for step, name in enumerate(["0.weight", "0.bias", "4.weight", "0.weight", "0.bias"]):
        for model in pair.both:
            parameter = model.get_parameter(name)
            parameter.requires_grad_(not parameter.requires_grad)
        pair.step(features(seed=step))


def test_two_compiled_models_in_turn(device: torch.device) -> None:
    """A generator and a discriminator: gradients flow through the other model into its input."""
    generator, discriminator = make_pair(perceptron, device), make_pair(lambda: perceptron(2), device, reused=True)
    for step in range(3):
        for left, right in zip(generator.both, discriminator.both, strict=True):
            made = left(features(seed=step, device=device))
            loss = right(features(seed=step + 50, device=device)).mean() - right(made.detach()).mean()
            loss.backward()
            right(made).mean().backward()
        generator.check()
        discriminator.check()


def test_compiled_model_inside_an_eager_one(device: torch.device) -> None:
    pair = make_pair(perceptron, device)
    before = nn.Linear(WIDTH, WIDTH).to(device)
    around = [before, copy.deepcopy(before)]
    for layer, model in zip(around, pair.both, strict=True):
        (model(layer(features(device=device))).sin() * layer(features(seed=2, device=device))).sum().backward()
    assert torch.equal(around[0].weight.grad, around[1].weight.grad)
    pair.check()
