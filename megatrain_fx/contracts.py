"""Properties that passes require and ensure, each with its check."""

import enum
from collections.abc import Callable

from torch import fx

from megatrain_fx.errors import PassError
from megatrain_fx.graph import facts_of, nodes_of, operation_of, schedule_of
from megatrain_fx.happens_before import HappensBefore, two_steps
from megatrain_fx.ir import BufferKind, Op, kind_of


class Property(enum.Enum):
    """What may be true of a schedule graph. The value completes the phrase 'in which ...'."""

    LOWERED = "every stage has one forward, and there is one yield"
    CHECKPOINTED = "every backward reads a tape and gradients, and no activation"
    STREAMED = "every forward and recompute reads a slot for each region of its stage"
    EVACUATED = "every slab that a backward writes is brought home"
    RELEASED = "no activation, checkpoint or tape is left at the end"
    SLOTS_ASSIGNED = "slots are numbered from zero"
    SLABS_ASSIGNED = "slabs are numbered from zero"
    VERIFIED = "the verifier accepts the schedule"
    PRUNED = "no dependency is redundant"


def _lowered(module: fx.GraphModule) -> None:
    facts = facts_of(module)
    stages = [operation_of(node).stage for node in nodes_of(module, Op.FORWARD)]
    expected = [] if facts.resume else list(range(len(facts.stages)))
    if stages != expected:
        raise PassError(f"forwards of stages {stages}, expected {expected}")
    if len(nodes_of(module, Op.YIELD)) != 1:
        raise PassError(f"{len(nodes_of(module, Op.YIELD))} yields, expected one")


def _checkpointed(module: fx.GraphModule) -> None:
    allowed = (BufferKind.TAPE, BufferKind.GRADIENT_VALUE, BufferKind.SLOT)
    for node in nodes_of(module, Op.BACKWARD):
        operation = operation_of(node)
        others = [name for name in operation.reads if kind_of(name) not in allowed]
        if others or not any(kind_of(name) is BufferKind.TAPE for name in operation.reads):
            raise PassError(f"the backward of stage.{operation.stage} reads {', '.join(operation.reads)}")


def _streamed(module: fx.GraphModule) -> None:
    facts = facts_of(module)
    for node in nodes_of(module, Op.FORWARD, Op.RECOMPUTE):
        operation = operation_of(node)
        assert operation.stage is not None
        slots = [name for name in operation.reads if kind_of(name) is BufferKind.SLOT]
        regions = facts.stages[operation.stage].regions
        if len(slots) != len(regions):
            raise PassError(f"{operation.op} of stage.{operation.stage} reads slots {slots} for regions {regions}")


def _evacuated(module: fx.GraphModule) -> None:
    waiting: dict[str, int | None] = {}
    for node in nodes_of(module):
        operation = operation_of(node)
        if operation.op is Op.EVACUATE:
            waiting.pop(operation.reads[0], None)
        for name in (*operation.writes, *operation.freed):
            if name in waiting:
                raise PassError(f"{name}, which the backward of stage.{waiting[name]} writes, is never evacuated")
        if operation.op is Op.BACKWARD:
            waiting.update((name, operation.stage) for name in operation.writes if kind_of(name) is BufferKind.SLAB)
            if direct := [name for name in operation.writes if kind_of(name) is BufferKind.GRADIENTS]:
                raise PassError(f"the backward of stage.{operation.stage} writes {direct[0]} from the device")
    for name, stage in waiting.items():
        raise PassError(f"{name}, which the backward of stage.{stage} writes, is never evacuated")


def _released(module: fx.GraphModule) -> None:
    alive: dict[str, int | None] = {}
    kinds = (BufferKind.VALUE, BufferKind.GRADIENT_VALUE, BufferKind.CHECKPOINT, BufferKind.TAPE)
    for node in nodes_of(module):
        operation = operation_of(node)
        for name in operation.freed:
            alive.pop(name, None)
        alive.update({name: operation.stage for name in operation.writes if kind_of(name) in kinds})
    left = [name for name in alive if not name.startswith("grad.input")]
    if left:
        raise PassError(f"{left[0]} is never released")


def _numbered(kind: BufferKind) -> Callable[[fx.GraphModule], None]:
    def check(module: fx.GraphModule) -> None:
        for node in nodes_of(module):
            operation = operation_of(node)
            for name in (*operation.reads, *operation.writes):
                if kind_of(name) is kind and not name.split(".")[1].isdigit():
                    raise PassError(f"{name} is not assigned")

    return check


def _verified(module: fx.GraphModule) -> None:
    schedule_of(module).verify()


def _pruned(module: fx.GraphModule) -> None:
    operations = schedule_of(module).operations
    order = HappensBefore(operations)
    cycle = HappensBefore(two_steps(operations), boundary=len(operations))
    for index, operation in enumerate(operations):
        needed = order.needed(index)
        needed_previous = [i for i in cycle.needed(index + len(operations)) if i < len(operations)]
        redundant = [f"%{i}" for i in operation.after if i not in needed]
        redundant += [f"prev %{i}" for i in operation.after_previous if i not in needed_previous]
        if redundant:
            raise PassError(f"%{index} need not wait for {redundant[0]}")


CHECKS: dict[Property, Callable[[fx.GraphModule], None]] = {
    Property.LOWERED: _lowered,
    Property.CHECKPOINTED: _checkpointed,
    Property.STREAMED: _streamed,
    Property.EVACUATED: _evacuated,
    Property.RELEASED: _released,
    Property.SLOTS_ASSIGNED: _numbered(BufferKind.SLOT),
    Property.SLABS_ASSIGNED: _numbered(BufferKind.SLAB),
    Property.VERIFIED: _verified,
    Property.PRUNED: _pruned,
}
