"""The second part of the specification: what every buffer holds when the operations run in issue order."""

from collections import defaultdict

from megatrain_fx.ir import BufferKind, Op, Operation, kind_of, whole
from megatrain_fx.schedule import Schedule

_GIVEN = (BufferKind.INPUT, BufferKind.WEIGHTS, BufferKind.GRADIENTS)
_MUST_BE_RELEASED = (BufferKind.SLOT, BufferKind.SLAB)


class ContentRules:
    """Runs a schedule on names alone and tells the first operation that uses a buffer wrongly."""

    def __init__(self, schedule: Schedule) -> None:
        self._holds: dict[str, int] = {}  # buffer -> index of the operation that filled it
        self._region: dict[str, str] = {}  # slot -> region that it holds
        self._loaded: defaultdict[int, set[tuple[str, str, int]]] = defaultdict(set)  # stage -> (slot, name, fill)
        self._tape_slots: dict[str, dict[str, int]] = {}
        self._forwards: list[int] = []
        self._checkpoint_after: dict[int, int] = {}
        self._backwards: list[int] = []
        self._yielded = False
        self._views = _views_by_stage(schedule)
        written = {name for operation in schedule for name in operation.writes}
        self._provided = {
            name
            for operation in schedule
            for name in operation.reads
            if kind_of(name) is BufferKind.CHECKPOINT and name not in written
        }
        self._has_forward = any(operation.op is Op.FORWARD for operation in schedule)

    def step(self, index: int, operation: Operation) -> str | None:
        """What is wrong with an operation at this point, or None."""
        return (
            self._check_reads(operation)
            or self._check_writes(operation)
            or self._check_order(operation)
            or self._check_weights(index, operation)
            or self._apply(index, operation)
        )

    def finish(self) -> str | None:
        """What is wrong at the end, or None."""
        for name in self._holds:
            if kind_of(name) in _MUST_BE_RELEASED:
                return f"{name} is never released after %{self._holds[name]} filled it"
        return None if self._yielded else "the schedule never yields to its caller"

    def _check_reads(self, operation: Operation) -> str | None:
        for name in operation.reads:
            if name in self._holds or (kind_of(name) in _GIVEN):
                continue
            if name in self._provided and not self._has_forward:
                continue
            verb = "released, but it" if operation.op is Op.RELEASE else "read, but"
            return f"{name} is {verb} holds nothing here: it was not written, or was released before"
        return None

    def _check_writes(self, operation: Operation) -> str | None:
        for name in operation.writes:
            kind = kind_of(name)
            if name not in self._holds or kind in (BufferKind.GRADIENTS, BufferKind.PARAMETER):
                continue
            if kind is BufferKind.GRADIENT_VALUE and name in operation.reads:
                continue
            return f"{name} is overwritten while it still holds the result of %{self._holds[name]}; release it first"
        return None

    def _check_order(self, operation: Operation) -> str | None:
        """Random numbers are drawn, and gradients summed, in the order of the model."""
        stage = operation.stage if operation.stage is not None else -1
        latest = self._forwards[-1] if self._forwards else -1
        if operation.op is Op.CHECKPOINT and stage <= latest:
            return f"the checkpoint of stage.{stage} must be taken before its forward (and so must its random state)"
        if operation.op is Op.FORWARD:
            if self._yielded:
                return f"stage.{stage} runs forward after the yield, when the caller may have drawn random numbers"
            if stage <= latest:
                return f"stage.{stage} runs after stage.{latest}: forwards draw random numbers, so their order is fixed"
            if self._checkpoint_after.get(stage, latest) != latest:
                return f"stage.{latest} ran between the checkpoint of stage.{stage} and its forward"
        if operation.op is Op.BACKWARD and self._backwards and stage >= self._backwards[-1]:
            return (
                f"stage.{stage} goes backward after stage.{self._backwards[-1]}: gradients are summed in reverse order"
            )
        if operation.op is Op.YIELD and self._yielded:
            return "a schedule yields once"
        return None

    def _check_weights(self, index: int, operation: Operation) -> str | None:
        if operation.op is Op.LOAD:
            return self._check_load(operation)
        if operation.op in (Op.FORWARD, Op.RECOMPUTE):
            return self._check_loaded(operation)
        if operation.op is Op.BACKWARD:
            return self._check_tape(operation)
        return None

    def _check_load(self, operation: Operation) -> str | None:
        slot, view = operation.reads[0], operation.view
        assert operation.stage is not None
        assert view is not None
        if self._region[slot] != view.region:
            return f"{slot} holds {self._region[slot]}, not {view.region}"
        if (slot, operation.writes[0], self._holds[slot]) in self._loaded[operation.stage]:
            return f"{operation.writes[0]} is loaded twice for one use"
        return None

    def _check_loaded(self, operation: Operation) -> str | None:
        """Every parameter of the stage has been loaded, from a slot that this operation reads, since its last use."""
        assert operation.stage is not None
        slots = {name for name in operation.reads if kind_of(name) is BufferKind.SLOT}
        loaded = self._loaded[operation.stage]
        ready = {name for slot, name, fill in loaded if slot in slots and self._holds.get(slot) == fill}
        missing = sorted(self._views[operation.stage] - ready)
        if missing:
            return f"{missing[0]} of stage.{operation.stage} is not loaded from a slot that this operation reads"
        idle = sorted(slots - {slot for slot, _, _ in loaded})
        return f"{idle[0]} is read, but stage.{operation.stage} loads nothing from it" if idle else None

    def _check_tape(self, operation: Operation) -> str | None:
        """Autograd keeps views of the weights: the slots of the tape must be read, and not refilled meanwhile."""
        tape = next(name for name in operation.reads if kind_of(name) is BufferKind.TAPE)
        if tape != f"tape.{operation.stage}":
            return f"stage.{operation.stage} cannot go backward on {tape}"
        for slot, fill in self._tape_slots[tape].items():
            if slot not in operation.reads:
                return f"{tape} was recorded with weights in {slot}, so the backward reads {slot} too"
            if self._holds[slot] != fill:
                return f"{slot} was refilled after {tape} was recorded with its weights"
        return None

    def _apply(self, index: int, operation: Operation) -> str | None:
        for name in operation.freed:
            self._holds.pop(name, None)
        self._holds.update(dict.fromkeys((n for n in operation.writes if kind_of(n) not in _GIVEN), index))
        stage = operation.stage if operation.stage is not None else -1
        if operation.op is Op.PREFETCH:
            self._region[operation.writes[0]] = whole(operation.reads[0])
        elif operation.op is Op.LOAD:
            slot = operation.reads[0]
            self._loaded[stage].add((slot, operation.writes[0], self._holds[slot]))
        elif operation.op in (Op.FORWARD, Op.RECOMPUTE):
            self._run(stage, operation)
        elif operation.op is Op.CHECKPOINT:
            self._checkpoint_after[stage] = self._forwards[-1] if self._forwards else -1
        elif operation.op is Op.BACKWARD:
            self._backwards.append(stage)
        elif operation.op is Op.YIELD:
            self._yielded = True
        return None

    def _run(self, stage: int, operation: Operation) -> None:
        slots = {name: self._holds[name] for name in operation.reads if kind_of(name) is BufferKind.SLOT}
        self._loaded[stage].clear()
        for name in operation.writes:
            if kind_of(name) is BufferKind.TAPE:
                self._tape_slots[name] = slots
        if operation.op is Op.FORWARD:
            self._forwards.append(stage)


def _views_by_stage(schedule: Schedule) -> defaultdict[int, set[str]]:
    """Names of all parameters that each stage ever loads."""
    views: defaultdict[int, set[str]] = defaultdict(set)
    for operation in schedule:
        if operation.op is Op.LOAD and operation.stage is not None:
            views[operation.stage].update(operation.writes)
    return views
