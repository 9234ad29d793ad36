"""What ``megatrain.trace`` returns: graphs, schedule, history, templates and layout, also for a model on meta."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import megatrain_fx as megatrain
from models import example


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_parts_of_a_program(device: str) -> None:
    entry = example("gpt_tied")
    model = entry.make_model().to(device)
    args, kwargs = entry.make_inputs(2)
    program = megatrain.trace(model, *args, **kwargs, megatrain_options={"device": "cpu", "stage_bytes": 0})
    assert isinstance(program.captured, fx.GraphModule)
    assert isinstance(program.graph_module, fx.GraphModule)
    assert isinstance(program.schedule, megatrain.Schedule)
    assert program.history[-1][1] == program.schedule
    assert next(name for name, _ in program.history) == "lower_stages"
    assert len(program.templates) < len(program.stages)
    assert set(program.layout.places) == {name for name, _ in model.named_parameters()}
    program.schedule.verify()
    assert megatrain.Schedule.parse(str(program.schedule)) == program.schedule


def test_nothing_of_the_model_runs_or_changes() -> None:
    entry = example("gpt")
    model = entry.make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    args, kwargs = entry.make_inputs(2)
    megatrain.trace(model, *args, **kwargs, megatrain_options={"device": "cpu", "stage_bytes": 0})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
