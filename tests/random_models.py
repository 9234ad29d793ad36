"""Small random models: chains of blocks with skips, blocks that are used again, dropout and frozen blocks."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from torch import Tensor, nn

WIDTH = 16


@dataclass(frozen=True)
class Step:
    """One block applied: which, and the earlier value that is added to its result."""

    block: int
    skip: int | None


@dataclass(frozen=True)
class Plan:
    """A random model. ``hidden`` are the inner widths of its blocks; ``frozen`` ones are not trained."""

    hidden: tuple[int, ...]
    frozen: frozenset[int]
    steps: tuple[Step, ...]

    @property
    def reused(self) -> bool:
        """Whether a block is used more than once, so that its gradient is a sum."""
        return len({step.block for step in self.steps}) < len(self.steps)


class PlannedNetwork(nn.Module):
    """The model of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, WIDTH))
            for hidden in plan.hidden
        )
        for number in plan.frozen:
            self.blocks[number].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        values = [inputs]
        for step in self.plan.steps:
            result = self.blocks[step.block](values[-1])
            values.append(result if step.skip is None else result + values[step.skip])
        return self.head(values[-1])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of up to four blocks and five steps."""
    hidden = tuple(draw(st.lists(st.sampled_from([1, 7, 16, 48]), min_size=1, max_size=4)))
    blocks = st.integers(0, len(hidden) - 1)
    count = draw(st.integers(1, 5))
    steps = (Step(draw(blocks), draw(st.none() | st.integers(0, number))) for number in range(count))
    return Plan(hidden, draw(st.frozensets(blocks, max_size=1)), tuple(steps))
