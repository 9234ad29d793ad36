"""Module state: everything that capturing a model replaces or may disturb in it, saved and put back."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from megatrain_fx.private_api import named_tensors


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back, at exit, the class, attributes, parameters and buffers of every module of `model`.

    Identities are put back, not contents: nothing real may be written meanwhile.
    """
    saved = [(module, type(module), dict(vars(module)), _copied_tables(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, kind, attributes, tables in saved:
            if type(module) is not kind:
                module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for table, entries in zip(named_tensors(module), tables, strict=True):
                table.clear()
                table.update(entries)


@dataclasses.dataclass
class Assignments:
    """What a forward assigned to modules: tensors to buffers, by name, and the names of other attributes."""

    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    attributes: list[str] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def observed_assignments(model: nn.Module) -> Iterator[Assignments]:
    """Collect, at exit, what was assigned meanwhile to modules of `model`, and undo it.

    `torch.export` sees assignments to buffers of the root module only, and drops the others.
    """
    before = [(name, module, dict(vars(module)), _copied_tables(module)[1]) for name, module in model.named_modules()]
    found = Assignments()
    with preserved(model):
        yield found
        for path, module, attributes, buffers in before:
            prefix = f"{path}." if path else ""
            now = named_tensors(module)[1]
            found.buffers.update({prefix + k: now[k] for k, old in buffers.items() if now.get(k) is not old})
            changed = (k for k, new in vars(module).items() if attributes.get(k, vars) is not new)
            found.attributes.extend(prefix + name for name in changed)


def replace_tensors(model: nn.Module, substitutes: dict[torch.Tensor, torch.Tensor]) -> None:
    """Put substitutes in the place of parameters and buffers, in every module that holds them."""
    for module in model.modules():
        for table in named_tensors(module):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = substitutes[tensor]


def all_tensors(model: nn.Module) -> list[torch.Tensor]:
    """The distinct parameters and buffers of `model`."""
    return [*model.parameters(), *model.buffers()]


def _copied_tables(module: nn.Module) -> list[dict[str, Any]]:
    return [dict(table) for table in named_tensors(module)]
