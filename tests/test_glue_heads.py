"""Heads that a model writes as a product with a parameter: recognised as such, or left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captured_and_eager import CPU
from chunked_and_eager import assert_close, gradients, train_both
from loss_models import CLASSES, WIDTH, batch, plain
from megatrain_fx.capture import capture
from megatrain_fx.chunked_loss import ChunkedLoss
from megatrain_fx.passes.chunk_loss import chunk_loss


class ProductModel(nn.Module):
    """Embedding, a norm, and ``product`` of the hidden states and two parameters in the place of a head."""

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor], Tensor], classes: int = CLASSES) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.randn(classes))
        self.product = product

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return plain(self.product(self.norm(self.embedding(tokens)), self.embedding.weight, self.bias), targets)


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda hidden, weight, _: F.linear(hidden, weight),
    "linear with bias": F.linear,
    "T": lambda hidden, weight, _: hidden @ weight.T,
    "t": lambda hidden, weight, _: torch.matmul(hidden, weight.t()),
    "transpose": lambda hidden, weight, _: hidden @ weight.transpose(-2, -1),
    "permute": lambda hidden, weight, _: hidden @ weight.permute(1, 0),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_products_with_parameters_are_heads(
    product: Callable[[Tensor, Tensor, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = ProductModel(product)
    captured = capture(model, batch(), {}, device=CPU)
    before = str(captured.graph_module.graph)
    assert isinstance(chunk_loss(captured, 1000).unit_calls[-1], ChunkedLoss)
    assert not [record for record in caplog.records if record.name.startswith("megatrain_fx")]
    assert str(captured.graph_module.graph) == before
    assert chunk_loss(captured, 2**30) is captured
    actual, expected, eager = train_both(model, *batch())
    found, wanted = ([one for one in gradients(each) if one is not None] for each in (model, eager))
    assert_close([actual, *found], [expected, *wanted], 1e-5)


def test_products_with_anything_else_are_refused() -> None:
    others = [
        lambda hidden, weight, _: hidden @ weight,  # square, and not transposed
        lambda hidden, weight, _: F.linear(hidden, weight * 2),
        lambda hidden, weight, _: hidden @ weight.T.contiguous(),
        lambda hidden, weight, bias: F.linear(hidden, weight, bias.detach()),
    ]
    for product in others:
        captured = capture(ProductModel(product, WIDTH), batch(), {}, device=CPU)
        assert chunk_loss(captured, 0) is captured
