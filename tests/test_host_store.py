"""The host store: parameters and gradients are views of it, whatever the user does; it goes when the model goes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import megatrain_fx as megatrain
from comparison import WIDTH, Pair, features, make_pair, perceptron
from megatrain_fx.layout import plan_layout
from megatrain_fx.store import HostStore
from models import example, scalar_loss


def make_store(model: nn.Module) -> HostStore:
    return HostStore(model, plan_layout(model, [list(model.parameters())]), torch.device("cpu"), "none")


def shows(flat: Tensor, view: Tensor) -> bool:
    """Whether a view lies in a flat region."""
    start = flat.data_ptr()
    return start <= view.data_ptr() and view.data_ptr() + view.nbytes <= start + flat.nbytes


def test_parameters_become_views_of_their_region_with_equal_values() -> None:
    expected, model = example("odd_parameters").make_model(), example("odd_parameters").make_model()
    store = make_store(model)
    for (name, before), (_, after) in zip(expected.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(before, after)
        assert before.numel() == 0 or shows(store.weights(0), after), name
        assert after.is_leaf
        assert after.requires_grad


def test_writing_a_parameter_writes_the_region() -> None:
    model = nn.Linear(2, 2, bias=False)
    store = make_store(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert store.weights(0)[:16].view(torch.float32).tolist() == [3.0] * 4


def test_tied_parameters_are_stored_once() -> None:
    model = example("gpt_tied").make_model()
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    store = make_store(model)
    assert model.head.weight is model.tokens.weight
    assert size <= store.weights(0).numel() < size + 256 * len(list(model.parameters())) + 256


def test_gradients_after_a_step_lie_in_the_store() -> None:
    model = make_pair(perceptron).compiled
    model(features()).sum().backward()
    store = model.__dict__["_megatrain"].store
    for name, parameter in model.named_parameters():
        region = store.layout.places[name].region
        assert shows(store.gradients(region), parameter.grad)
        assert shows(store.weights(region), parameter)


def test_values_assigned_to_data_are_taken_over() -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    for model in pair.both:
        model[0].weight.data = torch.ones(WIDTH, WIDTH)
        model[2].weight.data = model[2].weight.data.t()
        model[4].weight.data = model[4].weight.data[:, torch.arange(WIDTH - 1, -1, -1)]
    pair.step(features(seed=2))
    pair.step(features(seed=3))
    store = pair.compiled.__dict__["_megatrain"].store
    assert all(any(shows(store.weights(r), p) for r in range(3)) for p in pair.compiled.parameters())


def test_vectors_of_parameters() -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    for model in pair.both:
        vector_to_parameters(parameters_to_vector(model.parameters()) * 0.5, model.parameters())
    pair.step(features(seed=2))


def test_data_assigned_between_forward_and_backward_counts_from_the_next_forward() -> None:
    pair = make_pair(perceptron)
    losses = [scalar_loss(model(features())) for model in pair.both]
    for model, loss in zip(pair.both, losses, strict=True):
        model[2].weight.data = torch.ones(WIDTH, WIDTH)
        loss.backward()
    pair.check()
    pair.step(features(seed=2))


@pytest.mark.parametrize("data", [torch.ones(3), torch.ones(WIDTH, WIDTH, dtype=torch.float64)], ids=["shape", "dtype"])
def test_data_of_another_kind_is_refused(data: Tensor) -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    kept = pair.compiled[2].weight.data
    pair.compiled[2].weight.data = data
    with pytest.raises(megatrain.ModelDeviceError, match=r"parameter 2.weight was torch.float32 \[16, 16\]"):
        pair.compiled(features())
    pair.compiled[2].weight.data = kept
    pair.step(features())


def modify(model: nn.Module, how: str) -> None:
    if how == "optimizer":
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1)), *model.parameters()], lr=0.1).step()
    elif how == "load_state_dict":
        model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()})
    else:
        with torch.no_grad():
            model[0].weight.mul_(2)


@pytest.mark.parametrize("how", ["optimizer", "load_state_dict", "in_place"])
def test_stale_weights(how: str) -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    loss = scalar_loss(pair.compiled(features()))
    modify(pair.compiled, how)
    with pytest.raises(megatrain.StaleWeightsError, match="between the forward pass and this backward pass"):
        loss.backward()
    pair.eager.load_state_dict(pair.compiled.state_dict())
    pair.step(features())


def test_parts_shared_by_two_compiled_models() -> None:
    class Head(nn.Module):
        def __init__(self, trunk: nn.Module) -> None:
            super().__init__()
            self.trunk = trunk
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.trunk(inputs).tanh())

    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        trunk = nn.Linear(WIDTH, WIDTH)
        return [Head(trunk), Head(trunk)]

    eager, compiled = build(), [megatrain.compile(model, device="cpu", stage_bytes=0) for model in build()]
    pairs = [Pair(one, other, torch.device("cpu"), reused=True) for one, other in zip(eager, compiled, strict=True)]
    optimizers = [
        torch.optim.SGD([*models[0].parameters(), *models[1].head.parameters()], lr=0.1) for models in (eager, compiled)
    ]
    for seed in range(3):
        for models, optimizer in zip((eager, compiled), optimizers, strict=True):
            (scalar_loss(models[0](features(seed=seed))) + scalar_loss(models[1](features(seed=9)))).backward()
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(eager[0].parameters(), compiled[0].parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-7)
    assert torch.allclose(pairs[1].eager(features()), pairs[1].compiled(features()), rtol=1e-5, atol=1e-6)


def test_thawing_a_parameter_keeps_the_gradients_of_its_neighbours() -> None:
    pair = make_pair(perceptron, stage_bytes=2**30)
    for model in pair.both:
        model[4].requires_grad_(False)
    pair.step(features())
    for model in pair.both:
        model[4].requires_grad_(True)
    pair.step(features(seed=2))


def test_memory_report() -> None:
    pair = make_pair(perceptron, slots=2)
    pair.step(features())
    report = megatrain.memory(pair.compiled)
    weights = sum(parameter.nbytes for parameter in pair.eager.parameters())
    assert report.parameter_bytes == weights
    assert report.slot_bytes == report.weight_peak_bytes
    assert weights / 3 <= report.slot_bytes / 2 < weights / 3 + 512
    assert report.slab_bytes >= weights / 3


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to count threads")
def test_deleted_models_free_threads_and_memory() -> None:
    make_pair(perceptron).step(features())
    gc.collect()
    before = threads()
    for _ in range(6):
        pair = make_pair(perceptron, slots=3, chaos=0)
        pair.step(features())
        assert threads() > before
        model, store = weakref.ref(pair.compiled), weakref.ref(pair.compiled.__dict__["_megatrain"].store)
        del pair
        gc.collect()
        assert model() is None
        assert store() is None
    assert threads() <= before


def test_parameters_and_gradients_outlive_the_model() -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    kept = [list(model.parameters()) for model in pair.both]
    del pair
    gc.collect()
    for expected, actual in zip(*kept, strict=True):
        assert torch.equal(expected, actual)
        assert torch.equal(expected.grad, actual.grad)


PROGRAM = """
import torch, megatrain_fx as megatrain
model = megatrain.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), device="cpu", chaos=0)
loss = model(torch.ones(2, 4)).sum()
print("done", flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["loss.backward()", "raise SystemExit(3)"])
def test_a_process_ends_while_a_model_lives(end: str) -> None:
    root = Path(megatrain.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=root,
        check=False,
    )
    assert found.stdout == "done\n"
    assert found.returncode == (3 if "SystemExit" in end else 0), found.stderr


def test_a_forked_process_reads_data_beside_a_model() -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4, num_workers=1)
    for batch in loader:
        pair.step(features(seed=int(batch.sum())))
