"""Module state: everything that capturing a model replaces or may disturb in it, saved and put back."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def assigned_buffers(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect, at exit, the tensors that were assigned to buffers meanwhile, by name, and put the buffers back.

    `torch.export` sees assignments to buffers of the root module only, and drops the others.
    """
    before = {name: dict(named_tensors(module)[1]) for name, module in model.named_modules()}
    assigned: dict[str, torch.Tensor] = {}
    yield assigned
    for path, old in before.items():
        table = named_tensors(model.get_submodule(path))[1]
        for name, tensor in old.items():
            if table.get(name) is not tensor and isinstance(table.get(name), torch.Tensor):
                assigned[f"{path}.{name}" if path else name] = table[name]
        table.clear()
        table.update(old)


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
