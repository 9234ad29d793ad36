"""The third part of the specification: every gradient comes home, once, to its own region, and in the right order."""

from collections import defaultdict
from dataclasses import dataclass

from megatrain_fx.ir import BufferKind, Op, Operation, kind_of, number_of
from megatrain_fx.schedule import Schedule


@dataclass(frozen=True)
class _Gradients:
    """What a slab holds: the gradients of one stage, written by operation ``index``."""

    stage: int
    index: int


class GradientRules:
    """Follows gradients from the backward that computes them to the host store.

    They are added to the store in the order of the backwards: the first of a region may replace what is there, and
    floating-point sums depend on their order.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._slabs: dict[str, _Gradients] = {}
        self._waiting: set[str] = set()  # slabs whose content has not been carried on yet
        self._latest: dict[str, int] = {}  # region -> backward whose gradients were added last
        self._backwards: set[int] = set()
        self._regions: defaultdict[int, set[int]] = defaultdict(set)
        self._selectors: dict[int, int] = {}  # region -> the only stage that may train its selected rows alone
        for operation in schedule:
            if operation.view is not None and operation.stage is not None:
                self._regions[operation.stage].add(number_of(operation.view.region))
            if operation.op is Op.SELECT and operation.stage is not None:
                self._selectors[number_of(operation.writes[0])] = operation.stage

    def step(self, index: int, operation: Operation) -> str | None:
        """What is wrong with an operation at this point, or None. Its buffers are known to hold something."""
        if operation.op is Op.BACKWARD:
            self._fill(index, operation)
        elif operation.op is Op.EVACUATE:
            return self._carry(operation)
        elif operation.op is Op.ACCUMULATE:
            return self._carry(operation) or self._add(operation)
        elif operation.op is Op.RELEASE:
            return self._release(operation)
        return None

    def _fill(self, index: int, operation: Operation) -> None:
        assert operation.stage is not None
        self._backwards.add(operation.stage)
        for name in operation.writes:
            if kind_of(name) is BufferKind.SLAB:
                self._slabs[name] = _Gradients(operation.stage, index)
                self._waiting.add(name)

    def _carry(self, operation: Operation) -> str | None:
        source, target = operation.reads[0], operation.writes[0]
        if source not in self._waiting:
            return f"the gradients in {source} have left it already; they would be counted twice"
        self._waiting.remove(source)
        if operation.op is Op.EVACUATE:
            self._slabs[target] = self._slabs[source]
            self._waiting.add(target)
        return None

    def _add(self, operation: Operation) -> str | None:
        gradients, region = self._slabs[operation.reads[0]], number_of(operation.writes[0])
        held = f"{operation.reads[0]} holds gradients of stage.{gradients.stage}"
        if region not in self._regions[gradients.stage]:
            return f"{held}, which has no parameter in gradients.{region}"
        if len(operation.reads) > 1 and self._selectors.get(region) != gradients.stage:
            return f"{held}, which trains all rows of gradients.{region}, not only those that another stage looks up"
        latest = max(self._latest.get(name, -1) for name in operation.writes)
        if gradients.index <= latest:
            added = " and ".join(operation.writes)
            return f"the gradients of %{gradients.index} are added to {added} after those of the later %{latest}"
        self._latest.update(dict.fromkeys(operation.writes, gradients.index))
        return None

    def _release(self, operation: Operation) -> str | None:
        for name in operation.freed:
            if name in self._waiting:
                return f"{name} is released before its gradients have left it, so they are lost"
            if kind_of(name) is BufferKind.CHECKPOINT and number_of(name) not in self._backwards:
                return f"{name} is released before stage.{number_of(name)} has gone backward"
        return None
