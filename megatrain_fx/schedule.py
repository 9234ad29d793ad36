"""A schedule: ordered operations with lanes and explicit dependencies; what is printed, verified and executed."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatrain_fx.ir import Operation
from megatrain_fx.text import format_schedule, parse_schedule


@dataclass(frozen=True)
class Schedule:
    """An immutable schedule.

    Attributes:
        operations: in issue order; operation ``i`` is printed ``%i``.
        sizes: name and bytes of every buffer that is allocated before a run (slots, slabs, host regions).
    """

    operations: tuple[Operation, ...]
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def buffers(self) -> dict[str, int]:
        """Bytes of every allocated buffer, by name."""
        return dict(self.sizes)

    def text(self, marks: Mapping[int, str] | None = None) -> str:
        """The text form; ``marks`` writes a remark below some operations."""
        return format_schedule(self.operations, self.buffers, marks or {})

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """The schedule of a text; ``Schedule.parse(str(schedule)) == schedule``.

        Raises:
            ScheduleParseError: a line is not of the text form.
        """
        operations, buffers = parse_schedule(text)
        return cls(operations, tuple(buffers.items()))

    def verify(self) -> None:
        """Prove that no run of this schedule can race, deadlock, or read what was not written.

        Raises:
            ScheduleError: with the schedule printed and the offending operation marked.
        """
        from megatrain_fx.spec import verify

        verify(self)

    def diff(self, other: "Schedule") -> str:
        """A unified diff from this schedule to another one, operations compared without their numbers."""
        lines = (_unnumbered(self), _unnumbered(other))
        return "\n".join(difflib.unified_diff(*lines, "before", "after", lineterm="", n=2))

    def __len__(self) -> int:
        return len(self.operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __str__(self) -> str:
        return self.text()


def _unnumbered(schedule: Schedule) -> list[str]:
    """Lines without line numbers, so that one inserted operation is one line of a diff."""
    lines = []
    for line in str(schedule).splitlines():
        operation = line.split(" = ", 1)[-1].split("  after %", 1)[0]
        lines.append(" ".join(operation.split()))
    return lines
