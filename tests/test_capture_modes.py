"""Capture of glue that changes modes or state: gradient and autocast regions, buffers, in-place updates, randomness."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from captured_and_eager import CPU, assert_capture_equals_eager, assert_equals_eager
from edge_architectures import ReversedGradient
from megatrain_fx.capture import capture
from megatrain_fx.execution_modes import Autocast, ExecutionModes, run_region
from megatrain_fx.unit_call import FunctionCall
from models import example

WIDTH = 8


class Layers(nn.Module):
    """Base of the models below: three linear units, a glue parameter and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(0.3)


class GradientRegion(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x + 1
            x = self.layers[0](self.dropout(x)).tanh()
            y = self.layers[1](x) * self.scale
            with torch.enable_grad():
                z = self.layers[2](y)
            y = y + z
        with torch.no_grad():
            y = y * 2
        return self.layers[2](x + y) + z


class AutocastRegion(Layers):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = self.layers[0](x)
            y = y @ y.t()
            with torch.autocast(x.device.type, enabled=False):
                z = self.layers[1](y.float() @ x)
            z = self.dropout(z @ z.t())
        return z.float() @ self.layers[2](x), y


class MixedRegions(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = x @ x.t()
            y = self.layers[0](y.float() @ x)
            with torch.autocast(x.device.type, dtype=torch.float16):
                y = (y @ y.t()).float() @ self.layers[1](x)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            y = y + x @ x.t() @ x
        return self.layers[2](x + y.float())


@pytest.mark.parametrize("kind", [GradientRegion, AutocastRegion, MixedRegions])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_regions(kind: type[Layers], dynamic: bool) -> None:
    captured = assert_capture_equals_eager(kind(), torch.randn(3, WIDTH), dynamic=dynamic)
    assert any(node.target is run_region for node in captured.graph_module.graph.nodes)
    assert len(captured.unit_calls) == (4 if kind is GradientRegion else 3)


def test_unit_calls_know_the_modes_of_their_region() -> None:
    captured = capture(MixedRegions(), (torch.randn(3, WIDTH),), {}, device=CPU)
    half, quarter = (Autocast("cpu", dtype, True, None) for dtype in (torch.bfloat16, torch.float16))
    assert [call.modes for call in captured.unit_calls] == [
        ExecutionModes(False, (half,)),
        ExecutionModes(False, (quarter,)),
        ExecutionModes(),
    ]


def test_capture_under_autocast_and_without_gradients() -> None:
    args, kwargs = example("gpt").make_inputs()
    model = example("gpt").make_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = assert_capture_equals_eager(model, *args, **kwargs)
    values = [node.meta["val"] for node in captured.graph_module.graph.nodes if node.op == "call_module"]
    assert values[-1][0].dtype == torch.bfloat16
    with torch.no_grad():
        assert_capture_equals_eager(example("gpt").make_model(), *args, **kwargs)


class AssignedBuffer(Layers):
    """Glue modules below the root assign to a buffer, return its old value and update another in place."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))
            self.register_buffer("average", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            old = self.steps
            self.steps = self.steps + 1
            self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.average += 1
            return x * self.steps + self.average, old

    def __init__(self) -> None:
        super().__init__()
        self.counter = self.Counter()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, old = self.counter(self.layers[0](x))
        return self.layers[1](x), old


def test_buffers_are_updated_once_a_run() -> None:
    model = AssignedBuffer()
    x = torch.randn(3, WIDTH)
    captured = assert_capture_equals_eager(model, x)
    for _ in range(3):
        assert_equals_eager(captured, model, (x,))
    assert model.counter.steps == 4
    writes = [n for n in captured.graph_module.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert [n.args[0].target for n in writes] == ["counter.steps"]


class UnitThatAssigns(nn.Module):
    """A unit with a buffer, an attribute and a counter of calls that its forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.shape[0]
        self.calls += 1
        self.latest = x.detach()
        return self.linear(x)


def test_unit_may_assign_to_itself() -> None:
    model = nn.Sequential(UnitThatAssigns(), UnitThatAssigns())
    captured = capture(model, (torch.ones(3, WIDTH),), {}, device=CPU)
    assert model[0].calls == 0
    assert not hasattr(model[0], "latest")
    assert_equals_eager(captured, model, (torch.ones(3, WIDTH),))
    assert model[0].calls == 1
    assert model[0].seen == 3


class InPlace(nn.Module):
    """A unit modifies what the glue gave it, and the glue reads it afterwards."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            total.add_(1)
            return self.linear(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, total).relu_() + total
        total.mul_(2)
        return x


def test_in_place_updates_of_inputs() -> None:
    assert_capture_equals_eager(InPlace(), torch.randn(3, WIDTH), torch.zeros(WIDTH))


class SwappedBuffers(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("current", torch.zeros(WIDTH))
        self.register_buffer("previous", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0](x)
        self.current, self.previous = self.previous, self.current
        return x + self.current, self.previous


def test_buffers_are_read_before_any_is_written() -> None:
    model = SwappedBuffers()
    captured = assert_capture_equals_eager(model, torch.randn(3, WIDTH))
    assert_equals_eager(captured, model, (torch.randn(3, WIDTH),))


class GlueRandomness(Layers):
    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x) + torch.rand(WIDTH, device=x.device)
        unused = self.dropout(x)
        del unused
        x = self.dropout(self.layers[0](x + noise))
        return self.layers[1](torch.bernoulli(torch.full_like(x, 0.5)) * x) + torch.randperm(WIDTH)


def test_random_numbers_of_the_glue() -> None:
    assert_capture_equals_eager(GlueRandomness(), torch.randn(3, WIDTH))


def test_glue_without_units_and_model_without_parameters() -> None:
    assert_capture_equals_eager(nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH))
    assert_capture_equals_eager(nn.Dropout(), torch.randn(3, WIDTH))


class AsksForGradients(Layers):
    """The glue asks whether the results of units require gradients."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](ids.float())
        x = x * 2 if x.requires_grad else x * 3
        with torch.no_grad():
            y = self.layers[1](x)
        return x + (y * 2 if y.requires_grad else y * 3)


def test_glue_that_asks_for_gradients() -> None:
    ids = torch.ones(2, WIDTH, dtype=torch.int64)
    assert_capture_equals_eager(AsksForGradients(), ids)
    assert_capture_equals_eager(AsksForGradients().requires_grad_(False), ids)


class TransformedGlue(Layers):
    """The glue uses a function transform and structured control flow."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.func.vmap(lambda row: row * self.scale)(self.layers[0](x))
        return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (x,))


def test_function_transforms_and_control_flow() -> None:
    assert_capture_equals_eager(TransformedGlue(), torch.randn(3, WIDTH))


class CustomGlue(Layers):
    """The glue applies custom autograd functions, one of them to a parameter and in a region without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = ReversedGradient.apply(self.layers[0](x)) * ReversedGradient.apply(self.scale)
        with torch.no_grad():
            y = ReversedGradient.apply(self.layers[1](x) * 2)
        return ReversedGradient.apply(self.layers[2](x)) + y


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
def test_custom_autograd_functions_in_the_glue(dynamic: bool) -> None:
    captured = assert_capture_equals_eager(CustomGlue(), torch.randn(3, WIDTH), dynamic=dynamic)
    assert len(captured.unit_calls) == 3
    functions = [m for m in captured.graph_module.modules() if isinstance(m, FunctionCall)]
    assert [module.function for module in functions] == [ReversedGradient] * 4


class Checkpointed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x * self.scale


def test_glue_that_checkpoints_units() -> None:
    assert_capture_equals_eager(Checkpointed(), torch.randn(3, WIDTH))
