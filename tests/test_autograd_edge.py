"""Compiled models as a part of autograd: several calls and backward passes, partial gradients, changed tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from comparison import WIDTH, features, make_pair, perceptron
from models import example, scalar_loss


class TwoOutputs(nn.Module):
    """Returns an inner activation and the result made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(inputs)
        return hidden, self.second(hidden)


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


def test_two_forwards_before_one_backward(device: torch.device) -> None:
    pair = make_pair(perceptron, device, reused=True, chaos=0)
    for model in pair.both:
        (scalar_loss(model(features(device=device))) + scalar_loss(model(features(seed=2, device=device)))).backward()
    pair.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_backwards_of_several_calls_in_any_order(order: tuple[int, ...], device: torch.device) -> None:
    pair = make_pair(dropping, device, chaos=0)
    for model in pair.both:
        torch.manual_seed(3)
        losses = [scalar_loss(model(features(seed=seed, device=device))) for seed in range(3)]
        for index in order:
            losses[index].backward()
    pair.check()


def test_calls_of_several_kinds_between_forward_and_backward(device: torch.device) -> None:
    pair = make_pair(dropping, device, chaos=0)
    seen: list[list[Tensor]] = [[], []]
    for model, outputs in zip(pair.both, seen, strict=True):
        torch.manual_seed(3)
        loss = scalar_loss(model(features(device=device)))
        with torch.no_grad():
            outputs.append(model(features(seed=2, device=device)))
        model.eval()
        with torch.inference_mode():
            outputs.append(model(features(seed=3, device=device)))
        outputs.append(model(features(7, seed=4, device=device)).detach())
        model.train()
        model(features(seed=5, device=device))
        loss.backward()
    for expected, actual in zip(*seen, strict=True):
        assert torch.equal(expected, actual)
    pair.check()


def test_forward_without_backward_leaves_the_next_step_alone() -> None:
    pair = make_pair(dropping, chaos=0)
    for seed in range(3):
        pair.forward(features(seed=seed + 10), seed=seed)
        pair.step(features(seed=seed), seed=seed)


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_mode_may_come_first(first: Callable[[], torch.no_grad], device: torch.device) -> None:
    pair = make_pair(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), device)
    for model in pair.both:
        with first():
            model(features(device=device))
    pair.check()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in pair.both]
    for seed in range(2):
        pair.step(features(seed=seed, device=device))
        for optimizer in optimizers:
            optimizer.step()


def test_evaluation_between_steps(device: torch.device) -> None:
    pair = make_pair(lambda: example("convolution").make_model(), device)
    for seed in range(3):
        args, _ = example("convolution").make_inputs(seed=seed, device=device)
        pair.step(*args)
        for model in pair.both:
            model.eval()
        with torch.no_grad():
            pair.forward(*args)
        pair.forward(*args)
        for model in pair.both:
            model.train()
        pair.check()


def test_retained_graph_can_be_used_many_times(device: torch.device) -> None:
    pair = make_pair(dropping, device, chaos=0)
    for model in pair.both:
        torch.manual_seed(3)
        loss = scalar_loss(model(features(device=device)))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    pair.check()


def test_freed_graph_raises_the_error_of_pytorch() -> None:
    pair = make_pair(perceptron)
    messages = []
    for model in pair.both:
        loss = scalar_loss(model(features()))
        loss.backward()
        with pytest.raises(RuntimeError, match="second time") as caught:
            loss.backward()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    pair.step(features())


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_only_some_outputs_get_gradients(used: tuple[int, ...], device: torch.device) -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, inputs: Tensor) -> list[Tensor]:
            outputs = [inputs]
            for layer in self.layers:
                outputs.append(layer(outputs[-1]).tanh())
            return outputs[1:]

    pair = make_pair(Three, device, chaos=0)
    for seed in range(2):
        pair.step(features(seed=seed, device=device), loss=lambda outputs: sum(outputs[i].square().sum() for i in used))


def test_each_output_has_its_own_backward() -> None:
    pair = make_pair(TwoOutputs)
    for model in pair.both:
        hidden, result = model(features())
        hidden.sum().backward(retain_graph=True)
        result.square().sum().backward()
    pair.check()


def test_inputs_that_require_gradients(device: torch.device) -> None:
    pair = make_pair(lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), device)
    found = []
    for model in pair.both:
        leaf = features(device=device).requires_grad_()
        other = features(seed=2, device=device).requires_grad_()
        inner = leaf * 2
        scalar_loss(model(inner, inner) + model(inner, other)).backward()
        found.append((leaf.grad, other.grad))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5, atol=1e-7)
    assert torch.equal(found[0][1], found[1][1])


