"""The edge to PyTorch: the generated subclass of a compiled model, and the autograd node of one call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_fx.private_api import backward_keeps_graph
from megatrain_fx.program import Program
from megatrain_fx.run import Run
from megatrain_fx.streamed_model import StreamedModel

STATE = "_megatrain"


class StreamedStep(torch.autograd.Function):
    """One call of a compiled model, as autograd sees it: all the model's work in one node.

    Its tensor arguments are a token that requires gradients (so that the node exists when no input does) and the
    call's inputs; gradients of parameters go to the host store as a side effect of ``backward``.
    """

    @staticmethod
    def forward(
        ctx: Any, streamed: StreamedModel, program: Program, token: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[Any, ...]:
        """Run the forward pass."""
        run, outputs = streamed.start(program, inputs)
        ctx.streamed, ctx.program, ctx.run = streamed, program, run
        ctx.save_for_backward(token)
        ctx.set_materialize_grads(False)
        wanted = program.facts.differentiable_outputs
        fixed = [o for n, o in zip(program.facts.outputs, outputs, strict=True) if n not in wanted and torch.is_tensor(o)]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the backward pass; like any node, it can run again only after ``retain_graph=True``."""
        ctx.saved_tensors  # noqa: B018  raises PyTorch's own error when the graph was freed
        found = ctx.streamed.finish(ctx.program, ctx.run, gradients, keep=backward_keeps_graph())
        return (None, None, None, *found)


def call(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a compiled model's forward does."""
    streamed: StreamedModel = model.__dict__[STATE]
    program, inputs = streamed.prepare(model, args, kwargs)
    if program.training:
        token = torch.empty(0, requires_grad=True)
        outputs: Sequence[Any] = StreamedStep.apply(streamed, program, token, *inputs)
    else:
        outputs = streamed.start(program, inputs)[1]
    return program.captured.output_tree.unflatten(list(outputs))


def streamed_class(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the model's class whose forward streams; its name and the forward's signature stay.

    A copy or a pickle of an instance is an ordinary, uncompiled model of the original class.
    """

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, args, kwargs)

    def reduce(self: nn.Module, protocol: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        state = {name: value for name, value in self.__dict__.items() if name != STATE}
        return _new_instance, (original,), state

    namespace = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), namespace)


def _new_instance(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)
