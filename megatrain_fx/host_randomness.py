"""Host randomness: the state of the random number generators of Python and NumPy, which no graph can repeat."""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any


@dataclasses.dataclass(frozen=True)
class HostRandomState:
    """The states of the global generators; NumPy's only if NumPy was imported."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...] | None

    @classmethod
    def read(cls) -> HostRandomState:
        """The states now."""
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), None if numpy is None else _comparable(numpy.random.get_state()))

    def advanced_since(self, earlier: HostRandomState) -> bool:
        """Whether numbers were drawn between the reading of the two states."""
        numpy_advanced = earlier.numpy is not None and self.numpy != earlier.numpy
        return self.python != earlier.python or numpy_advanced

    def restore(self) -> None:
        """Go back to these states."""
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def _comparable(state: tuple[Any, ...]) -> tuple[Any, ...]:
    """A state with its array as a tuple, so that states can be compared."""
    kind, keys, *rest = state
    return kind, tuple(keys.tolist()), *rest
