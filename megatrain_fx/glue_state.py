"""Glue state: what the code outside every unit reads of its modules, and a captured graph therefore holds."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn

from megatrain_fx.private_api import forward_hooks, named_tensors
from megatrain_fx.units import find_units

_PLAIN = frozenset({bool, int, float, str, type(None)})


class _Identity:
    """Compares a buffer by identity, and keeps it alive, so that no other can be taken for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return id(self.tensor)


class GlueState:
    """Reads the modules outside units; units run their own Python at every call, so they need not be watched."""

    def __init__(self, model: nn.Module) -> None:
        """Find the modules, which are few."""
        inside = {module for unit in find_units(model) for module in unit.module.modules()}
        self._root = model
        self._modules = [module for module in model.modules() if module not in inside]

    def read(self) -> Hashable:
        """Identities of buffers, values of plain attributes, and forward hooks, equal if the same graph serves.

        Hooks of the root are left out: they run around its forward, not in it.
        """
        return tuple(self._of(module) for module in self._modules)

    def _of(self, module: nn.Module) -> Hashable:
        buffers = tuple((k, _Identity(t)) for k, t in named_tensors(module)[1].items() if t is not None)
        constants = tuple((k, type(v), v) for k, v in vars(module).items() if type(v) in _PLAIN)
        hooks = () if module is self._root else forward_hooks(module)
        return buffers, constants, hooks
