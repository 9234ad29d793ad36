"""Optimizer state of one region, laid out like its parameters, and the C++ tasks that work on it."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from megatrain_fx.extension import runtime as native
from megatrain_fx.host_memory import HostMemory
from megatrain_fx.layout import Place, Region
from megatrain_fx.row_selection import RowSelection

REMAINDER = "remainder"
"""Name of the state that, with a bfloat16 parameter as its upper half, makes an exact float32 master."""

_ALIGNMENT = 64
"""Elements to which state offsets are rounded up: a cache line of the narrowest state, the int16 remainder."""

Key = TypeVar("Key", bound=Hashable)


@dataclass
class Neighbours:
    """Parameters of one type that lie side by side, without a gap, and are treated alike."""

    byte_offset: int
    state_offset: int
    count: int
    dtype: torch.dtype

    def continues_at(self, place: Place) -> bool:
        """Whether a parameter lies right behind."""
        return place.dtype == self.dtype and place.offset == self.byte_offset + self.count * self.dtype.itemsize


class RegionMemory:
    """The state of a region's trainable parameters: memory is touched only where a parameter is updated.

    Attributes:
        region: number of the region.
        gradient_bytes: size of the gradients for which it was made.
        update: does the optimizer's step of the region; where the rows that a step looks up are updated apart, of the
            others.
        lookup_update: does the optimizer's step of those rows.
        norm: sums the squares of the region's gradients.
    """

    def __init__(
        self,
        region: Region,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        states: Sequence[str],
        split: bool,
        pool: native.WorkerPool,
    ) -> None:
        """Map the memory.

        Args:
            region: where the parameters lie.
            weights: the region's parameters, 1-D uint8.
            gradients: the gradients of its leading part, 1-D uint8.
            states: names of the float32 state tensors.
            split: keep a remainder for each bfloat16 parameter.
            pool: threads for the tasks.
        """
        self.region = region.index
        self.gradient_bytes = gradients.numel()
        held = [place for place in region.places if place.offset + place.bytes <= self.gradient_bytes]
        self._places = {place.name: place for place in held}
        self._offsets: dict[str, int] = {}
        size = 0
        for place in held:
            self._offsets[place.name] = size
            size += -(-place.numel // _ALIGNMENT) * _ALIGNMENT
        self._memory: dict[str, HostMemory] = {name: HostMemory(size * 4) for name in states}
        flat = [memory.tensor(0, size, torch.float32) for memory in self._memory.values()]
        remainder = None
        if split and any(place.dtype is torch.bfloat16 for place in held):
            self._memory[REMAINDER] = HostMemory(size * 2)
            remainder = self._memory[REMAINDER].tensor(0, size, torch.int16)
        self._views: dict[tuple[str, str], torch.Tensor] = {}
        self.update = native.UpdateTask(weights, gradients, flat, remainder, pool)
        self.lookup_update = native.UpdateTask(weights, gradients, flat, remainder, pool)
        self.norm = native.NormTask(gradients, pool)

    @property
    def bytes(self) -> int:
        """Size of all state that was mapped."""
        return sum(memory.size for memory in self._memory.values())

    def adopt(self, state: str, name: str, values: torch.Tensor | None) -> torch.Tensor:
        """Make one state of one parameter live here; returns its place, shaped like the parameter.

        Args:
            state: name of the state.
            name: name of the parameter.
            values: what it is to hold, zeros if None; its own place is left as it is.
        """
        view = self._views.get((state, name))
        if view is None:
            view = self._views[state, name] = self._new_view(state, name)
            return view if values is None else view.copy_(values)
        if values is None:
            return view.zero_()
        return view if values is view else view.copy_(values)

    def forget(self, name: str) -> None:
        """Take a parameter's state, which was adopted as zeros and never updated, to be unused."""
        for key in [key for key in self._views if key[1] == name]:
            del self._views[key]

    def keeps_remainder(self, name: str) -> bool:
        """Whether a parameter has a remainder."""
        return REMAINDER in self._memory and self._places[name].dtype is torch.bfloat16

    def set_updates(
        self,
        task: native.UpdateTask,
        keys: Mapping[str, Key],
        make_update: Callable[[Key], native.Update],
        selection: RowSelection | None = None,
    ) -> None:
        """Say what the next run of a task does.

        Args:
            task: ``update`` or ``lookup_update``.
            keys: by name of a parameter, what makes its update different from that of others.
            make_update: the update for a key.
            selection: the rows of the region's only parameter to update; all by default.
        """
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys.values()))}
        segments = [
            (part.byte_offset, part.state_offset, part.count, part.dtype, numbers[key])
            for part, key in self._neighbours(keys)
        ]
        rows = () if selection is None else (selection.rows, selection.chosen)
        task.set(segments, [make_update(key) for key in numbers], *rows)

    def set_norm(self, names: Collection[str]) -> None:
        """Say what the next run of ``norm`` measures: the gradients of these parameters."""
        parts = self._neighbours(dict.fromkeys(names))
        self.norm.set_segments([(part.byte_offset, part.count, part.dtype) for part, _ in parts])

    def _neighbours(self, keys: Mapping[str, Key]) -> list[tuple[Neighbours, Key]]:
        """Parts of the region with equal keys. Gaps are left out: in the gradients they may hold anything."""
        parts: list[tuple[Neighbours, Key]] = []
        for name, place in self._places.items():
            if name not in keys or place.numel == 0:
                continue
            if parts and parts[-1][0].continues_at(place) and parts[-1][1] == keys[name]:
                parts[-1][0].count += place.numel
            else:
                part = Neighbours(place.offset, self._offsets[name], place.numel, place.dtype)
                parts.append((part, keys[name]))
        return parts

    def _new_view(self, state: str, name: str) -> torch.Tensor:
        place = self._places[name]
        dtype = torch.int16 if state == REMAINDER else torch.float32
        flat = self._memory[state].tensor(self._offsets[name] * dtype.itemsize, place.numel, dtype)
        return flat.as_strided(place.shape, place.stride)
