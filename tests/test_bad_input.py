"""Bad input: one exception class each, with a message that says what was found, where, and the remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from comparison import WIDTH, Pair, features, make_pair, perceptron


def test_inputs_of_a_wrong_shape_name_the_line_of_the_user() -> None:
    pair = make_pair(perceptron)
    for _ in range(2):
        with pytest.raises((RuntimeError, megatrain.CaptureError), match="mat1 and mat2|reduction dim") as caught:
            pair.compiled(torch.ones(4, WIDTH + 1))
        assert "Linear" in "".join(traceback.format_exception(caught.value))
        pair.step(features())


def test_no_parameters() -> None:
    for model in (nn.Sequential(), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3, affine=False))):
        with pytest.raises(megatrain.NoParametersError, match="Sequential has no parameters"):
            megatrain.compile(model, device="cpu")
        with pytest.raises(megatrain.NoParametersError, match="Sequential has no parameters"):
            megatrain.trace(model, features())


def test_not_a_module() -> None:
    for value in (features(), lambda inputs: inputs, nn.Linear):
        with pytest.raises(megatrain.ConfigError, match=r"takes a torch.nn.Module, not"):
            megatrain.compile(value, device="cpu")


def test_parameters_on_the_meta_device() -> None:
    model = perceptron()
    model[2].to("meta")
    with pytest.raises(megatrain.ModelDeviceError, match=r"parameter 2.weight of Sequential is on meta.*to_empty"):
        megatrain.compile(model, device="cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("part", [slice(0, 6), slice(2, 3)], ids=["whole", "part"])
def test_parameters_on_an_accelerator(part: slice) -> None:
    model = perceptron()
    model[part].to("cuda")
    with pytest.raises(megatrain.ModelDeviceError, match=r"weight of Sequential is on cuda:0.*model.cpu\(\)"):
        megatrain.compile(model)


@pytest.mark.cuda
def test_moved_to_an_accelerator_after_compile() -> None:
    """The model is where it is asked to go: nothing moves. A conversion is refused."""
    pair = make_pair(perceptron, torch.device("cuda"))
    for move in (lambda model: model.to("cuda"), lambda model: model.cuda(), lambda model: model.cpu()):
        pair.step(features(device="cuda"))
        move(pair.compiled)
        assert all(parameter.device.type == "cpu" for parameter in pair.compiled.parameters())
    pair.step(features(device="cuda"))
    with pytest.raises(megatrain.ModelDeviceError, match="before megatrain.compile"):
        pair.compiled.half()


@pytest.mark.cuda
def test_input_on_the_wrong_device() -> None:
    model = megatrain.compile(perceptron())
    for _ in range(2):
        with pytest.raises(megatrain.InputDeviceError, match=r"is on cpu, but the model computes on cuda:0.*\.to\("):
            model(features())
    model(features(device="cuda")).sum().backward()
    with pytest.raises(megatrain.InputDeviceError, match=r"shape \[4, 16\]"):
        model(features())


def test_input_on_the_meta_device() -> None:
    pair = make_pair(perceptron)
    with pytest.raises(megatrain.InputDeviceError, match=r"input.*shape \[4, 16\].* on meta.*computes on cpu"):
        pair.compiled(features().to("meta"))
    pair.step(features())


@pytest.mark.parametrize("compiled", ["itself", "part", "whole"])
def test_compiled_twice(compiled: str) -> None:
    model = nn.Sequential(perceptron(), nn.Linear(WIDTH, WIDTH))
    if compiled == "whole":
        model = nn.Sequential(model)
    megatrain.compile(model if compiled == "itself" else model[0], device="cpu")
    with pytest.raises(megatrain.ConfigError, match="compiled already"):
        megatrain.compile(model, device="cpu")


def test_forward_on_the_instance() -> None:
    model = perceptron()
    model.forward = lambda inputs: inputs  # type: ignore[method-assign]
    with pytest.raises(megatrain.ConfigError, match="forward set on the instance"):
        megatrain.compile(model, device="cpu")


class Branching(nn.Module):
    """Its glue goes on from the values of a tensor in the way that ``ask`` has."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.ask = ask

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if self.ask(hidden):  # the line to be named
            hidden = hidden * 2
        return self.last(hidden)


@pytest.mark.parametrize(
    "ask",
    [
        lambda hidden: hidden.sum() > 0,
        lambda hidden: hidden.mean().item() > 0,
        lambda hidden: hidden.argmax().tolist() == 1,
        lambda hidden: hidden[hidden > 0].numel() > 3,
    ],
    ids=["bool", "item", "tolist", "mask"],
)
def test_glue_that_branches_on_values(ask: Callable[[Tensor], Any]) -> None:
    model = megatrain.compile(Branching(ask), device="cpu")
    for call in (model, lambda inputs: megatrain.trace(Branching(ask), inputs)):
        with pytest.raises(megatrain.DataDependentGlueError) as caught:
            call(features())
        message = str(caught.value)
        assert re.search(r"test_bad_input\.py:\d+", message)
        assert "Branching" in message
        assert "torch.where" in message


