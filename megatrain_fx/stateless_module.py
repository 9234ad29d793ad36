"""Calls a module with other tensors in the place of its parameters and buffers, wherever it holds them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call

Result = TypeVar("Result")


class StatelessModule:
    """A module as a function of its parameters and buffers.

    A tensor has one name, its first, however many modules hold it. ``torch.func.functional_call`` can tie names too,
    but where one *module* stands under several names it exchanges the same tensor several times, and then restores a
    replacement instead of the original (seen with PyTorch 2.13). Here each place is exchanged once.
    """

    def __init__(self, module: nn.Module) -> None:
        """Note where ``module`` holds its tensors."""
        self._module = module
        first = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        self._places: dict[str, str] = {}
        for path, child in module.named_modules():
            for local, tensor in _own_tensors(child):
                self._places[f"{path}.{local}" if path else local] = first[id(tensor)]

    def __call__(
        self, state: dict[str, torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the module.

        Args:
            state: tensors by their first names; what is not named stays the module's own. Buffers that the forward
                replaces are replaced in ``state`` instead.
            args: of the call.
            kwargs: of the call.
        """
        placed = {place: state[name] for place, name in self._places.items() if name in state}
        result = functional_call(self._module, placed, tuple(args), dict(kwargs or {}), tie_weights=False)
        state.update((self._places[place], tensor) for place, tensor in placed.items())
        return result

    def within(self, state: Mapping[str, torch.Tensor], function: Callable[[], Result]) -> Result:
        """Call a function while the tensors are in place: a backward pass may run parts of the module again.

        ``torch.utils.checkpoint`` in a forward does.
        """
        placed = {f"module.{place}": state[name] for place, name in self._places.items() if name in state}
        result: Result = functional_call(_Within(self._module, function), placed, (), tie_weights=False)
        return result


class _Within(nn.Module):
    """Calls a function as the forward of a module that holds another."""

    def __init__(self, module: nn.Module, function: Callable[[], Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self) -> Any:
        return self.function()


def _own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers that a module holds itself, all names of each."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return [*parameters, *buffers]
