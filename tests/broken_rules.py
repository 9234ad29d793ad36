"""One broken schedule for every rule of the verifier: an edit of a legal schedule and the refusal that it meets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import megatrain_fx as megatrain
from megatrain_fx.ir import Lane, Op, Operation, View
from megatrain_fx.schedule import Schedule
from schedule_edits import changed, find, inserted, moved, removed, resized
from synthetic_facts import chain_schedule

LEGAL = chain_schedule(3)
Edit = Callable[[Schedule], Schedule]
COMPUTE, H2D, D2H, HOST = Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.HOST


def refusal(schedule: Schedule) -> tuple[int, str]:
    """The operation that the verifier marks and the reason; the error shows both in the printed schedule."""
    with pytest.raises(megatrain.ScheduleError) as caught:
        schedule.verify()
    first, _, printed = str(caught.value).partition("\n")
    number, _, reason = first.removeprefix("operation %").partition(": ")
    assert printed == schedule.text({int(number): reason})
    return int(number), reason


def at(op: Op, *, nth: int = 0, stage: int | None = None, **fields: object) -> Edit:
    """Replace fields of an operation."""
    where = {} if stage is None else {"stage": stage}
    return lambda schedule: changed(schedule, find(schedule, op, nth=nth, **where), **fields)


def without(op: Op, *, nth: int = 0, **where: object) -> Edit:
    """Take an operation away."""
    return lambda schedule: removed(schedule, find(schedule, op, nth=nth, **where))


def also(index: int, op: Op, lane: Lane, **fields: object) -> Edit:
    """Insert an operation."""
    return lambda schedule: inserted(schedule, index, Operation(op, lane, **fields))  # type: ignore[arg-type]


OPERANDS: dict[str, tuple[Edit, int, str]] = {
    "wrong lane": (at(Op.FORWARD, lane=H2D), 4, "forward runs in lane compute, not h2d"),
    "no stage": (lambda schedule: changed(schedule, 4, stage=None), 4, "forward needs a stage, for example stage.0"),
    "reads the wrong kind": (
        at(Op.PREFETCH, reads=("gradients.0",)),
        0,
        "prefetch cannot read gradients.0: it reads weights",
    ),
    "writes the wrong kind": (
        at(Op.YIELD, writes=("slab.0.device",)),
        15,
        "yield cannot write slab.0.device: it writes gradient_value",
    ),
    "writes where nothing is written": (
        at(Op.RELEASE, writes=("h0.0",)),
        5,
        "release cannot write h0.0: it writes nothing",
    ),
    "reads too few": (at(Op.PREFETCH, reads=()), 0, "prefetch reads 0 buffers of kind weights, expected 1 to 2"),
    "writes too many": (
        at(Op.PREFETCH, writes=("slot.0", "slot.1")),
        0,
        "prefetch writes 2 buffers of kind slot, expected 1 to 1",
    ),
    "names a buffer twice": (
        at(Op.FORWARD, nth=1, reads=("slot.1", "h0.0", "h0.0")),
        9,
        "forward names a buffer twice among those it reads",
    ),
    "evacuates to the device": (
        at(Op.EVACUATE, writes=("slab.0.device",)),
        20,
        "evacuate uses slabs on ['device', 'device'], expected ['device', 'host']",
    ),
    "accumulates from the device": (
        at(Op.ACCUMULATE, reads=("slab.0.device",)),
        22,
        "accumulate uses slabs on ['device'], expected ['host']",
    ),
    "goes backward into a host slab": (
        at(Op.BACKWARD, writes=("grad.h1.0", "slab.0.host")),
        17,
        "backward uses slabs on ['host'], expected ['device']",
    ),
    "an unknown slot": (
        at(Op.PREFETCH, writes=("slot.7",)),
        0,
        "slot.7 is not allocated; declare it above the operations as 'slot.7 <size> bytes'",
    ),
    "an unknown region": (
        at(Op.PREFETCH, reads=("weights.7",)),
        0,
        "weights.7 is not allocated; declare it above the operations as 'weights.7 <size> bytes'",
    ),
    "weights that do not fit": (
        lambda schedule: resized(schedule, "slot.0", 128),
        0,
        "weights.0 (256 bytes) does not fit slot.0 (128 bytes)",
    ),
    "a device slab that does not fit": (
        lambda schedule: resized(schedule, "slab.0.host", 128),
        20,
        "slab.0.device (256 bytes) does not fit slab.0.host (128 bytes)",
    ),
    "gradients that do not fit": (
        lambda schedule: resized(schedule, "gradients.2", 512),
        22,
        "slab.0.host (256 bytes) does not fit gradients.2 (512 bytes)",
    ),
    "a load without a view": (
        at(Op.LOAD, view=None),
        3,
        "load needs a view: '(weights.<k>+<offset> <dtype>[<sizes>])'",
    ),
    "a view that ends outside": (
        at(Op.LOAD, view=View("weights.0", 4, (8, 8), "float32")),
        3,
        "the view weights.0+4 float32[8, 8] lies outside its region",
    ),
    "a view of an unknown region": (
        at(Op.LOAD, view=View("weights.7", 0, (), "float32")),
        3,
        "the view weights.7+0 float32[] lies outside its region",
    ),
    "a view of an unknown type": (
        at(Op.LOAD, view=View("weights.0", 0, (8, 8), "float31")),
        3,
        "the view weights.0+0 float31[8, 8] has an unknown element type",
    ),
}

CONTENTS: dict[str, tuple[Edit, int, str]] = {
    "a value read before it is written": (
        at(Op.FORWARD, nth=0, reads=("slot.0", "h2.0")),
        4,
        "h2.0 is read, but holds nothing here: it was not written, or was released before",
    ),
    "a slot read after its release": (
        also(4, Op.RELEASE, COMPUTE, reads=("slot.0",), after=(0,)),
        5,
        "slot.0 is read, but holds nothing here: it was not written, or was released before",
    ),
    "a slot never filled": (
        without(Op.PREFETCH),
        2,
        "slot.0 is read, but holds nothing here: it was not written, or was released before",
    ),
    "a double release": (
        also(6, Op.RELEASE, COMPUTE, reads=("slot.0",)),
        6,
        "slot.0 is released, but it holds nothing here: it was not written, or was released before",
    ),
    "a slot overwritten while held": (
        lambda schedule: moved(changed(schedule, 6, after=()), 6, 2),
        2,
        "slot.0 is overwritten while it still holds the result of %0; release it first",
    ),
    "a slab overwritten while held": (
        without(Op.RELEASE, lane=D2H),
        25,
        "slab.0.device is overwritten while it still holds the result of %17; release it first",
    ),
    "a checkpoint overwritten": (
        also(3, Op.CHECKPOINT, COMPUTE, stage=0, reads=("input.0",), writes=("checkpoint.0",)),
        3,
        "checkpoint.0 is overwritten while it still holds the result of %2; release it first",
    ),
    "a gradient overwritten without being read": (
        lambda schedule: changed(
            changed(schedule, 18, reads=("slot.0", "checkpoint.2", "tape.2")),
            26,
            writes=("grad.h0.0", "grad.h2.0", "slab.0.device"),
        ),
        26,
        "grad.h2.0 is overwritten while it still holds the result of %15; release it first",
    ),
    "a view of another region": (
        at(Op.LOAD, view=View("weights.1", 0, (8, 8), "float32")),
        3,
        "slot.0 holds weights.0, not weights.1",
    ),
    "a parameter loaded twice": (
        also(4, Op.LOAD, COMPUTE, stage=0, reads=("slot.0",), writes=("<0.weight>",), view=LEGAL.operations[3].view),
        4,
        "<0.weight> is loaded twice for one use",
    ),
    "a parameter not loaded": (
        without(Op.LOAD),
        3,
        "<0.weight> of stage.0 is not loaded from a slot that this operation reads",
    ),
    "a parameter not loaded again for the recompute": (
        without(Op.LOAD, nth=3),
        24,
        "<1.weight> of stage.1 is not loaded from a slot that this operation reads",
    ),
    "a slot that the stage does not use": (
        at(Op.FORWARD, reads=("slot.0", "slot.1", "input.0")),
        4,
        "slot.1 is read, but stage.0 loads nothing from it",
    ),
    "two yields": (also(17, Op.YIELD, COMPUTE), 17, "a schedule yields once"),
    "no yield": (
        lambda schedule: Schedule(schedule.operations[:3], schedule.sizes),
        2,
        "slot.0 is never released after %0 filled it",
    ),
    "forwards out of order": (
        lambda schedule: inserted(
            inserted(schedule, 14, Operation(Op.FORWARD, COMPUTE, stage=9, reads=("h1.0",), writes=("h9.0",))),
            15,
            Operation(Op.FORWARD, COMPUTE, stage=8, reads=("h1.0",), writes=("h8.0",)),
        ),
        15,
        "stage.8 runs after stage.9: forwards draw random numbers, so their order is fixed",
    ),
    "a forward after the yield": (
        also(16, Op.FORWARD, COMPUTE, stage=3, reads=("h2.0",), writes=("h3.0",)),
        16,
        "stage.3 runs forward after the yield, when the caller may have drawn random numbers",
    ),
    "a checkpoint after its forward": (
        lambda schedule: changed(moved(schedule, 2, 4), 4, reads=("input.0",)),
        4,
        "the checkpoint of stage.0 must be taken before its forward (and so must its random state)",
    ),
    "a forward between a checkpoint and its forward": (
        lambda schedule: changed(moved(schedule, 11, 8), 8, reads=("h0.0",)),
        13,
        "stage.1 ran between the checkpoint of stage.2 and its forward",
    ),
    "backwards out of order": (
        lambda schedule: changed(schedule, 26, stage=2),
        26,
        "stage.2 goes backward after stage.2: gradients are summed in reverse order",
    ),
    "the tape of another stage": (
        lambda schedule: changed(
            changed(schedule, 25, writes=("tape.0",)), 26, reads=("slot.1", "tape.0", "grad.h1.0")
        ),
        26,
        "stage.1 cannot go backward on tape.0",
    ),
    "a backward without the slot of its tape": (
        at(Op.BACKWARD, reads=("tape.2", "grad.h2.0")),
        17,
        "tape.2 was recorded with weights in slot.0, so the backward reads slot.0 too",
    ),
    "a slot of a tape refilled": (
        lambda schedule: inserted(
            inserted(schedule, 14, Operation(Op.RELEASE, COMPUTE, reads=("slot.0",))),
            15,
            Operation(Op.PREFETCH, H2D, reads=("weights.2",), writes=("slot.0",), after=(14,)),
        ),
        19,
        "slot.0 was refilled after tape.2 was recorded with its weights",
    ),
    "a slot that leaks": (
        lambda schedule: changed(schedule, 35, reads=("checkpoint.0", "grad.h0.0", "tape.0")),
        39,
        "slot.0 is never released after %19 filled it",
    ),
    "a slab that leaks": (without(Op.RELEASE, nth=-1), 38, "slab.0.host is never released after %36 filled it"),
}

GRADIENTS: dict[str, tuple[Edit, int, str]] = {
    "evacuated but not accumulated": (
        without(Op.ACCUMULATE),
        22,
        "slab.0.host is released before its gradients have left it, so they are lost",
    ),
    "released before they are evacuated": (
        without(Op.EVACUATE),
        20,
        "slab.0.device is released before its gradients have left it, so they are lost",
    ),
    "accumulated twice": (
        also(23, Op.ACCUMULATE, HOST, reads=("slab.0.host",), writes=("gradients.2",)),
        23,
        "the gradients in slab.0.host have left it already; they would be counted twice",
    ),
    "accumulated into another region": (
        at(Op.ACCUMULATE, writes=("gradients.1",)),
        22,
        "slab.0.host holds gradients of stage.2, which has no parameter in gradients.1",
    ),
    "a stage that never goes backward": (
        lambda schedule: changed(removed(schedule, 34), 34, reads=("slot.0", "checkpoint.0")),
        34,
        "checkpoint.0 is released before stage.0 has gone backward",
    ),
}

ORDER: dict[str, tuple[Edit, int, str]] = {
    "a race with a copy": (
        at(Op.LOAD, after=()),
        3,
        "race on slot.0: %0 (prefetch) need not be complete when %3 (load) starts; add 'after %0'",
    ),
    "a race with a release": (
        at(Op.PREFETCH, nth=2, after=()),
        6,
        "race on slot.0: %5 (release) need not be complete when %6 (prefetch) starts; add 'after %5'",
    ),
    "a dependency on the wrong operation": (
        at(Op.EVACUATE, nth=1, after=(22, 26)),
        28,
        "race on slab.0.host: %23 (release) need not be complete when %28 (evacuate) starts; add 'after %23'",
    ),
    "a release on another lane": (
        at(Op.RELEASE, lane=H2D),
        5,
        "race on slot.0: %3 (load) need not be complete when %5 (release) starts; add 'after %3'",
    ),
    "a deadlock": (
        at(Op.PREFETCH, nth=1, after=(13,)),
        1,
        "deadlock: it waits for %13, which is issued later, so lanes would wait for each other for ever (a cycle); "
        "an operation may depend only on earlier ones",
    ),
    "an operation that waits for itself": (
        at(Op.PREFETCH, after=(0,)),
        0,
        "deadlock: it waits for %0, which is issued later, so lanes would wait for each other for ever (a cycle); "
        "an operation may depend only on earlier ones",
    ),
}

BROKEN_RULES: dict[str, tuple[Edit, int, str]] = {**OPERANDS, **CONTENTS, **GRADIENTS, **ORDER}
"""By rule: the edit, the index of the operation that is marked, and the reason."""