@pytest.mark.parametrize("output", [object(), {1, 2}, iter([1])], ids=["object", "set", "iterator"])
def test_output_that_is_no_tensor_tree(output: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Tensor) -> dict[str, Any]:
            return {"result": self.layer(inputs), "other": [output]}

    with pytest.raises(megatrain.OutputTreeError, match=r"output\['other'\]\[0\].*Return tensors"):
        megatrain.compile(Odd(), device="cpu")(features())


@pytest.mark.parametrize("argument", [object(), {1, 2}], ids=["object", "set"])
def test_argument_that_is_no_tensor_tree(argument: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Tensor, more: Any = None) -> Tensor:
            return self.layer(inputs)

    with pytest.raises(megatrain.UnsupportedInputError, match=r"more.*Odd.*Pass tensors"):
        megatrain.compile(Odd(), device="cpu")(features(), more=argument)


def invalid_options() -> Iterator[Any]:
    for name in ("slots", "slabs"):
        for value in (0, -1, 1.5, "2", True, None):
            yield pytest.param({name: value}, f"{name}=.*at least 1", id=f"{name}={value}")
    for value in (-1, 2.0, "1", None):
        yield pytest.param({"stage_bytes": value}, "stage_bytes=.*at least 0", id=f"stage_bytes={value}")
    for value in (-1, True, "x"):
        yield pytest.param({"chaos": value}, "chaos=.*at least 0", id=f"chaos={value}")
    for name in ("pin", "precision", "template"):
        yield pytest.param({name: "other"}, f"{name}='other' must be one of", id=name)
    for value in ("nowhere", "meta", 3.5, "cuda:99", "mps"):
        yield pytest.param({"device": value}, "device=", id=f"device={value}")
    for value in (3, "text", [3]):
        yield pytest.param({"passes": value}, "passes", id=f"passes={value}")
    yield pytest.param({"slot": 3}, "unknown option 'slot'.*slots", id="unknown")


@pytest.mark.parametrize(("options", "message"), invalid_options())
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    model = perceptron()
    with pytest.raises(megatrain.ConfigError, match=message):
        megatrain.compile(model, **options)
    with pytest.raises(megatrain.ConfigError, match=message):
        megatrain.trace(model, features(), megatrain_options=options)
    assert type(model) is nn.Sequential
    pair = Pair(perceptron(), megatrain.compile(model, device="cpu"), torch.device("cpu"))
    pair.eager.load_state_dict(model.state_dict())
    pair.step(features())


def test_options_are_frozen() -> None:
    config = megatrain.StreamConfig(device="cpu")
    with pytest.raises(AttributeError):
        config.slots = 5  # type: ignore[misc]


def test_memory_of_a_model_that_is_not_compiled() -> None:
    with pytest.raises(megatrain.ConfigError, match="not compiled"):
        megatrain.memory(perceptron())


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (lambda text: text.replace("prefetch", "fetch", 1), megatrain.ScheduleParseError),
        (lambda text: text.replace("%2 ", "%7 ", 1), megatrain.ScheduleParseError),
        (lambda text: text.replace("compute", "somewhere", 1), megatrain.ScheduleParseError),
        (lambda text: re.sub(r"(%0 .*)\n", r"\1  after %5\n", text, count=1), megatrain.ScheduleError),
    ],
    ids=["unknown_op", "numbers", "unknown_lane", "cycle"],
)
def test_schedule_texts(edit: Callable[[str], str], error: type[Exception]) -> None:
    text = str(megatrain.trace(perceptron(), features()).schedule)
    assert megatrain.Schedule.parse(text) == megatrain.trace(perceptron(), features()).schedule
    assert edit(text) != text
    with pytest.raises(error):
        megatrain.Schedule.parse(edit(text)).verify()


def test_synchronize_of_a_model_that_is_not_compiled() -> None:
    with pytest.raises(megatrain.ConfigError, match="not compiled"):
        megatrain.synchronize(perceptron())


def test_an_option_among_the_arguments_of_a_trace() -> None:
    with pytest.raises(megatrain.ConfigError, match="megatrain_options"):
        megatrain.trace(perceptron(), features(), slots=2)


def test_a_module_without_a_forward() -> None:
    with pytest.raises(megatrain.ConfigError, match="no forward"):
        megatrain.compile(torch.nn.ModuleList([torch.nn.Linear(2, 2)]))
