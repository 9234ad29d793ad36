"""The report of a compiled model's memory: what each line counts."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import megatrain_fx as megatrain
from comparison import features, make_pair, perceptron


def test_gradients_are_counted_once_the_model_trains() -> None:
    pair = make_pair(perceptron)
    with torch.no_grad():
        pair.forward(features())
    before = megatrain.memory(pair.compiled)
    assert before.gradient_bytes == before.host_slab_bytes == 0
    pair.step(features())
    after = megatrain.memory(pair.compiled)
    assert before.parameter_bytes == after.parameter_bytes <= after.gradient_bytes < 1.5 * after.parameter_bytes
    assert after.host_slab_bytes == after.slab_bytes > 0


def test_the_state_of_an_attached_optimizer_is_counted() -> None:
    @dataclasses.dataclass
    class Optimizer:
        state_bytes: int

    pair, optimizer = make_pair(perceptron), Optimizer(12345)
    pair.step(features())
    before = megatrain.memory(pair.compiled)
    pair.compiled.__dict__["_megatrain"].optimizer = optimizer
    after = megatrain.memory(pair.compiled)
    assert before.optimizer_bytes == 0
    assert after.optimizer_bytes == 12345
    assert after.host_bytes - before.host_bytes == 12345
    assert after.host_bytes_per_parameter == after.host_bytes / after.parameters
    assert after.parameters == sum(parameter.numel() for parameter in pair.eager.parameters())


def test_the_state_of_our_optimizer_is_counted() -> None:
    pair = make_pair(perceptron)
    optimizer = megatrain.optim.AdamW(pair.compiled)
    assert optimizer.state_bytes == 0
    pair.compiled(features()).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    report = megatrain.memory(pair.compiled)
    assert 2 * report.parameter_bytes <= report.optimizer_bytes == optimizer.state_bytes < 4 * report.parameter_bytes


@pytest.mark.parametrize("pin", ["register", "staging", "none"])
def test_a_model_that_was_not_called_holds_its_parameters_only(pin: str) -> None:
    report = megatrain.memory(make_pair(perceptron, pin=pin).compiled)
    assert report.host_bytes == report.parameter_bytes
    assert report.weight_peak_bytes == 0
    assert report.staged == (pin == "staging")


def test_the_text_is_a_short_table() -> None:
    report = megatrain.MemoryReport(
        parameters=2**30,
        parameter_bytes=2**31,
        gradient_bytes=2**31,
        optimizer_bytes=10 * 2**30,
        host_slab_bytes=0,
        staging_bytes=2**20,
        slot_bytes=1000,
        slab_bytes=2048,
        staged=True,
    )
    assert str(report).splitlines() == [
        "host parameters       2.0 GiB",
        "host gradients        2.0 GiB",
        "host optimizer       10.0 GiB",
        "host slabs            0 bytes",
        "host staging          1.0 MiB",
        "device slots       1000 bytes",
        "device slabs          2.0 KiB",
        "14.00 host bytes a parameter, copies staged",
    ]
