"""Capture of Hugging Face models in a tiny configuration, with and without symbolic sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from captured_and_eager import CPU, assert_capture_equals_eager, assert_equals_eager
from megatrain_fx.capture import capture
from megatrain_fx.errors import CaptureError, UnsupportedInputError
from megatrain_fx.signature import ModelFlags, flatten_inputs

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

# Without this, Hugging Face models choose another attention kernel in eager mode, by looking at the values of a mask.
_COMMON = {"attn_implementation": "eager", "use_cache": False, "vocab_size": 32}
_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    **_COMMON,
}


def _tokens(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(3, 32, (batch, length))


def _llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA))


def _gpt2() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **_COMMON)
    )


def _mixtral(**options: object) -> torch.nn.Module:
    config = transformers.MixtralConfig(**_LLAMA, num_local_experts=4, experts_implementation="eager", **options)
    return transformers.MixtralForCausalLM(config)


def _t5() -> torch.nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **_COMMON))


@pytest.mark.parametrize("build", [_llama, _gpt2, _mixtral, _t5])
def test_training_call(build: object) -> None:
    model = build().train()
    ids, labels = _tokens(), _tokens()
    captured = assert_capture_equals_eager(model, input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
    assert type(captured.output_tree.unflatten(captured.graph_module(ids, torch.ones_like(ids), labels))).__name__ in (
        "CausalLMOutputWithPast",
        "CausalLMOutputWithCrossAttentions",
        "MoeCausalLMOutputWithPast",
        "Seq2SeqLMOutput",
    )


@pytest.mark.parametrize("build", [_llama, _gpt2, _t5])
def test_symbolic_sizes(build: object) -> None:
    model = build().train()
    captured = capture(model, (), {"input_ids": _tokens(), "labels": _tokens()}, device=CPU, dynamic=True)
    for batch, length in ((3, 5), (2, 12)):
        kwargs = {"input_ids": _tokens(batch, length), "labels": _tokens(batch, length)}
        assert captured.accepts(ModelFlags(model).signature(*flatten_inputs(model, (), kwargs)))
        assert_equals_eager(captured, model, (), kwargs)


def test_tuple_output() -> None:
    ids = _tokens()
    assert_capture_equals_eager(_llama(), ids, labels=ids.clone(), return_dict=False)


def test_cache_is_refused() -> None:
    with pytest.raises(UnsupportedInputError, match="unit model.layers.0 .*DynamicCache.*use_cache=False"):
        capture(_llama(), (), {"input_ids": _tokens(), "use_cache": True}, device=CPU)


def test_router_logits_are_refused() -> None:
    model = _mixtral(output_router_logits=True)
    with pytest.raises(CaptureError, match="output_router_logits must be False"):
        capture(model, (), {"input_ids": _tokens(), "labels": _tokens()}, device=CPU)
