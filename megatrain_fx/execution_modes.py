"""Execution modes: the gradient mode and autocast settings under which a part of the captured graph runs."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import NamedTuple

import torch
from torch import nn


class Autocast(NamedTuple):
    """The arguments of one `torch.autocast` region."""

    device_type: str
    dtype: torch.dtype | None
    enabled: bool
    cache_enabled: bool | None


@dataclasses.dataclass(frozen=True)
class ExecutionModes:
    """What a region of the forward changed of the modes around it: None or empty where it changed nothing."""

    grad_enabled: bool | None = None
    autocast: tuple[Autocast, ...] = ()

    def active(self) -> contextlib.ExitStack:
        """A context manager under which these modes are in force."""
        stack = contextlib.ExitStack()
        if self.grad_enabled is not None:
            stack.enter_context(torch.set_grad_enabled(self.grad_enabled))
        for setting in self.autocast:
            stack.enter_context(torch.autocast(**setting._asdict()))
        return stack

    def within(self, outer: ExecutionModes) -> ExecutionModes:
        """These modes entered inside `outer`: for each device type the inner autocast counts."""
        grad_enabled = outer.grad_enabled if self.grad_enabled is None else self.grad_enabled
        inner_types = {setting.device_type for setting in self.autocast}
        kept = tuple(setting for setting in outer.autocast if setting.device_type not in inner_types)
        return ExecutionModes(grad_enabled, kept + self.autocast)


def run_region(
    grad_enabled: bool | None, autocast: tuple[tuple[object, ...], ...], region: nn.Module, *operands: object
) -> object:
    """Run `region(*operands)` under the given modes: the target of a graph node that stands for a region of glue."""
    settings = tuple(Autocast(*setting) for setting in autocast)  # type: ignore[arg-type]
    with ExecutionModes(grad_enabled, settings).active():
        return region(*operands)
