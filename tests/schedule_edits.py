"""Edits of schedules that keep the dependencies of all other operations pointing at the operations they meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatrain_fx.errors import ScheduleError
from megatrain_fx.ir import Op, Operation
from megatrain_fx.schedule import Schedule


@dataclass(frozen=True)
class Mutant:
    """An edited schedule and what was done to it."""

    edit: str
    schedule: Schedule

    def __str__(self) -> str:
        return self.edit


def accepted(schedule: Schedule) -> bool:
    """Whether the verifier accepts a schedule."""
    try:
        schedule.verify()
    except ScheduleError:
        return False
    return True


def find(schedule: Schedule, op: Op, *, nth: int = 0, **fields: object) -> int:
    """Index of the ``nth`` operation of an op whose fields have the given values."""
    found = [
        index
        for index, operation in enumerate(schedule)
        if operation.op is op and all(getattr(operation, name) == value for name, value in fields.items())
    ]
    return found[nth]


def changed(schedule: Schedule, index: int, **fields: Any) -> Schedule:
    """Operation ``index`` with some fields replaced."""
    operations = list(schedule.operations)
    operations[index] = replace(operations[index], **fields)
    return Schedule(tuple(operations), schedule.sizes)


def removed(schedule: Schedule, index: int) -> Schedule:
    """Without operation ``index``; what waited for it waits for nothing instead."""
    return _reordered(schedule, [i for i in range(len(schedule)) if i != index])


def moved(schedule: Schedule, index: int, to: int) -> Schedule:
    """Operation ``index`` at position ``to``."""
    order = [i for i in range(len(schedule)) if i != index]
    order.insert(to, index)
    return _reordered(schedule, order)


def inserted(schedule: Schedule, index: int, operation: Operation) -> Schedule:
    """A new operation at position ``index``; its ``after`` counts in the new schedule."""
    numbers = {old: old + (old >= index) for old in range(len(schedule))}
    operations = [_renumbered(old, numbers) for old in schedule]
    operations.insert(index, operation)
    return Schedule(tuple(operations), schedule.sizes)


def resized(schedule: Schedule, name: str, size: int) -> Schedule:
    """A buffer of another size."""
    return Schedule(schedule.operations, tuple({**schedule.buffers, name: size}.items()))


def dependency_deletions(schedule: Schedule) -> Iterator[Mutant]:
    """One mutant for every dependency, on this step or the previous one, without it."""
    for index, operation in enumerate(schedule):
        for dependency in operation.after:
            kept = tuple(other for other in operation.after if other != dependency)
            yield Mutant(f"%{index} no longer after %{dependency}", changed(schedule, index, after=kept))
        for dependency in operation.after_previous:
            kept = tuple(other for other in operation.after_previous if other != dependency)
            mutant = changed(schedule, index, after_previous=kept)
            yield Mutant(f"%{index} no longer after prev %{dependency}", mutant)


def neighbour_swaps(schedule: Schedule) -> Iterator[Mutant]:
    """Two mutants for every two neighbours in a lane: the later one moved up, and the earlier one moved down.

    Both put the two in the other order in their lane; they differ in where the pair stands among the other lanes.
    """
    latest: dict[str, int] = {}
    for later, operation in enumerate(schedule):
        earlier = latest.get(operation.lane.value)
        latest[operation.lane.value] = later
        if earlier is None:
            continue
        yield Mutant(f"%{later} moved up over %{earlier}", moved(schedule, later, earlier))
        if later > earlier + 1:
            yield Mutant(f"%{earlier} moved down over %{later}", moved(schedule, earlier, later))


def _reordered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    numbers = {old: new for new, old in enumerate(order)}
    operations = (_renumbered(schedule.operations[old], numbers) for old in order)
    return Schedule(tuple(operations), schedule.sizes)


def _renumbered(operation: Operation, numbers: Mapping[int, int]) -> Operation:
    return replace(
        operation,
        after=tuple(sorted(numbers[other] for other in operation.after if other in numbers)),
        after_previous=tuple(sorted(numbers[other] for other in operation.after_previous if other in numbers)),
    )
