"""Side effects: what a forward does beside computing tensors, and what is lost when only its tensor operations run."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatrain_fx.host_randomness import HostRandomState


class SideEffectWatch:
    """Notices changes to the attributes of modules, and to the random number generators of Python and NumPy."""

    def __init__(self, module: nn.Module) -> None:
        """Note the state before a run of ``module``."""
        self._attributes: list[tuple[nn.Module, dict[str, Any]]] = [(m, dict(vars(m))) for m in module.modules()]
        self._randomness = HostRandomState.read()

    def found(self) -> str | None:
        """What the run did, as the end of a sentence about it; None if nothing. Random states are put back."""
        if HostRandomState.read().advanced_since(self._randomness):
            self._randomness.restore()
            return "it draws numbers from Python's random module or from NumPy"
        for module, before in self._attributes:
            for name, value in vars(module).items():
                if name not in before or before[name] is not value:
                    return f"it sets the attribute {name} of a {type(module).__name__}"
        return None
