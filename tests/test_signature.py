"""Input signatures: what they tell apart, what they do not, and how long they take."""

from __future__ import annotations

import dataclasses
import enum
import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain_fx.errors import UnsupportedInputError
from megatrain_fx.signature import InputSignature, ModelFlags, flatten_inputs
from models import example

MODEL = nn.Sequential(nn.Linear(4, 4), nn.Dropout())


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Batch:
    ids: Tensor
    name: str = "batch"


def _signature(*args: Any, **kwargs: Any) -> InputSignature:
    return ModelFlags(MODEL).signature(*flatten_inputs(MODEL, args, kwargs))


def _x(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape or (2, 3), **options)


def test_equal_calls_have_equal_signatures() -> None:
    one = _signature(
        _x(), [Batch(_x(4))], flag=True, colour=Colour.RED, nothing=None, size=_x(2).shape, cut=slice(1, None)
    )
    other = _signature(
        _x(), [Batch(_x(4))], flag=True, colour=Colour.RED, nothing=None, size=_x(2).shape, cut=slice(1, None)
    )
    assert one == other
    assert hash(one) == hash(other)
    assert one.differs_only_in_sizes(other)
    assert _signature(float("nan"), -0.0) == _signature(math.nan, -0.0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((_x(),), (_x(dtype=torch.float64),)),
        ((_x(),), (_x(device="meta"),)),
        ((_x(),), (_x(requires_grad=True),)),
        ((_x(),), (_x(2, 3, 1),)),
        ((_x(),), ([_x()],)),
        (([_x()],), ((_x(),),)),
        (({"a": _x()},), ({"b": _x()},)),
        ((Batch(_x()),), (Batch(_x(), "other"),)),
        ((1,), (True,)),
        ((1,), (1.0,)),
        ((0.0,), (-0.0,)),
        ((None,), (0,)),
        ((Colour.RED,), (Colour.BLUE,)),
        ((torch.relu,), (torch.tanh,)),
        ((torch.float32,), (torch.bfloat16,)),
        ((slice(0, 2),), (slice(0, 3),)),
    ],
)
def test_different_calls_have_different_signatures(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert _signature(*one) != _signature(*other)
    assert not _signature(*one).differs_only_in_sizes(_signature(*other))


def test_sizes_alone() -> None:
    assert _signature(_x(2, 3)) != _signature(_x(2, 4))
    assert _signature(_x(2, 3)).differs_only_in_sizes(_signature(_x(2, 4)))
    assert _signature(_x(2, 3)).without_sizes() == _signature(_x(5, 1)).without_sizes()


def test_aliasing() -> None:
    one, other = _x(), _x()
    assert _signature(one, one) == _signature(other, other)
    assert _signature(one, one) != _signature(one, other)
    assert _signature(one, one, other) != _signature(one, other, other)
    tensors, structure = flatten_inputs(MODEL, (one, [other, one]), {"last": one})
    assert [id(tensor) for tensor in tensors] == [id(one), id(other)]
    args, kwargs = structure.rebuild(["a", "b"])
    assert (args, kwargs) == (("a", ["b", "a"]), {"last": "a"})


def test_modes_and_flags() -> None:
    usual = _signature(_x())
    with torch.no_grad():
        assert _signature(_x()) != usual
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _signature(_x()) != usual
        with torch.autocast("cpu", enabled=False):
            assert _signature(_x()).modes.autocast[0][:2] == ("cpu", False)
    MODEL[1].eval()
    assert _signature(_x()) != usual
    MODEL[1].train()
    MODEL[0].bias.requires_grad_(False)
    assert _signature(_x()) != usual
    MODEL[0].bias.requires_grad_(True)
    assert _signature(_x()) == usual


def test_opaque_argument_is_named() -> None:
    with pytest.raises(
        UnsupportedInputError, match=r"argument \[1\]\['a'\]\.ids\[0\] of the call of Sequential is a builtins.set"
    ):
        flatten_inputs(MODEL, (1, {"a": Batch([set()])}), {})
    with pytest.raises(UnsupportedInputError, match=r"argument \['generator'\] .* torch\S*\.Generator"):
        flatten_inputs(MODEL, (), {"generator": torch.Generator()})


def test_reading_a_signature_is_quick() -> None:
    model = nn.ModuleList(example("gpt").make_model() for _ in range(12))
    flags = ModelFlags(model)
    inputs = {"input_ids": _x(), "labels": _x(), "attention_mask": None, "return_dict": True}
    best = math.inf
    for _ in range(30):
        start = time.perf_counter()
        signature = flags.signature(*flatten_inputs(model, (), inputs))
        assert signature in {signature: 1}
        best = min(best, time.perf_counter() - start)
    assert len(list(model.modules())) > 400
    assert best < 1e-3, f"{best * 1e6:.0f} us"
