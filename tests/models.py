"""The model zoo of the tests: named small models with inputs and a scalar loss, deterministic and quick (milliseconds).

Parametrise a test with ``@pytest.mark.parametrize("example", EXAMPLES, ids=str)`` or pick one with ``example("gpt")``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from architectures import (
    CONTEXT,
    VOCABULARY,
    WIDTH,
    ConvolutionNetwork,
    EncoderDecoder,
    Gpt,
    MixtureOfExperts,
    MultilayerPerceptron,
    SharedBlock,
    Skip,
)
from edge_architectures import (
    BufferedLayer,
    CustomFunctionLayer,
    DropPath,
    FrozenTeacher,
    GlueBuffer,
    GlueParameter,
    Heads,
    LowRankLinear,
    MixedPrecisionBlock,
    OddParameters,
    PassThrough,
    UnusedParameter,
    sequential,
    weight_normalised,
)

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Example:
    """One model of the zoo.

    ``build`` makes the model and ``draw(batch, generator)`` its (args, kwargs), both on the CPU. ``reused`` says that a
    parameter is used more than once, so that its gradient equals eager's to rounding only. ``data_dependent`` says
    that shapes inside a unit depend on the data, so that it cannot be traced on the meta device.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Inputs]
    reused: bool = False
    data_dependent: bool = False

    def __str__(self) -> str:
        return self.name

    def make_model(self, seed: int = 0) -> nn.Module:
        """Return a new CPU model in train mode, with equal parameters for an equal seed; global RNG is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def make_inputs(self, batch: int = 4, *, seed: int = 1, device: torch.device | str = "cpu") -> Inputs:
        """Return new (args, kwargs) of ``batch`` samples on ``device``, equal for an equal seed."""
        args, kwargs = self.draw(batch, torch.Generator().manual_seed(seed))
        return tuple(_move(value, device) for value in args), {key: _move(kwargs[key], device) for key in kwargs}


def scalar_loss(output: Any) -> Tensor:
    """Return a float32 scalar that depends on every floating point tensor that has a gradient in an output tree."""
    terms = [tensor.float().square().mean() for tensor in tensors(output) if tensor.requires_grad]
    return torch.stack([term * (1.0 + index) for index, term in enumerate(terms)]).sum()


def tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree of tuples, lists, dicts and dataclasses, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from tensors(value)
    elif isinstance(tree, dict):
        yield from tensors(list(tree.values()))
    elif dataclasses.is_dataclass(tree):
        yield from tensors([getattr(tree, field.name) for field in dataclasses.fields(tree)])


def example(name: str) -> Example:
    """Return the example called ``name``; raises KeyError for a name that is not in the zoo."""
    return {entry.name: entry for entry in EXAMPLES}[name]


def _move(value: Any, device: torch.device | str) -> Any:
    """Copy a leaf tensor to a device, keeping it a leaf that requires grad when it was one."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


def _features(batch: int, generator: torch.Generator) -> Inputs:
    return (torch.randn(batch, WIDTH, generator=generator),), {}


def _features_with_gradient(batch: int, generator: torch.Generator) -> Inputs:
    return (torch.randn(batch, WIDTH, generator=generator).requires_grad_(),), {}


def _half_features(batch: int, generator: torch.Generator) -> Inputs:
    return (torch.randn(batch, WIDTH, generator=generator).bfloat16(),), {}


def _keyword_features(batch: int, generator: torch.Generator) -> Inputs:
    return (), {"inputs": torch.randn(batch, WIDTH, generator=generator), "scale": 0.5, "mask": None}


def _images(batch: int, generator: torch.Generator) -> Inputs:
    return (torch.randn(batch, 3, 6, 6, generator=generator),), {}


def _tokens(batch: int, generator: torch.Generator) -> Inputs:
    return (torch.randint(VOCABULARY, (batch, CONTEXT), generator=generator),), {}


def _tokens_and_targets(batch: int, generator: torch.Generator) -> Inputs:
    text = torch.randint(VOCABULARY, (batch, CONTEXT + 1), generator=generator)
    return (text[:, :-1].contiguous(),), {"targets": text[:, 1:].contiguous()}


def _two_sequences(batch: int, generator: torch.Generator) -> Inputs:
    source = torch.randint(VOCABULARY, (batch, CONTEXT), generator=generator)
    target = torch.randint(VOCABULARY, (batch, CONTEXT - 2), generator=generator)
    return (source, target), {"mask": None}


EXAMPLES: tuple[Example, ...] = (
    Example("mlp", MultilayerPerceptron, _features),
    Example("gpt", Gpt, _tokens_and_targets),
    Example("gpt_tied", lambda: Gpt(tied=True), _tokens_and_targets, reused=True),
    Example("sliding_window", lambda: Gpt(depth=4, dropout=0.0, windows=(2, None)), _tokens),
    Example("encoder_decoder", EncoderDecoder, _two_sequences, reused=True),
    Example("moe", MixtureOfExperts, _tokens, data_dependent=True),
    Example("moe_balance", lambda: MixtureOfExperts(auxiliary=True), _tokens, data_dependent=True),
    Example("skip", Skip, _features),
    Example("convolution", ConvolutionNetwork, _images),
    Example("shared_block", SharedBlock, _tokens, reused=True),
    Example("mixed_dtype", lambda: sequential(MixedPrecisionBlock(), MixedPrecisionBlock()), _half_features),
    Example("weight_norm", weight_normalised, _features),
    Example("lora", lambda: sequential(LowRankLinear(), LowRankLinear()), _features),
    Example("unused_parameter", UnusedParameter, _features),
    Example("odd_parameters", lambda: sequential(OddParameters(), nn.Tanh(), OddParameters()), _features),
    Example("glue_parameter", GlueParameter, _features, reused=True),
    Example("glue_buffer", GlueBuffer, _features),
    Example("layer_buffers", lambda: sequential(BufferedLayer(0.5), BufferedLayer(2.0)), _features),
    Example("drop_path", lambda: sequential(DropPath(), DropPath(), DropPath()), _features),
    Example("pass_through", PassThrough, _features),
    Example("custom_function", lambda: sequential(CustomFunctionLayer(), CustomFunctionLayer()), _features),
    Example("frozen_teacher", FrozenTeacher, _features),
    Example("input_gradient", MultilayerPerceptron, _features_with_gradient),
    Example("tuple_output", lambda: Heads("tuple"), _keyword_features),
    Example("dict_output", lambda: Heads("dict"), _keyword_features),
    Example("dataclass_output", lambda: Heads("dataclass"), _keyword_features),
)
