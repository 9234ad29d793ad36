"""Hooks of parameters: run where the host store can run them, refused where it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatrain_fx.errors import ParameterHookError
from megatrain_fx.private_api import gradient_hooks, post_accumulation_hooks


def refuse_gradient_hooks(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse hooks that would change gradients before they are accumulated, which happens in the host store.

    Raises:
        ParameterHookError: a parameter has one.
    """
    for name, parameter in parameters.items():
        if gradient_hooks(parameter):
            raise ParameterHookError(
                f"parameter {name} has a hook of register_hook, but its gradients are accumulated in the host store, "
                "where no such hook can run: change parameter.grad after backward(), or use "
                "register_post_accumulate_grad_hook"
            )


def refuse_accumulation_hooks(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse hooks after accumulation in steps in which the optimizer uses gradients before such hooks could run.

    Raises:
        ParameterHookError: a parameter has one.
    """
    for name, parameter in parameters.items():
        if post_accumulation_hooks(parameter):
            raise ParameterHookError(
                f"parameter {name} has a hook of register_post_accumulate_grad_hook, which would run only after the "
                "optimizer has used its gradient: remove the hook, or make the optimizer with during_backward=False "
                "and without max_grad_norm"
            )


def run_accumulation_hooks(parameters: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Run the hooks after accumulation of the named parameters, whose gradients are complete and published."""
    for name in names:
        for hook in tuple(post_accumulation_hooks(parameters[name]).values()):
            hook(parameters[name])
