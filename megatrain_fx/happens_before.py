"""The happens-before relation of a schedule: lane order and event dependencies, as one vector clock an operation.

Vector clocks: Fidge (1988), Mattern (1989). ``clock[lane]`` is the index of the last operation of that lane that is
known to be complete when the operation starts; lanes run in order, so one number a lane says it all.
"""

from collections.abc import Sequence

from megatrain_fx.ir import Lane, Operation

_Clock = dict[Lane, int]


class HappensBefore:
    """Answers whether one operation of a schedule is complete before another one starts."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Build the clocks of all operations, each of which must depend only on earlier ones."""
        self._operations = operations
        self._clocks: list[_Clock] = []
        self._needed: list[tuple[int, ...]] = []
        last_of_lane: dict[Lane, int] = {}
        for index, operation in enumerate(operations):
            self._add(operation, last_of_lane.get(operation.lane))
            last_of_lane[operation.lane] = index

    def ordered(self, first: int, second: int) -> bool:
        """Whether operation ``first`` is complete before operation ``second`` starts."""
        return self._clocks[second].get(self._operations[first].lane, -1) >= first

    def needed(self, index: int) -> tuple[int, ...]:
        """The dependencies of an operation that nothing else implies, in ascending order."""
        return self._needed[index]

    def _add(self, operation: Operation, predecessor: int | None) -> None:
        """The latest dependency is taken first: whatever it implies is then seen to be redundant."""
        clock: _Clock = {}
        if predecessor is not None:
            clock = {**self._clocks[predecessor], operation.lane: predecessor}
        kept = []
        for dependency in sorted(set(operation.after), reverse=True):
            lane = self._operations[dependency].lane
            if clock.get(lane, -1) >= dependency:
                continue
            kept.append(dependency)
            for other, value in (*self._clocks[dependency].items(), (lane, dependency)):
                clock[other] = max(clock.get(other, -1), value)
        self._clocks.append(clock)
        self._needed.append(tuple(sorted(kept)))
