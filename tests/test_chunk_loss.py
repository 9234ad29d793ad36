"""The pass that makes losses work by chunks: what it recognises and refuses, and Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from captured_and_eager import CPU, assert_equals_eager
from chunked_and_eager import assert_close, gradients, train_both
from loss_models import (
    CLASSES,
    WIDTH,
    LanguageModel,
    Loss,
    batch,
    by_sizes,
    capped_in_place,
    classes_second,
    plain,
    with_logits,
)
from megatrain_fx.capture import Captured, capture
from megatrain_fx.chunked_loss import ChunkedLoss
from megatrain_fx.passes.chunk_loss import chunk_loss


def captured_call(model: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    return capture(model, args, kwargs, device=CPU)


def is_chunked(captured: Captured) -> bool:
    return any(isinstance(call, ChunkedLoss) for call in captured.unit_calls)


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name.startswith("megatrain_fx")]


@pytest.mark.parametrize("loss", [by_sizes, capped_in_place, classes_second], ids=lambda loss: loss.__name__)
def test_what_was_captured_is_left_alone(loss: Loss) -> None:
    model = LanguageModel(loss)
    tokens, targets = batch(ignored=0.0)
    captured = captured_call(model, tokens, targets)
    before = str(captured.graph_module.graph), list(captured.unit_calls), captured.output_tree
    chunked = chunk_loss(captured, 0)
    assert is_chunked(chunked)
    assert (str(captured.graph_module.graph), list(captured.unit_calls), captured.output_tree) == before
    assert_equals_eager(captured, model, (tokens, targets))
    assert not chunked.graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.cross_entropy_loss.default
    )


def test_the_head_becomes_one_unit_call(caplog: pytest.LogCaptureFixture) -> None:
    model = LanguageModel(plain)
    captured = captured_call(model, *batch())
    chunked = chunk_loss(captured, 1000)
    assert not warnings(caplog)
    (node,) = [n for n in chunked.graph_module.graph.nodes if n.target == "chunked_loss_0"]
    module = chunked.graph_module.get_submodule("chunked_loss_0")
    assert isinstance(module, ChunkedLoss)
    assert (module.unit, module.path) == (model.head, "head")
    assert chunked.unit_calls == (*captured.unit_calls[:-1], module)
    assert [tuple(value.shape) for value in node.meta["val"]] == [()]
    assert "chunk_bytes=1000" in str(module)
    assert chunked.graph_module.training is captured.graph_module.training


def test_returned_logits_become_none() -> None:
    tokens, targets = batch(ignore_index=-1)
    captured = captured_call(LanguageModel(with_logits), tokens, targets)
    chunked = chunk_loss(captured, 0)
    logits, loss = chunked.output_tree.unflatten(chunked.graph_module(tokens, targets))
    assert logits is None
    assert loss.ndim == 0
    assert chunk_loss(captured, 0, keep_logits=True) is captured


def test_keep_logits_does_not_matter_where_none_are_returned() -> None:
    assert is_chunked(chunk_loss(captured_call(LanguageModel(plain), *batch()), 0, keep_logits=True))


def test_small_logits_stay_whole() -> None:
    captured = captured_call(LanguageModel(plain), *batch(3, 67))
    size = 3 * 67 * CLASSES * 4
    assert chunk_loss(captured, size) is captured
    assert is_chunked(chunk_loss(captured, size - 1))


def test_size_is_counted_in_the_dtype_of_the_loss() -> None:
    model = LanguageModel(lambda logits, targets: plain(logits.float(), targets)).bfloat16()
    assert is_chunked(chunk_loss(captured_call(model, *batch(3, 67)), 3 * 67 * CLASSES * 4 - 1))


def test_calls_without_gradients_stay_whole() -> None:
    with torch.no_grad():
        captured = captured_call(LanguageModel(plain), *batch())
    assert chunk_loss(captured, 0) is captured


def _used_twice(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return plain(logits, targets), logits.argmax(-1)


def _two_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits, targets) + plain(logits, targets.flip(0))


def _class_weights(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=torch.ones(CLASSES))


def _probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(targets.flatten(), CLASSES).float())


def _unreduced(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").mean()


def _fewer_classes(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits[..., : CLASSES - 1].contiguous(), targets % 7)


def _temperature_by_token(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits * (targets.unsqueeze(-1) + 1), targets)


def _detached(logits: Tensor, targets: Tensor) -> Tensor:
    return plain(logits.detach(), targets)


def _wrong_classes(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2).reshape(-1, targets.shape[1]), targets.new_zeros(3 * CLASSES))


REFUSED = (
    _used_twice,
    _two_losses,
    _class_weights,
    _probabilities,
    _unreduced,
    _fewer_classes,
    _temperature_by_token,
    _detached,
    _wrong_classes,
)


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_other_uses_of_logits_are_refused(loss: Loss, caplog: pytest.LogCaptureFixture) -> None:
    captured = captured_call(LanguageModel(loss), *batch(ignored=0.0))
    assert chunk_loss(captured, 2**30) is captured
    assert not warnings(caplog)
    assert chunk_loss(captured, 0) is captured
    (message,) = warnings(caplog)
    assert "will exist as a whole" in message


class _Head(nn.Linear):
    pass


def _subclass(model: LanguageModel) -> None:
    model.head = _Head(WIDTH, CLASSES)


def _forward_hook(model: LanguageModel) -> None:
    model.head.register_forward_hook(lambda module, args, output: output * 2)


def _forward_pre_hook(model: LanguageModel) -> None:
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _backward_hook(model: LanguageModel) -> None:
    model.head.register_full_backward_hook(lambda module, inputs, outputs: None)


def _parametrization(model: LanguageModel) -> None:
    parametrizations.weight_norm(model.head)


def _own_forward(model: LanguageModel) -> None:
    model.head.forward = lambda hidden: F.linear(hidden * 2, model.head.weight)


@pytest.mark.parametrize(
    "change", [_subclass, _forward_hook, _forward_pre_hook, _backward_hook, _parametrization, _own_forward]
)
def test_heads_that_do_more_are_refused(change: Callable[[LanguageModel], None]) -> None:
    model = LanguageModel(plain)
    change(model)
    captured = captured_call(model, *batch())
    assert chunk_loss(captured, 0) is captured


class TwoHeads(LanguageModel):
    """Two heads with a loss each; in between a unit of its own."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.second = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        hidden = self.layers[0](self.embedding(tokens))
        first, second = self.head(hidden), self.second(input=self.layers[1](hidden))
        return {"logits": first, "loss": self.loss(first, targets) + 0.5 * self.loss(second, targets.flip(0))}


