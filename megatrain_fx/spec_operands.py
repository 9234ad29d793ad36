"""The first part of the specification: which lane each op runs in, and what kinds of buffers it reads and writes."""

import math
from dataclasses import dataclass

import torch

from megatrain_fx.ir import BufferKind, Lane, Op, Operation, kind_of, whole
from megatrain_fx.schedule import Schedule

K = BufferKind
_ANY = 10**9


@dataclass(frozen=True)
class Operands:
    """How many buffers of each kind an op takes: (least, most) by kind."""

    lanes: tuple[Lane, ...]
    reads: dict[BufferKind, tuple[int, int]]
    writes: dict[BufferKind, tuple[int, int]]
    has_stage: bool = False


RULES: dict[Op, Operands] = {
    Op.PREFETCH: Operands((Lane.H2D,), {K.WEIGHTS: (1, 2)}, {K.SLOT: (1, 1)}),
    Op.LOAD: Operands((Lane.COMPUTE,), {K.SLOT: (1, 1)}, {K.PARAMETER: (1, 1)}, has_stage=True),
    Op.CHECKPOINT: Operands(
        (Lane.COMPUTE,), {K.INPUT: (0, _ANY), K.VALUE: (0, _ANY)}, {K.CHECKPOINT: (1, 1)}, has_stage=True
    ),
    Op.FORWARD: Operands(
        (Lane.COMPUTE,),
        {K.SLOT: (0, _ANY), K.INPUT: (0, _ANY), K.VALUE: (0, _ANY)},
        {K.VALUE: (0, _ANY), K.TAPE: (0, 1)},
        has_stage=True,
    ),
    Op.SELECT: Operands((Lane.COMPUTE,), {K.INPUT: (0, 1), K.VALUE: (0, 1)}, {K.ROWS: (1, 1)}, has_stage=True),
    Op.YIELD: Operands((Lane.COMPUTE,), {K.INPUT: (0, _ANY), K.VALUE: (0, _ANY)}, {K.GRADIENT_VALUE: (0, _ANY)}),
    Op.RECOMPUTE: Operands(
        (Lane.COMPUTE,), {K.SLOT: (0, _ANY), K.CHECKPOINT: (1, 1)}, {K.TAPE: (1, 1)}, has_stage=True
    ),
    Op.BACKWARD: Operands(
        (Lane.COMPUTE,),
        {K.SLOT: (0, _ANY), K.TAPE: (1, 1), K.GRADIENT_VALUE: (1, _ANY)},
        {K.GRADIENT_VALUE: (0, _ANY), K.SLAB: (0, _ANY)},
        has_stage=True,
    ),
    Op.EVACUATE: Operands((Lane.D2H,), {K.SLAB: (1, 1)}, {K.SLAB: (1, 1)}),
    Op.ACCUMULATE: Operands((Lane.HOST,), {K.SLAB: (1, 1), K.ROWS: (0, 1)}, {K.GRADIENTS: (1, 2)}),
    Op.NORM: Operands((Lane.HOST,), {K.GRADIENTS: (1, 1)}, {K.NORM: (1, 1)}),
    Op.CLIP: Operands((Lane.HOST,), {K.NORM: (1, _ANY)}, {K.SCALE: (1, 1)}),
    Op.UPDATE: Operands((Lane.OPTIMIZER,), {K.GRADIENTS: (1, 1), K.ROWS: (0, 1), K.SCALE: (0, 1)}, {K.WEIGHTS: (1, 1)}),
    Op.RELEASE: Operands(
        (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.HOST),
        dict.fromkeys((K.SLOT, K.SLAB, K.VALUE, K.GRADIENT_VALUE, K.CHECKPOINT, K.TAPE), (0, _ANY)),
        {},
    ),
}

_ALLOCATED = (K.SLOT, K.SLAB, K.WEIGHTS, K.GRADIENTS)


def check_operands(schedule: Schedule, operation: Operation) -> str | None:
    """What is wrong with the form of an operation, or None."""
    rule = RULES[operation.op]
    if operation.lane not in rule.lanes:
        return f"{operation.op} runs in lane {' or '.join(map(str, rule.lanes))}, not {operation.lane}"
    if rule.has_stage and operation.stage is None:
        return f"{operation.op} needs a stage, for example stage.0"
    return (
        _check_kinds(operation.op, "read", operation.reads, rule.reads)
        or _check_kinds(operation.op, "write", operation.writes, rule.writes)
        or _check_sides(operation)
        or _check_whole(schedule, operation)
        or _check_fit(schedule, operation)
    )


def _check_kinds(op: Op, verb: str, names: tuple[str, ...], rule: dict[BufferKind, tuple[int, int]]) -> str | None:
    if len(set(names)) != len(names):
        return f"{op} names a buffer twice among those it {verb}s"
    kinds = [kind_of(name) for name in names]
    for name, kind in zip(names, kinds, strict=True):
        if kind not in rule:
            return f"{op} cannot {verb} {name}: it {verb}s {', '.join(k.name.lower() for k in rule) or 'nothing'}"
    for kind, (least, most) in rule.items():
        if not least <= kinds.count(kind) <= most:
            return f"{op} {verb}s {kinds.count(kind)} buffers of kind {kind.name.lower()}, expected {least} to {most}"
    return None


def _check_sides(operation: Operation) -> str | None:
    """Slabs have a device side and a host side; each op uses one or brings one to the other."""
    slabs = [name for name in (*operation.reads, *operation.writes) if kind_of(name) is K.SLAB]
    expected = {
        Op.BACKWARD: ["device"] * len(slabs),
        Op.EVACUATE: ["device", "host"],
        Op.ACCUMULATE: ["host"],
    }.get(operation.op)
    sides = [name.rpartition(".")[2] for name in slabs]
    if expected is not None and sides != expected:
        return f"{operation.op} uses slabs on {sides}, expected {expected}"
    return None


def _check_whole(schedule: Schedule, operation: Operation) -> str | None:
    buffers = schedule.buffers
    for name in (*operation.reads, *operation.writes):
        if kind_of(name) in _ALLOCATED and whole(name) not in buffers:
            return f"{name} is not allocated; declare it above the operations as '{whole(name)} <size> bytes'"
    return None


def _check_fit(schedule: Schedule, operation: Operation) -> str | None:
    """A flat copy must fit where it goes, and a view must lie within its region."""
    buffers = schedule.buffers
    if operation.op in (Op.PREFETCH, Op.EVACUATE, Op.ACCUMULATE):
        source, target = whole(operation.reads[0]), whole(operation.writes[0])
        fits = (
            buffers[target] <= buffers[source] if operation.op is Op.ACCUMULATE else buffers[source] <= buffers[target]
        )
        if not fits:
            return f"{source} ({buffers[source]} bytes) does not fit {target} ({buffers[target]} bytes)"
    return _check_view(operation, buffers) if operation.op is Op.LOAD else None


def _check_view(operation: Operation, buffers: dict[str, int]) -> str | None:
    view = operation.view
    if view is None:
        return "load needs a view: '(weights.<k>+<offset> <dtype>[<sizes>])'"
    dtype = getattr(torch, view.dtype, None)
    if not isinstance(dtype, torch.dtype):
        return f"the view {view} has an unknown element type"
    if view.offset + math.prod(view.shape) * dtype.itemsize > buffers.get(view.region, -1):
        return f"the view {view} lies outside its region"
    return None
