"""Capture: what a captured graph computes equals what the eager model computes, and the model is left as it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from captured_and_eager import CPU, assert_capture_equals_eager, assert_equals_eager
from megatrain_fx.capture import capture
from models import EXAMPLES, Example, example

WIDTH = 8


@pytest.mark.parametrize("entry", EXAMPLES, ids=str)
def test_captured_graph_equals_eager(entry: Example) -> None:
    model = entry.make_model()
    args, kwargs = entry.make_inputs()
    before = _everything(model)
    values = [tensor.clone() for tensor in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    captured = capture(model, args, kwargs, device=CPU)
    assert _everything(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    for value, tensor in zip(values, (*model.parameters(), *model.buffers()), strict=True):
        assert torch.equal(value, tensor)
    assert_equals_eager(captured, model, args, kwargs)
    if not entry.data_dependent:
        with torch.device("meta"):
            unallocated = entry.build()
        on_meta = capture(unallocated, args, kwargs, device=CPU)
        assert str(on_meta.graph_module.graph) == str(captured.graph_module.graph)


@pytest.mark.parametrize("name", ["gpt", "convolution", "glue_buffer", "drop_path"])
def test_captured_graph_equals_eager_in_evaluation(name: str) -> None:
    args, kwargs = example(name).make_inputs()
    assert_capture_equals_eager(example(name).make_model().eval(), *args, **kwargs)


def _everything(model: nn.Module) -> list[object]:
    """Identities of all attributes, parameters and buffers of all modules."""
    found: list[object] = []
    for name, module in model.named_modules():
        found.append((name, type(module), {key: id(value) for key, value in vars(module).items()}))
        found.extend(id(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
    return found


def test_graph_form() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.randn(WIDTH))
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x: Tensor, unused: Tensor, *, more: dict[str, Tensor]) -> Tensor:
            x = x + self.position
            for layer in self.layers:
                x = layer(x)
            return x * self.scale + torch.tensor([3.0]) + more["bias"]

    model = Model()
    x = torch.randn(2, WIDTH)
    captured = assert_capture_equals_eager(model, x, torch.ones(1), more={"bias": torch.randn(WIDTH)})
    nodes = list(captured.graph_module.graph.nodes)
    assert [n.name for n in nodes if n.op == "placeholder"] == ["x", "unused", "more_bias"]
    assert [n.target for n in nodes if n.op == "get_attr"] == ["position", "scale", "_constant_0"]
    assert [n.target for n in nodes if n.op == "call_module"] == ["unit_call_0", "unit_call_1"]
    assert [call.path for call in captured.unit_calls] == ["layers.0", "layers.1"]
    assert [call.unit for call in captured.unit_calls] == list(model.layers)
    assert captured.graph_module.position is model.position
    assert captured.graph_module.scale is model.scale
    for node in nodes:
        if node.op in ("call_function", "call_module", "placeholder"):
            assert "val" in node.meta, node
    assert all("test_capture.py" in n.stack_trace for n in nodes if n.op in ("call_function", "call_module"))


def test_tied_parameters_go_by_their_first_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, WIDTH)
            self.head = nn.Linear(WIDTH, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids)) + nn.functional.linear(ids.float()[:, None], self.head.weight)

    captured = assert_capture_equals_eager(Tied(), torch.randint(11, (2, WIDTH)))
    attributes = captured.graph_module.graph.find_nodes(op="get_attr")
    assert [node.target for node in attributes] == ["embedding.weight"]


def test_same_tensor_passed_twice() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.layer(x, y) + x.mul(2).add(y)

    x, y = torch.randn(2, 3, WIDTH, requires_grad=True).unbind()
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    assert len(assert_capture_equals_eager(Two(), x, x).graph_module.graph.find_nodes(op="placeholder")) == 1
    assert len(assert_capture_equals_eager(Two(), x, y).graph_module.graph.find_nodes(op="placeholder")) == 2


def test_input_names() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, *rest: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
            return x + rest[0] + rest[1] + pair[0] + pair[1]

    values = [torch.randn(2) for _ in range(5)]
    captured = assert_capture_equals_eager(Model(), *values[:3], pair=tuple(values[3:]))
    names = [node.name for node in captured.graph_module.graph.find_nodes(op="placeholder")]
    assert names == ["x", "args_1", "args_2", "pair_0", "pair_1"]


def test_output_may_be_an_input_or_repeated_or_a_constant() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[object, ...]:
            y = self.layer(x)
            return x, y, [y, None, "text", 2.5], {"z": (y.shape, y * 2)}

    x = torch.randn(2, WIDTH)
    captured = assert_capture_equals_eager(Odd(), x)
    first = captured.output_tree.unflatten(captured.graph_module(x))[0]
    assert first is x


def test_unit_arguments_of_all_kinds() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(
            self, x: Tensor, pair: tuple[Tensor, Tensor], *, size: int, scale: float, mask: None, act: object
        ) -> dict:
            x = act(x * self.weight * scale + pair[0][:size] + pair[1][:size])
            return {"x": x, "none": mask, "pair": pair, "size": size}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            pair = (x + 1, x + 2)
            for layer in self.layers:
                out = layer(x, pair, size=x.shape[0], scale=0.5, mask=None, act=torch.tanh)
                x, pair = out["x"], out["pair"]
                assert out["none"] is None
                assert out["size"] == x.shape[0]
            return x

    assert_capture_equals_eager(Model(), torch.randn(3, WIDTH))
    assert_capture_equals_eager(Model(), torch.randn(3, WIDTH), dynamic=True)


def test_value_dependent_unit_gets_its_metadata_from_a_real_run() -> None:
    entry = example("moe")
    args, kwargs = entry.make_inputs()
    for dynamic in (False, True):
        captured = assert_capture_equals_eager(entry.make_model(), *args, dynamic=dynamic, **kwargs)
        shapes = [
            node.meta["val"][0].shape
            for node in captured.graph_module.graph.find_nodes(op="call_module", target="unit_call_1")
        ]
        assert len(shapes) == 1
        assert len(shapes[0]) == 3


def test_forward_of_another_class() -> None:
    class Original(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(self.layer(x))

        def scaled(self, x: Tensor) -> Tensor:
            return x * 2

    class Generated(Original):
        def forward(self, *args: Tensor) -> Tensor:
            raise AssertionError("the generated forward is not what is captured")

    model = Original()
    model.__class__ = Generated
    x = torch.randn(2, WIDTH)
    captured = capture(model, (x,), {}, device=CPU, forward_class=Original)
    assert type(model) is Generated
    assert torch.equal(captured.graph_module(x)[0], model.layer(x) * 2)
    assert [node.name for node in captured.graph_module.graph.find_nodes(op="placeholder")] == ["x"]


def test_hooks_of_units_run_at_every_call_and_hooks_of_the_root_are_left_out() -> None:
    model = example("mlp").make_model()
    ran: list[str] = []
    unit = capture(model, *example("mlp").make_inputs(), device=CPU).unit_calls[0].unit
    unit.register_forward_pre_hook(lambda module, args: ran.append("before") if type(args[0]) is Tensor else None)
    unit.register_forward_hook(lambda module, args, output: output * 3)
    model.register_forward_hook(lambda module, args, output: ran.append("root"))
    args, kwargs = example("mlp").make_inputs()
    captured = assert_capture_equals_eager(model, *args, **kwargs)
    del ran[:]
    captured.graph_module(*args)
    captured.graph_module(*args)
    assert ran == ["before", "before"]


def test_captures_of_two_models_do_not_meet() -> None:
    one, other = (example("gpt").make_model(seed) for seed in (1, 2))
    args, kwargs = example("gpt").make_inputs()
    first = capture(one, args, kwargs, device=CPU)
    assert_capture_equals_eager(other, *args, **kwargs)
    assert [call.unit for call in first.unit_calls] != [None]
    assert all(call.unit in set(one.modules()) for call in first.unit_calls)


def test_bfloat16_model() -> None:
    args, kwargs = example("gpt").make_inputs()
    assert_capture_equals_eager(example("gpt").make_model().bfloat16(), *args, **kwargs)
