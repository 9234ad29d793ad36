"""Model parts: the parameters, buffers and modules of a model as they were at its first call, to notice changes."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatrain_fx.errors import ModelChangedError
from megatrain_fx.private_api import child_table, named_tensors
from megatrain_fx.units import find_units

_REMEDY = (
    "after the first call of the compiled {kind}, whose host store and schedules are made for the parts that it had "
    "then. Compile after changing the model; to give it other values, copy them in place (load_state_dict without "
    "assign=True, or copy_ under torch.no_grad())"
)


class ModelParts:
    """Identities of all parts; comparing them takes some 100 us for 500 modules, so it is done at every call."""

    def __init__(self, model: nn.Module) -> None:
        """Note the parts of ``model``."""
        self._kind = type(model).__name__
        self._modules = dict(model.named_modules())
        self._tables = [
            (path, kind, table)
            for path, module in self._modules.items()
            for kind, table in (("parameter", named_tensors(module)[0]), ("module", child_table(module)))
        ]
        self._buffers = [named_tensors(module)[1] for module in self._modules.values()]
        units = [module for unit in find_units(model) for module in unit.module.modules()]
        self._inside_units = frozenset(units)
        self._known_buffers = self._buffer_identities()
        self._note()

    def check(self) -> None:
        """Refuse parts that were replaced, added or removed.

        Modules without parameters may come and go inside units, which run their own Python.

        Raises:
            ModelChangedError: the message names the first of them.
        """
        if self._identities() == self._known:
            return
        for (path, kind, table), before in zip(self._tables, self._contents, strict=True):
            for name in {**before, **table}:
                old, new = before.get(name), table.get(name)
                if old is not new and not self._is_harmless(path, kind, old, new):
                    verb = "added" if old is None else "removed" if new is None else "replaced"
                    full = f"{path}.{name}" if path else name
                    raise ModelChangedError(f"{kind} {full} was {verb} {_REMEDY.format(kind=self._kind)}")
        self._note()

    def buffers_changed(self) -> bool:
        """Whether buffers are others than at the last time; they may be on another device then."""
        before, self._known_buffers = self._known_buffers, self._buffer_identities()
        return before != self._known_buffers

    def _is_harmless(self, path: str, kind: str, old: Any, new: Any) -> bool:
        if kind == "parameter" or self._modules[path] not in self._inside_units:
            return False
        return all(module is None or next(module.parameters(), None) is None for module in (old, new))

    def _note(self) -> None:
        self._contents = [dict(table) for _, _, table in self._tables]
        self._known = self._identities()

    def _buffer_identities(self) -> list[int]:
        return [id(buffer) for table in self._buffers for buffer in table.values()]

    def _identities(self) -> list[int]:
        return [id(part) for _, _, table in self._tables for part in table.values()]
