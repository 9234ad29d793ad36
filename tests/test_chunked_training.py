"""Compiled models whose loss works by chunks: options, traces, training, backward twice, evaluation."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain_fx as megatrain
from chunked_and_eager import assert_close, gradients
from loss_models import LanguageModel, batch, loss_of, plain, with_logits
from megatrain_fx.chunked_loss import ChunkedLoss
from megatrain_fx.errors import ConfigError
from megatrain_fx.private_api import is_fake
from megatrain_fx.unit_call import UnitCall

OPTIONS = {"device": "cpu", "loss_chunk_bytes": 0, "stage_bytes": 0}


def test_trace_shows_the_loss_in_the_last_stage() -> None:
    with torch.device("meta"):
        model = LanguageModel(plain, tied=True)
    program = megatrain.trace(model, *batch(), megatrain_options=OPTIONS)
    last = program.stages[-1]
    assert "head" in last.units
    assert any(isinstance(module, ChunkedLoss) for module in last.module.modules())
    (template,) = [template for template in program.templates if last.index in template.stages]
    assert template.joint is not None
    assert [
        node
        for node in template.joint.graph.nodes
        if node.target is torch.ops.megatrain_fx.chunked_cross_entropy.default
    ]


def _train(model: nn.Module, steps: int, **kwargs: Any) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        tokens, targets = batch(2, 40 + step // 2)
        loss = loss_of(model(tokens, targets, **kwargs))
        (loss / 2).backward()
        (loss_of(model(tokens.flip(0), targets.flip(0), **kwargs)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(
    ("tied", "options"),
    [(False, {"slots": 1, "slabs": 1}), (False, {"chaos": 3}), (True, {}), (True, {"chaos": 5})],
    ids=["one_slot", "chaos", "tied", "tied_chaos"],
)
def test_compiled_training_equals_eager(tied: bool, options: dict[str, Any]) -> None:
    model = LanguageModel(plain, tied=tied)
    eager = copy.deepcopy(model)
    model = megatrain.compile(model, **OPTIONS, **options)
    assert_close(list(_train(model, 4)), list(_train(eager, 4)), 1e-5)
    assert_close(list(model.parameters()), list(eager.parameters()), 1e-4)


@pytest.mark.slow
def test_compiled_templates_compile_the_chunks_too() -> None:
    model = LanguageModel(plain)
    eager = copy.deepcopy(model)
    program = megatrain.trace(model, *batch(), megatrain_options={**OPTIONS, "template": "inductor"})
    (loss,) = [call for call in program.capture.unit_calls if isinstance(call, ChunkedLoss)]
    assert loss.settings.compiled
    model = megatrain.compile(model, **OPTIONS, template="inductor")
    assert_close(_train(model, 1), _train(eager, 1), 1e-5)
    assert_close(list(model.parameters()), list(eager.parameters()), 1e-4)


def test_the_last_stage_runs_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = ChunkedLoss.forward

    def counted(self: ChunkedLoss, *values: Any) -> tuple[Tensor, ...]:
        if not is_fake(values[0]):
            calls.append(self.path)
        return forward(self, *values)

    monkeypatch.setattr(ChunkedLoss, "forward", counted)
    model = megatrain.compile(LanguageModel(plain), **OPTIONS)
    for step in range(1, 4):
        model(*batch()).backward()
        assert calls == ["head"] * step


def test_backward_twice_of_a_compiled_model() -> None:
    model = LanguageModel(plain)
    eager = copy.deepcopy(model)
    tokens, targets = batch()
    for each in (eager, megatrain.compile(model, **OPTIONS)):
        loss = each(tokens, targets)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_close(gradients(model), gradients(eager), 5e-6)


def test_evaluation_has_logits_and_training_has_them_on_request() -> None:
    tokens, targets = batch(ignore_index=-1)
    eager = LanguageModel(with_logits)
    for keep in (False, True):
        model = megatrain.compile(copy.deepcopy(eager), **OPTIONS, keep_logits=keep)
        logits, loss = model(tokens, targets)
        loss.backward()
        assert (logits is not None) is keep
        with torch.no_grad():
            assert torch.equal(model(tokens, targets)[0], eager(tokens, targets)[0])


def test_never_and_by_default_small_models_are_left_alone() -> None:
    for options in ({}, {"loss_chunk_bytes": None}):
        program = megatrain.trace(LanguageModel(plain), *batch(), megatrain_options={"device": "cpu", **options})
        assert type(program.capture.unit_calls[-1]) is UnitCall


@pytest.mark.parametrize(
    "option", [{"loss_chunk_bytes": -1}, {"loss_chunk_bytes": 2.5}, {"keep_logits": "yes"}], ids=str
)
def test_options_are_checked(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        megatrain.compile(LanguageModel(plain), **option)
