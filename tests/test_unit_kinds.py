"""Units that are hard to rerun: their forward depends on modes, buffers, hooks, random numbers, or writes in place."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from comparison import WIDTH, features, make_pair


class Wrapped(nn.Module):
    """A linear layer followed by a function of the unit itself."""

    def __init__(self, function: Callable[[Wrapped, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(self, hidden)


def units(function: Callable[[Wrapped, Tensor], Tensor], depth: int = 3) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(Wrapped(function) for _ in range(depth)))


class Recurrent(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.2)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.recurrent(self.first(inputs))[0])


class Attending(nn.Module):
    """Residual layers of PyTorch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + layer(inputs, inputs, inputs)[0]
        return inputs


def sequences(device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase], device: torch.device) -> None:
    pair = make_pair(lambda: Recurrent(kind), device, chaos=0)
    for seed in range(2):
        pair.step(sequences(device, seed), seed=seed)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair.both]
    for optimizer in optimizers:
        optimizer.step()
    if device.type == "cpu":
        pair.step(sequences(device, 5))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "build",
    [
        Attending,
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True) for _ in range(2))),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True), 2),
    ],
    ids=["attention", "encoder_layers", "encoder"],
)
def test_attention_layers_with_and_without_their_fast_path(
    build: Callable[[], nn.Module], training: bool, device: torch.device
) -> None:
    pair = make_pair(build, device, chaos=0)
    for model in pair.both:
        model.train(training)
    pair.step(sequences(device))
    with torch.no_grad():
        pair.forward(sequences(device, 1))
    pair.check()


