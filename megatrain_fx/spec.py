"""The specification of legal schedules: proves that a schedule cannot race, deadlock, or read what was not written.

Layers, each a small file: the operands of each op (:mod:`.spec_operands`); the parts in which a region may be named
(:mod:`.spec_rows`); what every buffer holds when the operations run in issue order (:mod:`.spec_contents`); how
gradients come home in that order (:mod:`.spec_gradients`) and when the optimizer's step may come
(:mod:`.spec_updates`); and here the happens-before analysis: if every pair of conflicting accesses is ordered by lanes
and dependencies, then every execution gives what issue order gives. Deadlock is impossible when operations wait only
for earlier ones, since lanes are first-in first-out and are filled in issue order.
"""

from collections import defaultdict
from collections.abc import Sequence

from megatrain_fx.errors import ScheduleError
from megatrain_fx.happens_before import HappensBefore, two_steps
from megatrain_fx.ir import Operation
from megatrain_fx.schedule import Schedule
from megatrain_fx.spec_contents import ContentRules
from megatrain_fx.spec_gradients import GradientRules
from megatrain_fx.spec_operands import check_operands
from megatrain_fx.spec_rows import RowRules
from megatrain_fx.spec_updates import UpdateRules

_CONTEXT_LINES = 12
_LONG_SCHEDULE = 120


def verify(schedule: Schedule) -> None:
    """Check every rule.

    Raises:
        ScheduleError: the first broken rule, the schedule, and a mark below the offending operation.
    """
    for index, operation in enumerate(schedule.operations):
        unknown = [dependency for dependency in operation.after_previous if dependency >= len(schedule)]
        if unknown:
            raise ScheduleError(explain(schedule, index, f"it waits for prev %{unknown[0]}, which does not exist"))
        late = [dependency for dependency in operation.after if dependency >= index]
        if late:
            raise ScheduleError(explain(schedule, index, _cycle(late[0])))
        if broken := check_operands(schedule, operation):
            raise ScheduleError(explain(schedule, index, broken))
    contents, gradients, updates = ContentRules(schedule), GradientRules(schedule), UpdateRules(schedule)
    rows = RowRules(schedule)
    races = RaceCheck(schedule.operations)
    for index, operation in enumerate(schedule.operations):
        broken = (
            rows.step(operation)
            or contents.step(index, operation)
            or gradients.step(index, operation)
            or updates.step(index, operation)
            or races.step(index, operation)
        )
        if broken:
            raise ScheduleError(explain(schedule, index, broken))
    if left := contents.finish():
        raise ScheduleError(explain(schedule, len(schedule) - 1, left))
    _verify_cycle(schedule)


def _verify_cycle(schedule: Schedule) -> None:
    """Check that the end of one step cannot race with the beginning of the next."""
    if all(operation.lane.in_order for operation in schedule):
        return  # a step begins when all lanes but the optimizer's are idle
    length = len(schedule)
    operations = two_steps(schedule.operations)
    races = RaceCheck(operations, boundary=length)
    for index, operation in enumerate(operations):
        if broken := races.step(index, operation):
            raise ScheduleError(explain(schedule, index % length, broken))


def _cycle(dependency: int) -> str:
    return (
        f"deadlock: it waits for %{dependency}, which is issued later, so lanes would wait for each other for ever "
        f"(a cycle); an operation may depend only on earlier ones"
    )


class RaceCheck:
    """Each access of a buffer must happen after the accesses that it conflicts with.

    It is enough to compare with the last write and the reads since then: earlier accesses are ordered before those.
    """

    def __init__(self, operations: Sequence[Operation], boundary: int | None = None) -> None:
        """``boundary``: index at which ``operations`` begin a second step."""
        self._operations = operations
        self._boundary = len(operations) if boundary is None else boundary
        self._order = HappensBefore(operations, boundary)
        self._writer: dict[str, int] = {}
        self._readers: defaultdict[str, list[int]] = defaultdict(list)

    def step(self, index: int, operation: Operation) -> str | None:
        """The race that this operation completes, if any."""
        for name in operation.read:
            if broken := self._against(index, name, self._writers(name)):
                return broken
            self._readers[name].append(index)
        for name in (*operation.writes, *operation.freed):
            others = [*self._writers(name), *(reader for reader in self._readers.pop(name, []) if reader != index)]
            if broken := self._against(index, name, others):
                return broken
            self._writer[name] = index
        return None

    def _writers(self, name: str) -> list[int]:
        return [self._writer[name]] if name in self._writer else []

    def _against(self, index: int, name: str, others: list[int]) -> str | None:
        for other in others:
            if not self._order.ordered(other, index):
                return (
                    f"race on {name}: {self._name(other, index)} ({self._operations[other].op}) need not be complete "
                    f"when %{index % self._boundary} ({self._operations[index].op}) starts; add 'after "
                    f"{self._name(other, index)}'"
                )
        return None

    def _name(self, other: int, index: int) -> str:
        """How operation ``index`` calls an earlier one."""
        return f"prev %{other}" if other < self._boundary <= index else f"%{other % self._boundary}"


def explain(schedule: Schedule, index: int, reason: str) -> str:
    """The reason and the schedule with a mark below operation ``index``; a long schedule is shown around it."""
    text = schedule.text({index: reason}) if len(schedule) else "(empty)"
    lines = text.splitlines()
    if len(schedule) > _LONG_SCHEDULE:
        mark = next(number for number, line in enumerate(lines) if line.lstrip().startswith("^ "))
        begin, end = max(mark - _CONTEXT_LINES, 0), mark + _CONTEXT_LINES
        lines = ["  ...", *lines[begin:end], "  ..."]
    return f"operation %{index}: {reason}\n" + "\n".join(lines)
