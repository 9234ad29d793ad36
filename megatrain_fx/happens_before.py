"""The happens-before relation of a schedule: lane order and event dependencies, as one vector clock an operation.

Vector clocks: Fidge (1988), Mattern (1989). For a lane whose operations run in order, the clock holds the index of
its last operation that is known to be complete when an operation starts; that one number says it all. An operation of
a lane without order is a queue of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from megatrain_fx.ir import Lane, Operation

_Queue = Lane | int
_Clock = dict[_Queue, int]


class HappensBefore:
    """Answers whether one operation of a schedule is complete before another one starts."""

    def __init__(self, operations: Sequence[Operation], boundary: int | None = None) -> None:
        """Build the clocks of all operations, each of which must depend only on earlier ones.

        Args:
            operations: in issue order.
            boundary: index at which a new step begins. A step ends when all lanes but the optimizer's are idle.
        """
        self._operations = operations
        self._clocks: list[_Clock] = []
        self._needed: list[tuple[int, ...]] = []
        self._idle: _Clock = {}
        last: dict[_Queue, int] = {}
        for index, operation in enumerate(operations):
            if index == boundary:
                self._idle = self._joined([i for queue, i in last.items() if isinstance(queue, Lane)])
                last.clear()
            queue = self._queue(index)
            self._add(operation, last.get(queue))
            last[queue] = index

    def ordered(self, first: int, second: int) -> bool:
        """Whether operation ``first`` is complete before operation ``second`` starts."""
        return self._clocks[second].get(self._queue(first), -1) >= first

    def needed(self, index: int) -> tuple[int, ...]:
        """The dependencies of an operation that nothing else implies, in ascending order."""
        return self._needed[index]

    def _queue(self, index: int) -> _Queue:
        lane = self._operations[index].lane
        return lane if lane.in_order else index

    def _joined(self, indices: Sequence[int]) -> _Clock:
        """What is known to be complete once all these operations are."""
        joined: _Clock = {}
        for index in indices:
            for queue, value in (*self._clocks[index].items(), (self._queue(index), index)):
                joined[queue] = max(joined.get(queue, -1), value)
        return joined

    def _add(self, operation: Operation, predecessor: int | None) -> None:
        """The latest dependency is taken first: whatever it implies is then seen to be redundant."""
        clock = dict(self._idle) if predecessor is None else self._joined([predecessor])
        kept = []
        for dependency in sorted(set(operation.after), reverse=True):
            if clock.get(self._queue(dependency), -1) >= dependency:
                continue
            kept.append(dependency)
            for queue, value in self._joined([dependency]).items():
                clock[queue] = max(clock.get(queue, -1), value)
        self._clocks.append(clock)
        self._needed.append(tuple(sorted(kept)))


def two_steps(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """A schedule twice in a row, with dependencies on the previous step resolved in the second.

    Two steps show every pair of operations that can meet: a step begins when all lanes but the optimizer's are idle,
    and an update that is two steps old was waited for by the prefetch of its region in between.
    """
    length = len(operations)
    first = [replace(operation, after_previous=()) for operation in operations]
    second = [
        replace(operation, after=(*operation.after_previous, *(i + length for i in operation.after)), after_previous=())
        for operation in operations
    ]
    return (*first, *second)