def test_two_heads() -> None:
    model = TwoHeads()
    actual, expected, eager = train_both(model, *batch())
    captured = chunk_loss(captured_call(model, *batch()), 0)
    assert [call.path for call in captured.unit_calls if isinstance(call, ChunkedLoss)] == ["head", "second"]
    used = [parameter for name, parameter in eager.named_parameters() if not name.startswith("norm")]
    mine = [parameter for name, parameter in model.named_parameters() if not name.startswith("norm")]
    assert_close([actual, *(p.grad for p in mine)], [expected, *(p.grad for p in used)], 2e-6)


_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 199, "use_cache": False}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}


def _huggingface(name: str, tied: bool = False) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {**_SIZES, **_HEADS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    if name == "GPT2":
        for old, new in (
            ("hidden_size", "n_embd"),
            ("num_hidden_layers", "n_layer"),
            ("num_attention_heads", "n_head"),
        ):
            sizes[new] = sizes.pop(old)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "tied"), [("Llama", False), ("Qwen2", True), ("GPT2", True), ("Gemma2", True), ("Cohere", True)]
)
def test_huggingface_models(name: str, tied: bool, dtype: torch.dtype) -> None:
    model = _huggingface(name, tied).to(dtype).train()
    ids = torch.randint(3, 199, (3, 50))
    labels = ids.masked_fill(torch.rand(3, 50) < 0.3, -100)
    actual, expected, eager = train_both(model, input_ids=ids, labels=labels)
    assert_close([actual], [expected], 1e-6 if dtype is torch.float32 else 1e-3)
    assert_close(gradients(model), gradients(eager), 5e-6 if dtype is torch.float32 else 0.03)


def test_huggingface_outputs_leave_out_the_logits() -> None:
    model = _huggingface("Llama").train()
    ids = torch.randint(3, 199, (2, 9))
    captured = chunk_loss(captured_call(model, input_ids=ids, labels=ids), 0)
    output = captured.output_tree.unflatten(captured.graph_module(ids))
    assert type(output).__name__ == "CausalLMOutputWithPast"
    assert list(output) == ["loss"]
    assert output.logits is None


def test_huggingface_divisor_of_accumulated_batches() -> None:
    model = _huggingface("Llama").train()
    ids = torch.randint(3, 199, (2, 9))
    arguments = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(40)}
    actual, expected, eager = train_both(model, **arguments)
    assert_close([actual, *gradients(model)], [expected, *gradients(eager)], 5e-6)
