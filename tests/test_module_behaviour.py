"""A compiled model is still the user's module: class, attributes, state, copies, files, hooks, replaced parts."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import megatrain_fx as megatrain
from architectures import Gpt
from comparison import WIDTH, Pair, features, make_pair, perceptron
from models import example


class Custom(nn.Module):
    """A model with a method, a plain attribute, a property and buffers of both kinds."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.scale = scale
        self.register_buffer("offset", torch.ones(WIDTH))
        self.register_buffer("passing", torch.zeros(WIDTH), persistent=False)

    @property
    def width(self) -> int:
        return self.first.in_features

    def features(self, inputs: Tensor) -> Tensor:
        return self.first(inputs) * self.scale + self.offset

    def forward(self, inputs: Tensor, key: str = "a") -> Tensor:
        """Documented."""
        return self.layers[key](self.features(inputs)) + self.passing


def stepped(build: Callable[[], nn.Module] = Custom, **options: Any) -> Pair:
    pair = make_pair(build, **options)
    pair.step(features())
    return pair


def test_class_attributes_and_methods_stay() -> None:
    original = Custom()
    model = megatrain.compile(original, device="cpu")
    assert model is original
    assert isinstance(model, Custom)
    assert type(model).__name__ == "Custom"
    assert type(model).__qualname__ == Custom.__qualname__
    assert type(model).__module__ == Custom.__module__
    assert repr(model) == repr(Custom())
    assert model.forward.__doc__ == "Documented."
    assert (model.scale, model.width) == (1.0, WIDTH)
    model.note = "new"
    model(features()).sum().backward()
    assert model.note == "new"
    assert torch.equal(model.features(features()), nn.Linear.forward(model.first, features()) + 1)


def test_names_and_order_of_parameters_buffers_and_modules_stay() -> None:
    args, kwargs = example("gpt").make_inputs()
    pair = make_pair(Gpt)
    pair.step(*args, **kwargs)
    for listing in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        expected, actual = ([name for name, _ in getattr(model, listing)()] for model in pair.both)
        assert expected == actual
    assert list(pair.eager.state_dict()) == list(pair.compiled.state_dict())
    assert [p.shape for p in pair.eager.parameters()] == [p.shape for p in pair.compiled.parameters()]
    assert all(type(p) is nn.Parameter and p.is_leaf for p in pair.compiled.parameters())


def test_parameters_keep_their_identity() -> None:
    model = perceptron()
    before = list(model.parameters())
    megatrain.compile(model, device="cpu")(features()).sum().backward()
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))


def test_constant_arguments_select_programs() -> None:
    pair = make_pair(Custom)
    for key in ("a", "b", "a"):
        pair.step(features(), key=key)
    assert len(pair.compiled.__dict__["_megatrain"].programs) == 2


@pytest.mark.parametrize("called", [False, True], ids=["before_the_first_call", "after_it"])
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(called: bool, assign: bool) -> None:
    """With ``assign`` parameters become other objects: that must be followed, or refused when the model is called."""
    pair = make_pair(Custom)
    if called:
        pair.step(features())
    torch.manual_seed(7)
    state = Custom(scale=1.0).state_dict()
    for model in pair.both:
        model.load_state_dict(copy.deepcopy(state), assign=assign)
        model.zero_grad()
    _step_or_refusal(pair, "replaced" if called and assign else None)


def test_load_state_dict_strictness() -> None:
    for model in stepped().both:
        state = model.state_dict()
        state["unknown"] = state.pop("first.bias")
        with pytest.raises(RuntimeError, match=r"Missing key.*first.bias"):
            model.load_state_dict(state)
        found = model.load_state_dict(state, strict=False)
        assert (found.missing_keys, found.unexpected_keys) == (["first.bias"], ["unknown"])


def test_state_dict_shows_the_latest_values_and_saves_alone(tmp_path: Path) -> None:
    pair = stepped()
    for model in pair.both:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    sizes = []
    for number, model in enumerate(pair.both):
        torch.save(model.state_dict(), tmp_path / f"{number}.pt")
        sizes.append((tmp_path / f"{number}.pt").stat().st_size)
    assert sizes[0] == sizes[1]
    expected, actual = (torch.load(tmp_path / f"{number}.pt") for number in (0, 1))
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    pair.compiled.load_state_dict(actual)
    pair.step(features(seed=2))


def test_safetensors(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")
    pair = stepped()
    files.save_file(pair.compiled.state_dict(), tmp_path / "model.safetensors")
    loaded = files.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in pair.eager.state_dict().items())


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _saved],
    ids=["copy", "pickle", "save"],
)
@pytest.mark.parametrize("called", [False, True])
def test_copies_are_ordinary_models(duplicate: Callable[[nn.Module], nn.Module], called: bool) -> None:
    pair = stepped() if called else make_pair(Custom)
    twin = duplicate(pair.compiled)
    assert type(twin) is Custom
    twin.zero_grad()
    with torch.no_grad():
        twin.first.weight.mul_(2)
    pair.step(features(seed=2))
    with torch.no_grad():
        pair.eager.first.weight.mul_(2)
    assert torch.equal(twin(features()), pair.eager(features()))
    again = megatrain.compile(twin, device="cpu")
    assert torch.equal(again(features()), pair.eager(features()))


def test_copies_share_no_memory_with_the_store() -> None:
    model = stepped().compiled
    twin = copy.deepcopy(model)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert not pointers & {parameter.data_ptr() for parameter in twin.parameters()}


class Particular(Custom):
    """A model that says itself how it is copied, and what of it is pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: Any = open(__file__)  # noqa: SIM115  cannot be pickled

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Particular:
        twin = type(self)()
        twin.load_state_dict(self.state_dict())
        return twin


def test_own_ways_of_copying_are_respected() -> None:
    pair = stepped(Particular)
    assert pickle.loads(pickle.dumps(pair.compiled)).handle is None
    twin = copy.deepcopy(pair.compiled)
    assert torch.equal(twin(features()), pair.eager(features()))
    other = type(pair.compiled)()
    assert torch.equal(other(features()), Custom.forward(other, features()))
    for model in (*pair.both, twin, other):
        model.handle.close()


def test_averaged_model_follows() -> None:
    pair = make_pair(perceptron)
    averages = [AveragedModel(model) for model in pair.both]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in pair.both]
    for seed in range(3):
        pair.step(features(seed=seed))
        for model, average, optimizer in zip(pair.both, averages, optimizers, strict=True):
            optimizer.step()
            average.update_parameters(model)
    assert torch.equal(averages[0](features()), averages[1](features()))


def _step_or_refusal(pair: Pair, refusal: str | None) -> None:
    """The step equals eager's, or, where ``refusal`` is given, is refused with an error that names it."""
    try:
        pair.step(features(seed=3))
    except megatrain.MegatrainError as error:
        assert refusal is not None
        assert refusal in str(error)  # noqa: PT017


def test_custom_forward_signature_is_kept() -> None:
    assert inspect.signature(megatrain.compile(Custom(), device="cpu").forward) == inspect.signature(Custom().forward)
