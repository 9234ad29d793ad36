"""Compiled templates: equal to eager to rounding, compiled once whatever the depth, and eager where they cannot be."""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

import megatrain_fx as megatrain
from architectures import Gpt
from megatrain_fx import compiled_template
from megatrain_fx.edge import STATE
from models import example, scalar_loss, tensors

OPTIONS = {"device": "cpu", "slots": 2, "stage_bytes": 0, "chaos": 1}
WIDTH = 8

pytestmark = pytest.mark.usefixtures("log")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Collect the warnings of the package, and count compilations from zero."""
    caplog.set_level(logging.WARNING, logger="megatrain_fx")
    counters.clear()
    return caplog


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    """What the package warned of."""
    return [record.getMessage() for record in log.records if record.name.startswith("megatrain_fx")]


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return megatrain.compile(model, **OPTIONS, template="inductor", **options)


def compilations() -> int:
    """How many graphs TorchDynamo has handed to Inductor since the test began."""
    return counters["stats"]["unique_graphs"]


def assert_close_gradients(model: nn.Module, eager: nn.Module) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            assert mine.grad is not None, name
            torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def train_beside(model: nn.Module, eager: nn.Module, draw: Callable[[int], Any], steps: int = 3) -> None:
    """Train both on the same inputs; outputs, gradients, buffers and parameters must be close after every step."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, eager)]
    for step in range(steps):
        outputs = []
        for each in (model, eager):
            args, kwargs = draw(step)
            torch.manual_seed(step)
            outputs.append(each(*args, **kwargs))
            scalar_loss(outputs[-1]).backward()
        for mine, theirs in zip(tensors(outputs[0]), tensors(outputs[1]), strict=True):
            torch.testing.assert_close(mine, theirs)
        assert_close_gradients(model, eager)
        for mine, theirs in zip(model.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def without_dropout(model: nn.Module) -> nn.Module:
    """Compiled dropout draws other numbers than eager dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


@pytest.mark.parametrize(
    "name",
    [
        "skip",
        "convolution",
        "lora",
        pytest.param("moe", marks=pytest.mark.slow),
    ],
)
def test_trains_as_eager_does(name: str, log: pytest.LogCaptureFixture) -> None:
    chosen = example(name)
    model = without_dropout(chosen.make_model())
    eager = copy.deepcopy(model)
    train_beside(compiled(model), eager, lambda step: chosen.make_inputs(seed=step))
    assert compilations() >= 2
    assert not warnings(log)


class Block(nn.Module):
    """A residual block; noise that no gradient depends on is drawn before dropout."""

    def __init__(self, noise: float = 0.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.noise, self.dropout = noise, dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = functional.gelu(self.up(self.norm(hidden)))
        if self.noise:
            hidden = hidden + self.noise * torch.randn_like(hidden)
        return hidden + functional.dropout(self.down(functional.dropout(inner, self.dropout)), self.dropout)


class Stack(nn.Module):
    """Blocks between a stem, so that all their inputs need gradients, and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.stem(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class DoubledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        return 2 * gradient * values.cos()


class StatefulBlock(Block):
    """Has a gradient of its own, a buffer that it updates, another that differs from layer to layer, and a constant."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), scale))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        centred = (hidden - self.mean) * self.scale + torch.tensor([0.5] * WIDTH, device=hidden.device)
        return super().forward(DoubledGradient.apply(centred))


def batch(size: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("depth", [3, 12])
def test_compile_time_does_not_grow_with_depth(depth: int) -> None:
    model = Stack(*(Block() for _ in range(depth)))
    eager = copy.deepcopy(model)
    train_beside(compiled(model), eager, lambda step: ((batch(seed=step),), {}))
    (templates,) = model.__dict__[STATE]._compiled.values()
    assert len(templates) == depth
    (template,) = set(templates.values())
    assert template.compilations == compilations() == 2


def test_buffers_constants_and_custom_gradients(log: pytest.LogCaptureFixture) -> None:
    model = Stack(*(StatefulBlock(scale) for scale in (0.5, 1.0, 2.0, 3.0))).double()
    eager = copy.deepcopy(model)
    train_beside(compiled(model), eager, lambda step: ((batch(seed=step).double(),), {}))
    assert compilations() == 2
    assert not warnings(log)


def test_a_rerun_sees_the_same_random_numbers() -> None:
    """The gradient along a direction equals the difference quotient of the loss for one seed, in float64."""
    model = compiled(Stack(*(Block(noise=0.1, dropout=0.3) for _ in range(2))).double())

    def loss(inputs: Tensor, seed: int = 0) -> Tensor:
        torch.manual_seed(seed)
        return model(inputs).square().sum()

    inputs, direction, step = batch().double().requires_grad_(), batch(seed=1).double(), 1e-6
    loss(inputs).backward()
    assert inputs.grad is not None
    along = (inputs.grad * direction).sum()
    ahead, behind = (loss((inputs + side * step * direction).detach().requires_grad_()) for side in (1, -1))
    torch.testing.assert_close((ahead - behind) / (2 * step), along, rtol=1e-6, atol=0)
    assert loss(inputs, seed=1) != loss(inputs)
    first, second = loss(inputs), loss(inputs, seed=1)
    for retain in (True, False):
        inputs.grad = None
        first.backward(retain_graph=retain)
        torch.testing.assert_close((inputs.grad * direction).sum(), along)
    second.backward()
    assert compilations() == 2


def test_is_compiled_once_whatever_surrounds_it() -> None:
    """Autocast, another thread and inputs that require gradients change neither the code nor the results."""
    model = Stack(Block(), Block())
    eager = copy.deepcopy(model)
    model = compiled(model)

    def backward(each: nn.Module, inputs: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            output = each(inputs)
        thread = threading.Thread(target=output.float().square().mean().backward)
        thread.start()
        thread.join()

    for step in range(2):
        for each in (model, eager):
            backward(each, batch(seed=step))
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.005)
    assert compilations() == 2


class Pair(nn.Module):
    """Returns two tensors, each from a linear layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return functional.gelu(self.left(hidden)).square(), functional.gelu(self.right(hidden)).square()


class Pairs(nn.Module):
    """Sums one half of the first pair or both with the second pair."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        left, right = self.pairs[0](hidden)
        ahead, _ = self.pairs[1](left + hidden)
        return self.head(ahead + left), right


def test_gradients_are_none_where_eager_has_none(log: pytest.LogCaptureFixture) -> None:
    model = Pairs()
    eager = copy.deepcopy(model)
    model = compiled(model)
    for used in (0, 1):
        for each in (model, eager):
            each.zero_grad()
            each(batch())[used].square().mean().backward()
        assert model.pairs[1 - used].right.weight.grad is None or used == 1
        assert_close_gradients(model, eager)
    assert not warnings(log)


def test_inference_is_compiled() -> None:
    model = Stack(Block(), Block())
    eager = copy.deepcopy(model)
    model = compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(model(batch()), eager(batch()))
    assert compilations() == 1


def test_other_batch_sizes(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second shape on a program has symbolic sizes; a size is compiled when it comes again, up to a limit."""
    monkeypatch.setattr(compiled_template, "_MOST_LAYOUTS", 2)
    model = Stack(Block(), Block())
    eager = copy.deepcopy(model)
    model = compiled(model)
    sizes = [4, 6, 5, 6, 7, 5, 7, 6]
    counts = []
    for step, size in enumerate(sizes):
        train_beside(model, eager, lambda _, size=size, step=step: ((batch(size, step),), {}), steps=1)
        counts.append(compilations())
    assert counts == [2, 2, 2, 4, 4, 6, 6, 6]
    assert len(model.__dict__[STATE].programs) == 2
    (message,) = warnings(log)
    assert "template T1 (stage 1: blocks.0; 2 stages) runs eagerly instead of compiled" in message
    assert "more than 2 sizes" in message


def test_a_call_goes_backward_as_it_went_forward() -> None:
    """A size is compiled for a second call while the first, which ran eagerly, has yet to go backward."""
    model = compiled(Stack(Block(dropout=0.3), Block(dropout=0.3)).double())
    model(batch(3).double().requires_grad_())
    eager = copy.deepcopy(model)
    inputs = [batch(5).double().requires_grad_() for _ in range(3)]
    losses = []
    for each, size in zip((model, model, eager), inputs, strict=True):
        torch.manual_seed(0)
        losses.append(each(size).square().sum())
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(inputs[0].grad, inputs[2].grad)
    assert compilations() == 4


class BranchingBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden if hidden.sum() > 0 else -hidden)


class CoinBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden if random.random() < 0.5 else -hidden)


