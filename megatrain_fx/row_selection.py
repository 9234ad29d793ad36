"""The rows of a region that one step looks up, as the device and the host's tasks need them."""

from dataclasses import dataclass

import torch

from megatrain_fx.run import Run


@dataclass(frozen=True)
class RowSelection:
    """Some rows of the only parameter of a region.

    Attributes:
        rows: uint8 on the CPU, one a row; not zero for those that the step looks up.
        marks: the same on the compute device.
        chosen: these rows, or all others.
    """

    rows: torch.Tensor
    marks: torch.Tensor
    chosen: bool

    def numbers(self, limit: int) -> torch.Tensor:
        """Numbers of the rows that the step looks up, ascending, int64 on the compute device.

        Args:
            limit: how many there are at most. That many are returned, the missing ones as 0: to count them would be to
                wait for the device.
        """
        return self.marks.nonzero_static(size=limit, fill_value=0).squeeze(1)


@dataclass(frozen=True)
class RowSelector:
    """What a ``select`` does: marks the rows that a value of the run names.

    Attributes:
        region: whose rows they are.
        indices: name of the value, a tensor of row numbers.
        rows: marks for the host; in page-locked memory, if the device is no CPU, so that the copy is asynchronous.
        marks: the same on the device.
    """

    region: int
    indices: str
    rows: torch.Tensor
    marks: torch.Tensor

    @classmethod
    def of(cls, region: int, indices: str, count: int, device: torch.device) -> "RowSelector":
        """A selector for a region's parameter of ``count`` rows that ``device`` looks up."""
        rows = torch.zeros(count, dtype=torch.uint8, pin_memory=device.type != "cpu")
        return cls(region, indices, rows, torch.zeros(count, dtype=torch.uint8, device=device))

    def select(self, run: Run) -> None:
        """Mark the rows; what waits for the compute lane finds the marks on the host."""
        indices = run.values[self.indices]
        run.lookups[self.region] = min(indices.numel(), self.marks.numel())
        with torch.no_grad():
            self.marks.zero_().index_fill_(0, indices.flatten().long(), 1)
            self.rows.copy_(self.marks, non_blocking=True)

    def selection(self, *, chosen: bool) -> RowSelection:
        """The marked rows, or all others."""
        return RowSelection(self.rows, self.marks, chosen)
