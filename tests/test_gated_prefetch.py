"""A prefetch waits for the pending update of its region, however long: `prev` dependencies at run time."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import megatrain_fx as megatrain


@pytest.mark.parametrize("pin", ["none", "staging"])
@pytest.mark.parametrize("region", [0, 2])
def test_a_forward_waits_for_the_update_of_each_region(pin: str, region: int) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    megatrain.compile(model, device="cpu", slots=2, stage_bytes=0, pin=pin)
    inputs = torch.randn(2, 8)
    model(inputs).sum().backward()
    parameter = model[region].weight
    gate = model.__dict__["_megatrain"].store.gate(region)
    outputs: list[torch.Tensor] = []
    gate.close()
    caller = threading.Thread(target=lambda: outputs.append(model(inputs).detach()))
    caller.start()
    try:
        caller.join(timeout=0.3)
        assert caller.is_alive(), "the forward did not wait for the update"
        parameter.data.zero_()  # what the update does meanwhile
    finally:
        gate.open()
        caller.join(timeout=30)
    hidden = inputs
    with torch.no_grad():
        for layer in model:
            hidden = nn.functional.linear(hidden, layer.weight, layer.bias)
    assert torch.equal(outputs[0], hidden)
