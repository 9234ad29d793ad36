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

    def numbers(self) -> torch.Tensor:
        """Numbers of the rows that the step looks up, ascending, int64 on the compute device; waits for it."""
        return self.marks.nonzero().squeeze(1)


@dataclass(frozen=True)
class RowSelector:
    """What a ``select`` does: marks the rows that a value of the run names.

    Attributes:
        indices: name of the value, a tensor of row numbers.
        rows: marks for the host; in page-locked memory, if the device is no CPU, so that the copy is asynchronous.
        marks: the same on the device.
    """

    indices: str
    rows: torch.Tensor
    marks: torch.Tensor

    @classmethod
    def of(cls, indices: str, count: int, device: torch.device) -> "RowSelector":
        """A selector for a parameter of ``count`` rows that ``device`` looks up."""
        rows = torch.zeros(count, dtype=torch.uint8, pin_memory=device.type != "cpu")
        return cls(indices, rows, torch.zeros(count, dtype=torch.uint8, device=device))

    def select(self, run: Run) -> None:
        """Mark the rows; what waits for the compute lane finds the marks on the host."""
        with torch.no_grad():
            self.marks.zero_().index_fill_(0, run.values[self.indices].flatten().long(), 1)
            self.rows.copy_(self.marks, non_blocking=True)

    def selection(self, *, chosen: bool) -> RowSelection:
        """The marked rows, or all others."""
        return RowSelection(self.rows, self.marks, chosen)
