"""The state of overlapped optimizers: saved, loaded, resumed, and how much memory it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import megatrain_fx as megatrain
from optimizer_training import (
    assert_equal,
    build,
    compiled,
    equal_bits,
    master_of,
    modes,
    needs_aten_fma,
    one_torch_thread,  # noqa: F401  a fixture
    train,
    values,
)

optim = megatrain.optim

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


@modes
@pytest.mark.parametrize(
    ("precision", "first"), [("fp32", "model"), ("bf16-split", "model"), ("bf16-split", "optimizer"), ("bf16", "model")]
)
def test_training_resumes_to_the_bit(tmp_path: Any, options: dict[str, Any], first: str, precision: Any) -> None:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    stochastic = {"stochastic_rounding": precision == "bf16"}
    model = compiled(dtype, precision=precision)
    optimizer = optim.AdamW(model, lr=0.01, **options, **stochastic)
    train(model, optimizer, range(3))
    optimizer.synchronize()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    train(model, optimizer, range(3, 6))
    torch.manual_seed(99)
    again = compiled(dtype, precision=precision)
    resumed = optim.AdamW(again, lr=0.5, **options, **stochastic)
    saved = torch.load(tmp_path / "checkpoint.pt")
    parts = {"model": again, "optimizer": resumed}
    for part in (first, *(parts.keys() - {first})):
        parts[part].load_state_dict(saved[part])
    train(again, resumed, range(3, 6))
    assert_equal(resumed, optimizer)


def test_a_state_is_loaded_into_a_running_optimizer() -> None:
    model = compiled(torch.bfloat16)
    optimizer = optim.AdamW(model, lr=0.01)
    train(model, optimizer, range(2))
    optimizer.synchronize()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    state = optimizer.state_dict()
    state["state"] = {
        k: {n: torch.clone(v) if torch.is_tensor(v) else v for n, v in s.items()} for k, s in state["state"].items()
    }
    train(model, optimizer, range(2, 4))
    expected = [value.clone() for value in values(optimizer)]
    optimizer.synchronize()
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 4))
    assert all(equal_bits(*pair) for pair in zip(values(optimizer), expected, strict=True))


@needs_aten_fma
def test_the_state_of_torch_adamw_is_taken_over() -> None:
    eager = build()
    theirs = torch.optim.AdamW(eager.parameters(), lr=0.01, fused=True)
    train(eager, theirs, range(3))
    model = compiled()
    mine = optim.AdamW(model, lr=0.5)
    mine.load_state_dict(theirs.state_dict())
    model.load_state_dict(eager.state_dict())
    train(model, mine, range(3, 5))
    train(eager, theirs, range(3, 5))
    mine.synchronize()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), eager.parameters(), strict=True))
    back = torch.optim.AdamW(eager.parameters(), lr=0.5)
    back.load_state_dict(mine.state_dict())
    train(eager, back, range(5, 6))


def test_a_modified_parameter_loses_its_remainder() -> None:
    model = compiled(torch.bfloat16)
    optimizer = optim.AdamW(model, lr=0.01)
    train(model, optimizer, range(2))
    optimizer.synchronize()
    changed, kept = list(model.parameters())[:2]
    kept_before = master_of(optimizer, kept)
    with torch.no_grad():
        changed.fill_(0.5)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, range(2, 3))
    assert bool((master_of(optimizer, changed) == 0.5).all())
    assert torch.equal(master_of(optimizer, kept), kept_before)


def test_wrong_states_are_refused() -> None:
    model = compiled()
    optimizer = optim.AdamW(model)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict({**state, "param_groups": [{**state["param_groups"][0], "params": [0]}]})
    with pytest.raises(megatrain.ConfigError, match=r"loaded exp_avg of parameter 0\.weight has shape \[3\]"):
        optimizer.load_state_dict({**state, "state": {0: {"step": 1, "exp_avg": torch.zeros(3)}}})


def test_host_memory_of_split_bfloat16_is_14_bytes_a_parameter() -> None:
    model = megatrain.compile(nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))).bfloat16(), device="cpu")
    optimizer = optim.AdamW(model)
    model(torch.randn(2, 256).bfloat16()).float().sum().backward()
    optimizer.step()
    optimizer.synchronize()
    store = model.__dict__["_megatrain"].store
    regions = [region.index for region in store.layout.regions]
    memories = [optimizer._steps.states.memory(store, region) for region in regions]
    state = sum(part.size for memory in memories for part in memory._memory.values())
    weights = sum(region.bytes for region in store.layout.regions)
    gradients = sum(store.gradient_bytes(region) for region in regions)
    assert (state + weights + gradients) / sum(p.numel() for p in model.parameters()) <= 14.05