def test_decoder_layers_with_masks(device: torch.device) -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True) for _ in range(2))

        def forward(self, target: Tensor, memory: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
            for layer in self.layers:
                target = layer(target, memory, tgt_mask=mask)
            return target

    pair = make_pair(Decoder, device)
    pair.step(sequences(device), sequences(device, 3))


@pytest.mark.parametrize(
    "normalise",
    [parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal, nn.utils.spectral_norm],
    ids=["spectral", "weight", "orthogonal", "spectral_by_hook"],
)
def test_weights_that_are_computed(normalise: Callable[[nn.Module], nn.Module]) -> None:
    """Spectral normalisation updates a buffer that it uses, once a forward, and not again when the stage is rerun."""
    pair = make_pair(lambda: nn.Sequential(*(normalise(nn.Linear(WIDTH, WIDTH)) for _ in range(3))), chaos=0)
    for seed in range(3):
        pair.step(features(seed=seed))
    for model in pair.both:
        model.eval()
    pair.step(features())


def test_pruned_weights() -> None:
    def build() -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        return nn.Sequential(*(prune.l1_unstructured(layer, "weight", amount=0.5) for layer in layers))

    pair = make_pair(build, chaos=0)
    for seed in range(2):
        pair.step(features(seed=seed))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_normalisation_is_updated_once(momentum: float | None, device: torch.device) -> None:
    def build() -> nn.Module:
        norms = [nn.BatchNorm1d(WIDTH, momentum=momentum) for _ in range(3)]
        return nn.Sequential(*(layer for norm in norms for layer in (nn.Linear(WIDTH, WIDTH), norm)))

    pair = make_pair(build, device, chaos=0)
    for seed in range(3):
        pair.step(features(seed=seed, device=device))
    assert [norm.num_batches_tracked.item() for norm in pair.compiled[1::2]] == [3, 3, 3]


def test_checkpoint_inside_a_unit(device: torch.device) -> None:
    def function(unit: Wrapped, hidden: Tensor) -> Tensor:
        return checkpoint(lambda x: nn.functional.dropout(unit.linear(x), 0.3).tanh(), hidden, use_reentrant=False)

    pair = make_pair(units(function), device, chaos=0)
    for seed in range(2):
        pair.step(features(seed=seed, device=device), seed=seed)


def test_reentrant_checkpoint_inside_a_unit_works_or_names_the_remedy() -> None:
    def function(unit: Wrapped, hidden: Tensor) -> Tensor:
        return checkpoint(lambda x: unit.linear(x).tanh(), hidden, use_reentrant=True)

    pair = make_pair(units(function))
    try:
        pair.step(features().requires_grad_())
    except RuntimeError as error:
        assert "use_reentrant=False" in str(error)  # noqa: PT017  either is right


def test_inputs_modified_in_place(device: torch.device) -> None:
    pair = make_pair(units(lambda unit, hidden: unit.linear(nn.functional.relu(hidden, inplace=True))), device)
    for seed in range(2):
        expected, actual = features(seed=seed, device=device), features(seed=seed, device=device)
        for model, inputs in zip(pair.both, (expected, actual), strict=True):
            model(inputs).square().sum().backward()
        assert torch.equal(expected, actual)
        pair.check()


def test_inputs_modified_in_place_by_units_that_depend_on_values() -> None:
    def function(unit: Wrapped, hidden: Tensor) -> Tensor:
        return unit.linear(hidden.relu_() if hidden.sum().item() < 1e9 else hidden)

    pair = make_pair(units(function))
    for seed in range(2):
        expected, actual = features(seed=seed), features(seed=seed)
        for model, inputs in zip(pair.both, (expected, actual), strict=True):
            model(inputs).square().sum().backward()
        assert torch.equal(expected, actual)
        pair.check()


class Branches(nn.Module):
    """One activation is read by a unit, then modified in place by another, and used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.reads = Wrapped(lambda unit, hidden: unit.linear(hidden + 0))
        self.writes = Wrapped(lambda unit, hidden: unit.linear(hidden.relu_()))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(inputs)
        result = self.reads(hidden) + self.writes(hidden)
        return result + hidden, hidden


@pytest.mark.parametrize("chaos", [None, 0])
def test_an_activation_modified_after_another_unit_read_it(chaos: int | None) -> None:
    pair = make_pair(Branches, chaos=chaos)
    for seed in range(2):
        pair.step(features(seed=seed))


def test_models_that_modify_their_input() -> None:
    class Modifying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Tensor) -> Tensor:
            inputs.mul_(2)
            return self.layer(inputs)

    pair = make_pair(Modifying)
    expected, actual = features(), features()
    for model, inputs in zip(pair.both, (expected, actual), strict=True):
        model(inputs).sum().backward()
    assert torch.equal(expected, actual)
    pair.check()


def test_random_numbers_of_python() -> None:
    """LayerDrop is often written with the ``random`` module: the rerun must take the same branch."""

    def function(unit: Wrapped, hidden: Tensor) -> Tensor:
        return unit.linear(hidden) * random.random() if random.random() < 0.7 else hidden

    pair = make_pair(lambda: nn.Sequential(*(Wrapped(function) for _ in range(3)), nn.Linear(WIDTH, WIDTH)))
    for seed in range(6):
        pair.step(features(seed=seed), seed=seed)


def test_units_that_ask_whether_gradients_are_enabled() -> None:
    pair = make_pair(units(lambda unit, hidden: unit.linear(hidden) * (2 if torch.is_grad_enabled() else 3)))
    pair.step(features())
    with torch.no_grad():
        pair.forward(features())


def test_units_that_differentiate_inside() -> None:
    def function(unit: Wrapped, hidden: Tensor) -> Tensor:
        point = hidden.detach().requires_grad_()
        (force,) = torch.autograd.grad(unit.linear(point).tanh().sum(), point, create_graph=True)
        return force + hidden

    pair = make_pair(units(function))
    for seed in range(2):
        pair.step(features(seed=seed))


def test_tensor_hooks_inside_a_unit() -> None:
    def function(unit: Wrapped, hidden: Tensor) -> Tensor:
        result = unit.linear(hidden)
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * 2)
        return result.tanh()

    pair = make_pair(units(function))
    for seed in range(2):
        pair.step(features(seed=seed))


def test_control_flow_that_depends_on_values() -> None:
    def function(unit: Wrapped, hidden: Tensor) -> Tensor:
        steps = 1 + int(hidden.sum().item() > 0)
        for _ in range(steps):
            hidden = unit.linear(hidden).tanh()
        return hidden

    pair = make_pair(units(function), reused=True, chaos=0)
    for seed in range(4):
        pair.step(features(seed=seed))


def test_attributes_that_a_unit_sets_do_not_keep_fake_tensors() -> None:
    def function(unit: Wrapped, hidden: Tensor) -> Tensor:
        unit.latest = unit.linear(hidden)
        return unit.latest.tanh()

    pair = make_pair(units(function))
    pair.step(features())
    for expected, actual in zip(*pair.both, strict=True):
        assert torch.equal(expected.latest, actual.latest)


def test_sparse_gradients_are_delivered_or_refused() -> None:
    pair = make_pair(lambda: nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)))
    tokens = torch.tensor([1, 2, 2])
    pair.eager(tokens).sum().backward()
    try:
        pair.compiled(tokens).sum().backward()
    except Exception as error:
        assert "sparse" in str(error)  # noqa: PT017  either is right
        return
    assert torch.equal(pair.eager[0].weight.grad.to_dense(), pair.compiled[0].weight.grad.to_dense())
