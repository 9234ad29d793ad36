"""Train a Hugging Face model through the one line: a tiny Llama with random weights, nothing is downloaded.

    python examples/hugging_face.py

With real weights only the first line changes: ``model = AutoModelForCausalLM.from_pretrained(...)``.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain_fx as megatrain

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def main() -> None:
    """Overfit one batch of bytes, then save the model as ``transformers`` does."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    model = megatrain.compile(model, device=device, slots=2, stage_bytes=2**18)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = b"The schedule is a program: it can be printed, compared, proven and executed. " * 4
    tokens = torch.tensor([list(text[start : start + 64]) for start in range(0, 128, 16)], device=device)
    for step in range(10):
        # The key-value cache is for generation: a cache object is neither a tensor nor a constant, so it is refused.
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1:2d}   loss {loss.item():.4f}")
    model.save_pretrained("runs/hugging_face")
    print("saved to runs/hugging_face")


if __name__ == "__main__":
    main()