class CountingBlock(Block):
    count = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return super().forward(hidden)


class ReplacingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return super().forward(hidden - self.mean)


class InPlaceBlock(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.mul_(0.5))


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (BranchingBlock, "data-dependent"),
        (CoinBlock, "Python's random module"),
        (CountingBlock, "sets the attribute count of a CountingBlock"),
        (ReplacingBlock, "assigns to the buffer"),
        (InPlaceBlock, "modifies its input"),
    ],
)
def test_what_cannot_be_compiled_stays_eager(block: type[Block], reason: str, log: pytest.LogCaptureFixture) -> None:
    model = Stack(Block(), block())
    eager = copy.deepcopy(model)
    model = compiled(model)
    for _ in range(2):
        for each in (model, eager):
            random.seed(0)
            each(batch()).square().mean().backward()
        assert_close_gradients(model, eager)
    (message,) = warnings(log)
    assert reason.lower() in message.lower()
    assert "stage 2: blocks.1" in message


def test_without_a_compiler_everything_stays_eager(
    log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr(torch, "compile", refuse)
    model = Stack(Block(dropout=0.5), Block(dropout=0.5))
    eager = copy.deepcopy(model)
    model = compiled(model)
    for each in (model, eager):
        torch.manual_seed(0)
        each(batch()).square().mean().backward()
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    (message,) = warnings(log)
    assert "RuntimeError: no C++ compiler was found" in message


@pytest.mark.slow
def test_hugging_face_llama(log: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = transformers.LlamaForCausalLM(config)
    eager = copy.deepcopy(model)
    tokens = torch.randint(64, (2, 16))
    call = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    train_beside(compiled(model), eager, lambda step: ((), call))
    assert not warnings(log)


@pytest.mark.slow
def test_attention_with_dropout_sees_the_same_random_numbers() -> None:
    model = compiled(Gpt(depth=2, dropout=0.3).double())
    tokens = torch.randint(32, (4, 8))

    def loss() -> Tensor:
        torch.manual_seed(0)
        return model(tokens).square().mean()

    loss().backward()
    weights = [weight for name, weight in model.named_parameters() if name.startswith(("tokens", "blocks.0"))]
    directions = [torch.randn_like(weight) for weight in weights]
    along = torch.stack([(w.grad * d).sum() for w, d in zip(weights, directions, strict=True)]).sum()
    losses, step = [], 1e-6
    for move in (step, -2 * step):
        with torch.no_grad():
            for weight, direction in zip(weights, directions, strict=True):
                weight.add_(direction, alpha=move)
        losses.append(loss())
    torch.testing.assert_close((losses[0] - losses[1]) / (2 * step), along, rtol=1e-5, atol=0)
