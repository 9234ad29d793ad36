"""The third part of the specification: an optimizer's step comes after everything that it may not disturb."""

from collections import defaultdict

from megatrain_fx.ir import BufferKind, Op, Operation, kind_of
from megatrain_fx.schedule import Schedule


class UpdateRules:
    """Within one step, gradients are complete before they are measured or used, and weights do not change in use."""

    def __init__(self, schedule: Schedule) -> None:
        self._last_accumulate: dict[str, int] = {}
        self._last_prefetch: dict[str, int] = {}
        for index, operation in enumerate(schedule):
            if operation.op is Op.ACCUMULATE:
                self._last_accumulate.update(dict.fromkeys(operation.writes, index))
            elif operation.op is Op.PREFETCH:
                self._last_prefetch.update(dict.fromkeys(operation.reads, index))
        self._measured = [o.writes[0] for o in schedule if o.op is Op.NORM]
        self._updates: defaultdict[str, int] = defaultdict(int)

    def step(self, index: int, operation: Operation) -> str | None:
        """What is wrong with an operation at this point, or None."""
        if operation.op in (Op.NORM, Op.UPDATE):
            gradients = next(name for name in operation.reads if kind_of(name) is BufferKind.GRADIENTS)
            if self._last_accumulate.get(gradients, -1) > index:
                return f"{gradients} is not complete yet: %{self._last_accumulate[gradients]} still adds to it"
        if operation.op is Op.CLIP and list(operation.reads) != self._measured:
            missing = sorted(set(self._measured) - set(operation.reads))
            return f"clip must read every norm, once and in order; missing: {', '.join(missing) or 'none'}"
        if operation.op is Op.UPDATE:
            return self._check_update(index, operation)
        return None

    def _check_update(self, index: int, operation: Operation) -> str | None:
        weights = operation.writes[0]
        gradients = next(name for name in operation.reads if kind_of(name) is BufferKind.GRADIENTS)
        if weights.split(".")[1] != gradients.split(".")[1]:
            return f"{weights} cannot be updated with {gradients}"
        if self._last_prefetch.get(weights, -1) > index:
            return (
                f"{weights} is updated before its last use in this step, the prefetch %{self._last_prefetch[weights]}"
            )
        if self._measured and "scale" not in operation.reads:
            return f"{weights} is updated with gradients that are not clipped, but this step clips: read scale"
        self._updates[weights] += 1
        return f"{weights} is updated twice in one step" if self._updates[weights] > 1 else None