def test_the_same_input_twice_and_two_equal_inputs_are_different_calls() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.layer(left) * right

    pair = make_pair(Product)
    for same in (True, False, True):
        found = []
        for model in pair.both:
            left = features().requires_grad_()
            right = left if same else features().requires_grad_()
            scalar_loss(model(left, right)).backward()
            found.append((left.grad, right.grad))
        for expected, actual in zip(*found, strict=True):
            assert torch.equal(expected, actual)
        pair.check()


def test_gradients_of_inputs_alone_leave_parameters_alone(device: torch.device) -> None:
    pair = make_pair(perceptron, device)
    found = []
    for model in pair.both:
        inputs = features(device=device).requires_grad_()
        found.append(torch.autograd.grad(model(inputs).sum(), inputs)[0])
        model(inputs).sum().backward(inputs=[inputs])
        found.append(inputs.grad)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    pair.check()
    pair.step(features(device=device))


def test_adversarial_example_in_the_midst_of_accumulation() -> None:
    pair = make_pair(perceptron)
    pair.step(features())
    for model in pair.both:
        inputs = features(seed=2).requires_grad_()
        loss = scalar_loss(model(inputs))
        (direction,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        (loss + scalar_loss(model((inputs + 0.1 * direction.sign()).detach()))).backward()
    pair.reused = True
    pair.check()


def test_gradients_of_gradients_are_refused() -> None:
    model = make_pair(perceptron).compiled
    inputs = features().requires_grad_()
    loss = model(inputs).sum()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        model(inputs).sum().backward(create_graph=True)


def test_gradients_of_parameters_by_autograd_grad_are_refused() -> None:
    model = make_pair(perceptron).compiled
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(model(features()).sum(), list(model.parameters()))


def test_input_modified_before_the_backward_is_an_error_as_in_eager_mode() -> None:
    pair = make_pair(perceptron)
    for model in pair.both:
        inputs = features()
        loss = model(inputs).sum()
        inputs.add_(1)
        with pytest.raises(RuntimeError, match="modified"):
            loss.backward()
        assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    for model in pair.both:
        model.zero_grad()
    pair.step(features())


def test_output_modified_before_the_backward_is_an_error_as_in_eager_mode() -> None:
    for model in make_pair(TwoOutputs).both:
        hidden, result = model(features())
        with torch.no_grad():
            hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified"):
            result.sum().backward()


def test_modified_inputs_that_no_gradient_needs_are_allowed() -> None:
    """Where eager PyTorch keeps nothing of an input, changing it is harmless; so it must be here, or be refused."""
    pair = make_pair(lambda: nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH)))
    for model in pair.both:
        loss = model(torch.tensor([1, 2])).sum()
        loss.backward()
    pair.check()


def test_gradients_that_the_user_kept_are_not_overwritten(device: torch.device) -> None:
    pair = make_pair(perceptron, device)
    pair.step(features(device=device))
    kept = [[parameter.grad for parameter in model.parameters()] for model in pair.both]
    for model in pair.both:
        model.zero_grad()
    pair.step(features(seed=2, device=device))
    for expected, actual in zip(*kept, strict=True):
        assert torch.equal(expected.cpu(), actual)


def test_gradients_that_the_user_set() -> None:
    pair = make_pair(perceptron, chaos=0)
    for seed in range(3):
        for model in pair.both:
            for index, parameter in enumerate(model.parameters()):
                if index % 3 == seed % 3:
                    parameter.grad = torch.full_like(parameter, 0.25)
                elif index % 3 == 1 and parameter.grad is not None:
                    parameter.grad = parameter.grad * 2
        pair.step(features(seed=seed))


def test_gradients_set_between_forward_and_backward() -> None:
    pair = make_pair(perceptron, chaos=0)
    pair.step(features())
    for model in pair.both:
        loss = scalar_loss(model(features(seed=2)))
        model.zero_grad()
        model[0].weight.grad = torch.ones_like(model[0].weight)
        loss.backward()
    pair.check()


def test_no_parameter_and_no_input_requires_gradients(device: torch.device) -> None:
    pair = make_pair(lambda: perceptron().requires_grad_(False), device)
    _, output = pair.forward(features(device=device))
    assert output.grad_fn is None
    found = []
    for model in pair.both:
        inputs = features(device=device).requires_grad_()
        model(inputs).sum().backward()
        found.append(inputs.grad)
    assert torch.equal(*found)
    pair.check()
