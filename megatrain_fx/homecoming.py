"""The way of gradients home: from the views in a device slab, over the host slab, into the host store."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatrain_fx.extension import runtime as native
from megatrain_fx.ir import BufferKind, Op, kind_of, number_of
from megatrain_fx.layout import Place
from megatrain_fx.private_api import foreach_copy
from megatrain_fx.row_selection import RowSelection
from megatrain_fx.run import Run
from megatrain_fx.schedule import Schedule
from megatrain_fx.store import ADD, COPY, SKIP

Segment = tuple[int, int, torch.dtype, int]
"""Offset in bytes, number of elements, their type, and how they meet what the store holds."""


@dataclass(frozen=True)
class Journey:
    """Operations that bring one slab home, by index, and the region that it belongs to."""

    backward: int
    evacuate: int
    accumulate: int
    region: int


def find_journeys(schedule: Schedule) -> list[Journey]:
    """Every slab's way from the backward that fills it to the accumulate that empties it."""
    filled: dict[str, int] = {}
    carried: dict[str, tuple[int, int]] = {}
    journeys = []
    for index, operation in enumerate(schedule):
        if operation.op is Op.BACKWARD:
            filled.update((name, index) for name in operation.writes if kind_of(name) is BufferKind.SLAB)
        elif operation.op is Op.EVACUATE:
            carried[operation.writes[0]] = (filled[operation.reads[0]], index)
        elif operation.op is Op.ACCUMULATE:
            backward, evacuate = carried[operation.reads[0]]
            journeys.append(Journey(backward, evacuate, index, number_of(operation.writes[0])))
    return journeys


@dataclass(frozen=True)
class Homecoming:
    """One slab of one backward: where each parameter's gradient lies in it, and how it meets what the store holds.

    Attributes:
        region: whose gradients they are.
        evacuation: where the copy from the device goes.
        accumulation: what then moves the gradients from the host slab to the store.
        slab: the host slab.
        home: the region's gradients in the store, of the same size.
        places: place of each trainable parameter of the region that the backward differentiates, by name.
        views: the same places in the device slab.
        pin: gets the host slab ready for its first use.
        whole: the region holds gradients of no other parameters, which a copy of the whole slab would overwrite. Where
            the first call, for which regions are made, had other stages, it may hold some.
        selection: rows that the update needs which is due once these gradients are home; all by default. If the rows
            that the step looks up, the gradients of all others are zero.
    """

    region: int
    evacuation: native.Destination
    accumulation: native.AccumulateTask
    slab: torch.Tensor
    home: torch.Tensor
    places: Mapping[str, Place]
    views: Mapping[str, torch.Tensor]
    pin: Callable[[torch.Tensor], None]
    whole: bool
    selection: RowSelection | None = None

    def send(self, gradients: Mapping[str, torch.Tensor], run: Run) -> None:
        """Write gradients into the slab, and say how each is to meet what the store holds.

        If the store holds none, the copy from the device goes home at once and nothing is left to accumulate: the
        schedule orders every other access of the region after the accumulation.

        Args:
            gradients: by name; a parameter without one keeps what the store holds.
            run: knows how the next gradient of each parameter comes home (COPY or ADD); after the first it is ADD.
        """
        homes = run.homes
        present = [name for name in self.views if name in gradients]
        direct = self.whole and bool(present) and all(homes[name] == COPY for name in self.places)
        if direct:
            self._write(gradients, present)
            self._go(self.home, [])
        else:
            self.pin(self.slab)
            modes = {name: homes[name] if name in gradients else SKIP for name in self.places}
            segments = [(p.offset, p.numel, p.dtype, modes[name]) for name, p in self.places.items()]
            if self.selection is not None and self.selection.chosen and present:
                limit = run.lookups[self.region]
                self._send_rows(gradients[present[0]], present[0], segments, self.selection, limit)
            else:
                self._write(gradients, present)
                self._go(self.slab, segments)
        homes.update(dict.fromkeys(present, ADD))

    def _write(self, gradients: Mapping[str, torch.Tensor], present: Sequence[str]) -> None:
        foreach_copy([self.views[name] for name in present], [gradients[name] for name in present])

    def _send_rows(
        self, gradient: torch.Tensor, name: str, segments: Sequence[Segment], selection: RowSelection, limit: int
    ) -> None:
        """Send only the rows that the step has looked up, one after the other: those of all others are zero."""
        rows = gradient.index_select(0, selection.numbers(limit))
        self.views[name][: len(rows)].copy_(rows)
        self._go(self.slab, segments, selection.rows, rows.numel() * rows.element_size())

    def _go(
        self,
        target: torch.Tensor,
        segments: Sequence[Segment],
        rows: torch.Tensor | None = None,
        count: int | None = None,
    ) -> None:
        self.evacuation.target = target
        self.evacuation.count = count
        self.accumulation.set_segments(segments, rows)
