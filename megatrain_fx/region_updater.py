"""What a schedule needs of an optimizer: the work for each region, when to do it, and where to queue it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from megatrain_fx.extension import runtime as native
from megatrain_fx.ir import Rows
from megatrain_fx.row_selection import RowSelection


class RegionUpdater(Protocol):
    """An optimizer whose steps are operations of the schedule (see :mod:`megatrain_fx.optim`)."""

    @property
    def queue(self) -> native.UpdateQueue:
        """Where updates wait for their turn."""

    @property
    def updates_during_backward(self) -> bool:
        """Whether the next backward pass completes the gradients of a step, and each region is updated during it."""

    @property
    def measures_norm(self) -> bool:
        """Whether gradients are measured as they come home, to be clipped later."""

    def update_task(self, region: int, rows: Rows = Rows.ALL) -> native.Task | None:
        """The optimizer's step of a region, or of a part of it; None if it trains nothing there."""

    def norm_task(self, region: int) -> native.Task | None:
        """The sum of squares of a region's gradients; None if it trains nothing there."""

    def priority(self, region: int) -> int:
        """Regions of lower numbers are updated first."""

    def begin_backward(self, names: Collection[str]) -> None:
        """Get ready for a backward pass that may give gradients to these parameters."""

    def narrow(self, region: int, names: Collection[str], selection: RowSelection | None = None) -> None:
        """Learn, before a region is measured or updated, which parameters have received gradients in this pass.

        Args:
            region: its number.
            names: of the parameters.
            selection: the rows of its only parameter that are next to be updated; all by default.
        """

    def end_backward(self, names: Collection[str]) -> None:
        """Learn which parameters received gradients."""
