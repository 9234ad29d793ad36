"""What cannot be captured: the class of the error, what it names, and that the model can be used afterwards."""

from __future__ import annotations

import dataclasses
import random
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from captured_and_eager import CPU, assert_capture_equals_eager
from megatrain_fx.capture import capture
from megatrain_fx.errors import CaptureError, DataDependentGlueError, OutputTreeError, UnsupportedInputError

WIDTH = 8


class Model(nn.Module):
    """Two linear units with a function between them."""

    def __init__(self, between: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.between = between

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.between(self, self.layers[0](x), **kwargs)


def _capture(between: Callable[..., Any], **kwargs: Any) -> None:
    model = Model(between)
    attributes = [dict(vars(module)) for module in model.modules()]
    try:
        capture(model, (torch.randn(3, WIDTH),), kwargs, device=CPU)
    finally:
        assert [dict(vars(module)) for module in model.modules()] == attributes
        assert torch.equal(model.layers[0](torch.zeros(WIDTH)), model.layers[0].bias)


def branch(model: Model, x: Tensor) -> Tensor:
    if x.sum() > 0:  # the line that the error names
        return model.layers[1](x)
    return x


def test_branch_on_values() -> None:
    with pytest.raises(DataDependentGlueError, match=r"if x.sum\(\) > 0:") as raised:
        _capture(branch)
    assert "test_capture_refusals.py" in str(raised.value)
    assert "torch.where" in str(raised.value)
    assert "Model" in str(raised.value)


def select(model: Model, x: Tensor) -> Tensor:
    return model.layers[1](x[x > 0].view(-1, WIDTH))


def loop(model: Model, x: Tensor) -> Tensor:
    for index in range(int(x.abs().sum())):
        x = x + index
    return x


@pytest.mark.parametrize(("between", "line"), [(select, r"x\[x > 0\].view"), (loop, "int")])
def test_other_uses_of_values(between: Callable[..., Any], line: str) -> None:
    with pytest.raises(DataDependentGlueError, match=line):
        _capture(between)


class Cache:
    """Stands for a cache of keys and values, which is no tree of tensors."""


def test_opaque_input() -> None:
    with pytest.raises(UnsupportedInputError, match=r"\['past'\] of the call of Model .*\.Cache.*use_cache=False"):
        _capture(lambda model, x, past: x, past=Cache())
    with pytest.raises(UnsupportedInputError, match=r"\['options'\]\['a'\]\[1\] of the call of Model"):
        _capture(lambda model, x, options: x, options={"a": [1, object()]})


def test_opaque_argument_of_a_unit() -> None:
    with pytest.raises(UnsupportedInputError, match=r"argument \[0\] of unit layers.1 \(Linear\) is a .*Cache"):
        _capture(lambda model, x: model.layers[1](Cache()))


@dataclasses.dataclass
class Wrapped:
    inner: list[object]


def test_output_that_is_no_tree() -> None:
    with pytest.raises(OutputTreeError, match=r"output\['a'\]\.inner\[1\] of Model is a builtins.object"):
        _capture(lambda model, x: {"a": Wrapped([x, object()])})
    with pytest.raises(OutputTreeError, match="Cache.*use_cache=False"):
        _capture(lambda model, x: (x, Cache()))


class ReturnsObject(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return x, object()


def test_unit_that_returns_an_object() -> None:
    model = nn.Sequential(ReturnsObject(WIDTH, WIDTH))
    with pytest.raises(OutputTreeError, match=r"output\[1\] of unit 0 \(ReturnsObject\)"):
        capture(model, (torch.randn(WIDTH),), {}, device=CPU)


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.fail(super().forward(x))

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError("the user's own message")


def test_unit_that_fails_shows_the_users_traceback() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Failing(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"unit 1 \(Failing\) failed") as raised:
        capture(model, (torch.randn(WIDTH),), {}, device=CPU)
    assert "the user's own message" in str(raised.value)
    cause = raised.value.__cause__
    assert isinstance(cause, ValueError)
    assert traceback.extract_tb(cause.__traceback__)[-1].name == "fail"
    model[1].fail = lambda x: x
    assert_capture_equals_eager(model, torch.randn(2, WIDTH))


def test_glue_that_fails() -> None:
    def between(model: Model, x: Tensor) -> Tensor:
        return x.view(5)

    with pytest.raises(CaptureError, match=r"return x.view\(5\)") as raised:
        _capture(between)
    assert "forward of Model" in str(raised.value)
    assert raised.value.__cause__ is not None


def test_tensor_that_leaves_a_unit_by_the_back_door() -> None:
    class Leaking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            handles = [unit.register_forward_hook(lambda m, a, out: seen.append(out)) for unit in self.layers]
            for unit in self.layers:
                x = unit(x)
            for handle in handles:
                handle.remove()
            return x + seen[0]

    with pytest.raises(CaptureError, match=r"shape \(2, 8\) of which tracing does not know how it was made"):
        capture(Leaking(), (torch.randn(2, WIDTH),), {}, device=CPU)


def test_detour_by_data() -> None:
    with pytest.raises(CaptureError, match=r"by \.data\.[\s\S]*test_capture_refusals\.py"):
        _capture(lambda model, x: x + x.data * 2)


def test_number_computed_from_values() -> None:
    with pytest.raises(OutputTreeError, match=r"output\[1\] of Model .* computed from the values of a tensor"):
        _capture(lambda model, x: (x, x.sum().item()))
    with pytest.raises(DataDependentGlueError, match=r"argument \['a'\] of autograd function SavedApply is a number"):
        _capture(lambda model, x: SavedApply.apply(x, a=x.sum().item()))


def test_host_random_numbers() -> None:
    state, array_state = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(CaptureError, match="Python's random or from NumPy outside every unit"):
        _capture(lambda model, x: model.layers[1](x) if random.random() < 2 else x)
    with pytest.raises(CaptureError, match="Python's random or from NumPy outside every unit"):
        _capture(lambda model, x: x * float(np.random.rand()))
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == array_state


class SavedApply(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


saved = SavedApply.apply


def test_autograd_function_by_a_saved_reference() -> None:
    with pytest.raises(CaptureError, match="applies SavedApply outside every unit by a saved reference"):
        _capture(lambda model, x: saved(x))


def test_attributes_that_the_glue_assigns_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def between(model: Model, x: Tensor) -> Tensor:
        model.latest = x.detach()
        return model.layers[1](x)

    _capture(between)
    assert "Model assigns to latest outside every unit" in caplog.text


class ByValue(nn.Module):
    """A unit whose number of results depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight)[x > 0]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return (x * self.weight, None) if x.sum() > 1000 else (x * self.weight,)


def test_unit_whose_shape_depends_on_values() -> None:
    with pytest.raises(CaptureError, match=r"unit 0 \(ByValue\) returns a tensor whose shape depends on the values"):
        capture(nn.Sequential(ByValue()), (torch.randn(2, WIDTH),), {}, device=CPU)


def test_value_dependent_unit_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Branching())
    with pytest.raises(CaptureError, match="meta device: trace the model with real parameters"):
        capture(model, (torch.randn(2, WIDTH),), {}, device=CPU)


def test_unit_that_changes_what_it_returns() -> None:
    captured = capture(nn.Sequential(Branching()), (torch.randn(2, WIDTH),), {}, device=CPU)
    captured.graph_module(torch.zeros(2, WIDTH))
    with pytest.raises(CaptureError, match=r"unit 0 \(Branching\) returned \('tensor', None\), but \('tensor',\)"):
        captured.graph_module(torch.full((2, WIDTH), 1e6))
