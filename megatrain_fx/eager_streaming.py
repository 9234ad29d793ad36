"""Calls that no graph can stand for, such as ``generate()`` with a cache: the model's own Python, unit by unit.

Only without gradients. Each unit's parameters are copied to the device for its call and dropped after it; nothing is
fetched ahead, so this is slower than a schedule.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_fx.stateless_module import StatelessModule
from megatrain_fx.units import Unit, find_units


def call_eagerly(
    model: nn.Module,
    forward_class: type[nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> Any:
    """Run ``forward_class.forward(model, ...)`` on ``device`` with parameters that stay in host memory."""
    if device.type == "cpu":
        return forward_class.forward(model, *args, **kwargs)
    units = find_units(model)
    within = {id(parameter) for unit in units for parameter in unit.module.parameters()}
    glue = {name: p.to(device, non_blocking=True) for name, p in model.named_parameters() if id(p) not in within}
    with _units_on(units, device):
        stateless = StatelessModule(_Forward(model, forward_class))
        return stateless({f"model.{name}": parameter for name, parameter in glue.items()}, args, kwargs)


class _Forward(nn.Module):
    """Calls the forward of the model's original class."""

    def __init__(self, model: nn.Module, forward_class: type[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.forward_class = forward_class

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_class.forward(self.model, *args, **kwargs)


@contextlib.contextmanager
def _units_on(units: Sequence[Unit], device: torch.device) -> Iterator[None]:
    """Let every unit compute on ``device`` while the context lasts."""
    saved = [vars(unit.module).get("forward") for unit in units]
    try:
        for unit in units:
            unit.module.forward = _streamed_forward(unit.module, device)
        yield
    finally:
        for unit, forward in zip(units, saved, strict=True):
            del unit.module.forward
            if forward is not None:
                unit.module.forward = forward


def _streamed_forward(module: nn.Module, device: torch.device) -> Any:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        stateless = StatelessModule(_Bare(module))
        on_device = {f"module.{n}": p.to(device, non_blocking=True) for n, p in module.named_parameters()}
        module.forward = original  # the stateless module calls the module, whose hooks have run already
        try:
            return stateless(on_device, args, kwargs)
        finally:
            module.forward = forward

    return forward


class _Bare(nn.Module):
    """Calls a module's forward without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)
