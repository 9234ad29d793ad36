"""Chunked losses against eager PyTorch: numbers, gradients, dtypes, autocast, memory, compiled chunks."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captured_and_eager import CPU
from chunked_and_eager import assert_close, difference, gradients, train_both
from loss_models import CLASSES, LOSSES, WIDTH, LanguageModel, Loss, batch, loss_of, plain, with_logits
from megatrain_fx import chunked_cross_entropy, logit_chunk
from megatrain_fx.capture import capture
from megatrain_fx.chunked_loss import ChunkedLoss
from megatrain_fx.execution_modes import ExecutionModes
from megatrain_fx.logit_chunk import LossSettings
from megatrain_fx.logit_steps import LogitStep, Pointwise
from megatrain_fx.passes.chunk_loss import chunk_loss
from megatrain_fx.private_api import DispatchMode, new_fake_mode
from megatrain_fx.signature import Structure
from megatrain_fx.tree import LEAF
from megatrain_fx.unit_call import UnitCall

SETTINGS = LossSettings(
    mean=True,
    ignore_index=-100,
    label_smoothing=0.0,
    steps=(),
    dtype=torch.float32,
    chunk_bytes=0,
    compiled=False,
)


def chunked(head: nn.Linear, settings: LossSettings = SETTINGS) -> ChunkedLoss:
    call = UnitCall(head, "head", Structure(LEAF, ()), Structure(LEAF, ()), ExecutionModes())
    return ChunkedLoss(call, settings, settings.dtype, 1)


def rows(count: int = 150, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    hidden = torch.randn(count, WIDTH, dtype=dtype, requires_grad=True)
    return hidden, torch.randint(CLASSES, (count,))


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "symbolic"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_equals_eager_in_float32(loss: Loss, dynamic: bool) -> None:
    model = LanguageModel(loss, bias=True)
    tokens, targets = batch(ignore_index=-1 if loss is with_logits else -100)
    actual, expected, eager = train_both(model, tokens, targets, dynamic=dynamic)
    assert_close([actual], [expected], 1e-6)
    assert_close(gradients(model), gradients(eager), 2e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_bfloat16_is_as_near_to_exact_as_eager(loss: Loss) -> None:
    model = LanguageModel(loss, bias=True).bfloat16()
    tokens, targets = batch(ignore_index=-1 if loss is with_logits else -100)
    exact = copy.deepcopy(model).double()
    actual, expected, eager = train_both(model, tokens, targets)
    reference = loss_of(exact(tokens, targets))
    reference.backward()
    assert actual.dtype == expected.dtype
    assert abs(actual.double() - reference) <= 1.5 * abs(expected.double() - reference) + 0.004 * reference
    for mine, theirs, best in zip(gradients(model), gradients(eager), gradients(exact), strict=True):
        assert difference(mine.double(), best) <= 1.5 * difference(theirs.double(), best) + 0.003


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_eager_under_autocast(dtype: torch.dtype, tied: bool) -> None:
    model = LanguageModel(lambda logits, targets: plain(logits.float(), targets), tied=tied)
    with torch.autocast("cpu", dtype=dtype):
        actual, expected, eager = train_both(model, *batch())
    assert_close([actual], [expected], 1e-3)
    assert_close(gradients(model), gradients(eager), 0.02)


def test_half_precision_gradients_survive_a_loss_scale() -> None:
    """Logits that are nearly right have gradients that float16 cannot hold once they are divided by many rows."""
    head = nn.Linear(8, 8, bias=False)
    nn.init.eye_(head.weight)
    targets = torch.randint(8, (512,))
    hidden = (13.0 * F.one_hot(targets, 8)).requires_grad_()
    expected = torch.autograd.grad(F.cross_entropy(head(hidden), targets) * 65536, (hidden, head.weight))
    with torch.autocast("cpu", dtype=torch.float16):
        (loss,) = chunked(head)(hidden, targets)
    actual = torch.autograd.grad(loss * 65536, (hidden, head.weight))
    assert_close(list(actual), list(expected), 0.05)


def test_float64_stays_float64() -> None:
    model = LanguageModel(plain).double()
    actual, expected, eager = train_both(model, *batch())
    assert_close([actual, *gradients(model)], [expected, *gradients(eager)], 1e-13)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("chunk_bytes", [0, 4 * CLASSES * 130, 2**30])
def test_any_number_of_rows(count: int, chunk_bytes: int) -> None:
    head = nn.Linear(WIDTH, CLASSES)
    hidden, targets = rows(count)
    expected = torch.autograd.grad(loss := F.cross_entropy(head(hidden), targets), (hidden, *head.parameters()))
    (mine,) = chunked(head, dataclasses.replace(SETTINGS, chunk_bytes=chunk_bytes))(hidden, targets)
    actual = torch.autograd.grad(mine, (hidden, *head.parameters()))
    assert_close([mine, *actual], [loss, *expected], 2e-6)


def test_no_rows_give_what_eager_gives() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    hidden, targets = rows(0)
    (loss,) = chunked(head)(hidden, targets)
    assert loss.isnan()
    assert F.cross_entropy(head(hidden), targets).isnan()
    assert not torch.autograd.grad(loss, head.weight)[0].any()


def test_chunks_cover_all_rows_once_within_the_limit() -> None:
    settings = dataclasses.replace(SETTINGS, chunk_bytes=4 * CLASSES * 200)
    for count in (0, 1, 191, 192, 193, 1000):
        chunks = list(settings.chunks(count, CLASSES))
        assert [row for chunk in chunks for row in range(count)[chunk]] == list(range(count))
        assert all(chunk.stop - chunk.start <= 192 for chunk in chunks)
        assert len(chunks) == -(-count // 192)


def test_all_ignored_is_nan_with_gradients_of_zero() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    hidden, targets = rows()
    targets.fill_(-100)
    (loss,), eager = chunked(head)(hidden, targets), F.cross_entropy(head(hidden), targets)
    assert loss.isnan()
    assert eager.isnan()
    for result in (loss, eager):
        used = result + result * result  # whose gradient by the loss is NaN
        assert not any(gradient.any() for gradient in torch.autograd.grad(used, (hidden, head.weight)))


@pytest.mark.parametrize("frozen", ["weight", "bias", "hidden"])
def test_only_wanted_gradients_are_computed(frozen: str) -> None:
    head = nn.Linear(WIDTH, CLASSES)
    hidden, targets = rows()
    values = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    values[frozen].requires_grad_(False)
    wanted = [value for name, value in values.items() if name != frozen]
    with LargestTensors() as seen:
        (loss,) = chunked(head)(hidden, targets)
    assert_close(
        list(torch.autograd.grad(loss, wanted)),
        list(torch.autograd.grad(F.cross_entropy(head(hidden), targets), wanted)),
        2e-6,
    )
    assert (CLASSES * WIDTH in seen.sizes) is (frozen != "weight")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_only_the_loss_is_computed(mode: Any) -> None:
    head = nn.Linear(WIDTH, CLASSES)
    hidden, targets = rows()
    with mode(), LargestTensors() as seen:
        (loss,) = chunked(head)(hidden, targets)
    assert not loss.requires_grad
    assert_close([loss], [F.cross_entropy(head(hidden), targets)], 1e-6)
    assert CLASSES * WIDTH not in seen.sizes


def test_two_backward_passes_add_up() -> None:
    head = nn.Linear(WIDTH, CLASSES)
    hidden, targets = rows()
    (loss,) = chunked(head)(hidden, targets)
    (loss * 3).backward(retain_graph=True)
    first = hidden.grad.clone()
    loss.backward()
    (eager,) = torch.autograd.grad(F.cross_entropy(head(hidden), targets), hidden)
    assert_close([first, hidden.grad], [eager * 3, eager * 4], 2e-6)


def test_gradients_of_gradients_are_refused() -> None:
    hidden, targets = rows()
    (loss,) = chunked(nn.Linear(WIDTH, CLASSES))(hidden, targets)
    with pytest.raises(RuntimeError, match="loss_chunk_bytes=None"):
        torch.autograd.grad(loss, hidden, create_graph=True)


class LargestTensors(DispatchMode):
    """Notes how many elements every tensor has that is made meanwhile (views left out), inside the operator too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.megatrain_fx.chunked_cross_entropy.default:
            with self:
                return chunked_cross_entropy._run(*args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        old = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        made = result if isinstance(result, (tuple, list)) else [result]
        made = [value for value in made if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in old]
        self.sizes |= {tensor.numel() for tensor in made}
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_bounded(dtype: torch.dtype) -> None:
    model = LanguageModel(lambda logits, targets: plain(logits.float(), targets)).to(dtype)
    tokens, targets = batch(16, 256)
    captured = capture(model, (tokens, targets), {}, device=CPU)
    largest = {}
    for limit in (2**19, 2**30):
        module = chunk_loss(captured, limit).graph_module
        with LargestTensors() as seen:
            module(tokens, targets)[0].backward()
        largest[limit] = max(seen.sizes)
    assert largest[2**30] == 16 * 256 * CLASSES
    assert largest[2**19] * 4 <= 2**19


def test_a_trace_is_one_operator_of_the_right_shapes() -> None:
    head = nn.Linear(WIDTH, CLASSES).bfloat16()
    with new_fake_mode() as mode:
        fakes = [mode.from_tensor(value) for value in (*rows(5000, torch.bfloat16), head.weight, head.bias)]
        arguments = (fakes[0], fakes[2], fakes[3], fakes[1], (True, True, False), torch.bfloat16, SETTINGS)
        found = chunked_cross_entropy.chunked_cross_entropy(*arguments)
    assert [(tuple(one.shape), one.dtype) for one in found] == [
        ((), torch.float32),
        ((), torch.float32),
        ((5000, WIDTH), torch.bfloat16),
        ((CLASSES, WIDTH), torch.bfloat16),
        ((0,), torch.bfloat16),
    ]


STEPS = (
    LogitStep(Pointwise.CAST, dtype=torch.float64),
    LogitStep(Pointwise.DIVIDE, 0.1),
    LogitStep(Pointwise.TANH),
    LogitStep(Pointwise.MULTIPLY, 1e-7),
)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_steps_parse_back(step: LogitStep) -> None:
    assert LogitStep.parse(str(step)) == step


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_chunks_equal_eager_ones(dtype: torch.dtype) -> None:
    settings = dataclasses.replace(SETTINGS, label_smoothing=0.1, steps=STEPS[1:3])
    head = nn.Linear(WIDTH, CLASSES).to(dtype)
    hidden, targets = rows(150, dtype)
    torch._dynamo.utils.counters.clear()
    results = []
    for compiled in (True, False):
        (loss,) = chunked(head, dataclasses.replace(settings, compiled=compiled))(hidden, targets)
        results.append([loss, *torch.autograd.grad(loss, (hidden, head.weight))])
    assert_close(*results, 1e-5 if dtype is torch.float32 else 0.01)
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_failed_compilation_warns_once_and_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any) -> Any:
        def call(*args: Any) -> Any:
            raise RuntimeError("no C++ compiler\nfound")

        return call

    monkeypatch.setattr(torch, "compile", fail)
    logit_chunk._compiled_chunk.cache_clear()
    head = nn.Linear(WIDTH, CLASSES)
    hidden, targets = rows()
    module = chunked(head, dataclasses.replace(SETTINGS, compiled=True))
    with pytest.warns(UserWarning, match="torch.compile failed: no C\\+\\+ compiler$"):
        (loss,) = module(hidden, targets)
    assert_close([loss], [F.cross_entropy(head(hidden), targets)], 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(hidden, targets)
    logit_chunk._compiled_chunk.cache_clear()
