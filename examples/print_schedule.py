"""Print the schedule of a small model, what each pass changed in it, and how a third weight slot changes it.

    python examples/print_schedule.py

Nothing is trained: ``megatrain.trace`` captures the model and runs the passes only.
"""

from __future__ import annotations

import difflib
import re
from itertools import pairwise

import torch
from torch import Tensor, nn

import megatrain_fx as megatrain


class Network(nn.Module):
    """Four equal layers and a head; features [batch, 32] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = features
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.head(hidden).square().mean()


def operations(schedule: megatrain.Schedule) -> list[str]:
    """Return the lines of a schedule without numbers: an operation more would change those of all that follow."""
    return [re.sub(r"^%\d+ *= *| +after .*$", "", line) for line in str(schedule).splitlines()]


def difference(before: megatrain.Schedule, after: megatrain.Schedule, before_name: str, after_name: str) -> str:
    """Return the unified diff of two schedules."""
    lines = difflib.unified_diff(operations(before), operations(after), before_name, after_name, lineterm="", n=1)
    return "\n".join(lines)


def main() -> None:
    """Trace with two and with three slots; print, check, and diff."""
    programs = {}
    for slots in (2, 3):
        model = megatrain.compile(Network(), device="cpu", slots=slots, stage_bytes=4096)
        programs[slots] = megatrain.trace(model, torch.randn(8, 32))

    schedule = programs[2].schedule
    print("The schedule with two slots:\n")
    print(schedule)
    schedule.verify()  # raises megatrain.ScheduleError when an access is not ordered
    assert megatrain.Schedule.parse(str(schedule)) == schedule
    print(
        f"\nverified; it parses back to an equal schedule; {len(programs[2].templates)} templates serve all its stages"
    )

    history = programs[2].history
    print("\nThe passes:", ", ".join(name for name, _ in history))
    for (earlier, before), (later, after) in pairwise(history[:3]):
        print(f"\nWhat {later} changed:\n\n{difference(before, after, earlier, later)}")

    print("\nFrom two slots to three:\n")
    print(difference(schedule, programs[3].schedule, "slots=2", "slots=3"))


if __name__ == "__main__":
    main()
