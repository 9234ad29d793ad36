"""The edge to PyTorch: the generated subclass of a compiled model, and the autograd node of one call."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_fx.errors import OutputTreeError, UnsupportedInputError
from megatrain_fx.model_methods import methods
from megatrain_fx.private_api import backward_keeps_graph, backward_reaches, without_saved_tensor_hooks
from megatrain_fx.program import Program
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
        with without_saved_tensor_hooks():
            run, outputs = streamed.start(program, inputs)
        ctx.streamed, ctx.program, ctx.run = streamed, program, run
        ctx.save_for_backward(token)
        ctx.set_materialize_grads(False)
        wanted = program.facts.differentiable_outputs
        fixed = [
            o for n, o in zip(program.facts.outputs, outputs, strict=True) if n not in wanted and torch.is_tensor(o)
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        """Run the backward pass; like any node, it can run again only after ``retain_graph=True``.

        The token's own node tells whether gradients of parameters are wanted, which is not so in
        ``torch.autograd.grad(loss, inputs)``.

        Raises:
            RuntimeError: the graph was freed (PyTorch's own error), or gradients of gradients were asked for.
        """
        ctx.saved_tensors  # noqa: B018  raises PyTorch's own error when the graph was freed
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the backward pass of a compiled model cannot be differentiated again: call backward() or "
                "torch.autograd.grad() without create_graph=True, or compute such terms (gradient penalties) "
                "inside a unit"
            )
        trains = backward_reaches(ctx.next_functions[0][0])
        found = ctx.streamed.finish(ctx.program, ctx.run, gradients, keep=backward_keeps_graph(), trains=trains)
        return (None, None, None, *found)


def call(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a compiled model's forward does.

    Inference mode is left: what is made in it (buffers of the store, of the device) could not be trained afterwards.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            return call(model, args, kwargs)
    streamed: StreamedModel = model.__dict__[STATE]
    try:
        with without_saved_tensor_hooks():
            program, inputs = streamed.prepare(model, args, kwargs)
    except (UnsupportedInputError, OutputTreeError):
        if torch.is_grad_enabled():
            raise
        return streamed.call_eagerly(model, args, kwargs)
    if program.training:
        token = torch.empty(0, requires_grad=True)
        outputs: Sequence[Any] = StreamedStep.apply(streamed, program, token, *inputs)
    else:
        outputs = streamed.start(program, inputs)[1]
    return program.capture.output_tree.unflatten(list(outputs))


def streamed_class(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the model's class whose forward streams; its name and the forward's signature stay.

    A copy or a pickle of an instance is an ordinary, uncompiled model of the original class.
    """

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if STATE not in self.__dict__:  # made by type(model)(...), not by compile
            return original.forward(self, *args, **kwargs)
        return call(self, args, kwargs)

    def reduce(self: nn.Module, protocol: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        state = self.__getstate__()
        if STATE in self.__dict__:
            self.__dict__[STATE].synchronize()  # what is copied or saved are parameters after their updates
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != STATE}
        return _new_instance, (original,), state

    namespace = {
        **methods(original, lambda model: model.__dict__.get(STATE)),
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (original,), namespace)


def _new_instance(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)
