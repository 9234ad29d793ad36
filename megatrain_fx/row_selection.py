"""The rows of a region that one step looks up, as the host's accumulate and update tasks need them."""

from dataclasses import dataclass

import torch

from megatrain_fx.run import Run


@dataclass(frozen=True)
class RowSelection:
    """Some rows of the only parameter of a region.

    Attributes:
        rows: uint8 on the CPU, one a row; not zero for those that the step looks up.
        chosen: these rows, or all others.
    """

    rows: torch.Tensor
    chosen: bool


@dataclass(frozen=True)
class RowSelector:
    """What a ``select`` does: marks the rows that a value of the run names.

    Attributes:
        indices: name of the value, a tensor of row numbers.
        rows: where the marks go; in page-locked memory, if the device is no CPU, so that the copy is asynchronous.
    """

    indices: str
    rows: torch.Tensor

    @classmethod
    def of(cls, indices: str, count: int, device: torch.device) -> "RowSelector":
        """A selector for a parameter of ``count`` rows that ``device`` looks up."""
        return cls(indices, torch.zeros(count, dtype=torch.uint8, pin_memory=device.type != "cpu"))

    def select(self, run: Run) -> None:
        """Mark the rows; what waits for the compute lane finds them on the host."""
        with torch.no_grad():
            indices = run.values[self.indices].flatten().long()
            marks = torch.zeros(len(self.rows), dtype=torch.uint8, device=indices.device)
            self.rows.copy_(marks.index_fill_(0, indices, 1), non_blocking=True)
