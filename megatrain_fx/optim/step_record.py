"""What an optimizer has done since its last step, to be checked when the next is asked for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatrain_fx.private_api import version_of
from megatrain_fx.store import HostStore


@dataclass
class StepRecord:
    """The backward passes of one step, and the updates that were made during them.

    Attributes:
        backwards: how many backward passes have given gradients.
        options: options of each parameter group with which updates were made.
        versions: of the gradient of each parameter that was updated, by name.
    """

    backwards: int = 0
    options: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)

    def add(self, store: HostStore, names: Iterable[str]) -> None:
        """Note that parameters were updated with the gradients that the store holds now."""
        self.versions.update((name, version_of(store.gradient_view(name))) for name in names)

    def change_since(self, store: HostStore, groups: Sequence[Mapping[str, Any]]) -> str | None:
        """What the caller changed after updates were made with it, and so in vain; None if nothing."""
        for name, version in self.versions.items():
            shown, view = store.parameters[name].grad, store.gradient_view(name)
            if shown is not None and (shown.data_ptr() != view.data_ptr() or version_of(view) != version):
                return f"the gradient of {name}"
        for number, used in enumerate(self.options):
            for option, now in option_values(groups[number], used).items():
                if now != used[option]:
                    return f"{option} of parameter group {number} (from {used[option]!r} to {now!r})"
        return None


def option_values(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The named options of a group as they are now."""
    return {name: float(group[name]) if torch.is_tensor(group[name]) else group[name] for name in names}
