"""The passes that turn the stages of a model into a schedule, in the order in which they run.

To add one, see CONTRIBUTING.md; :func:`pipeline` is the table of contents.
"""

from collections.abc import Sequence

from megatrain_fx.contracts import Property
from megatrain_fx.pass_manager import GraphTransform, SchedulePass
from megatrain_fx.passes.add_dependencies import add_dependencies
from megatrain_fx.passes.assign_slabs import assign_slabs
from megatrain_fx.passes.assign_slots import assign_slots
from megatrain_fx.passes.evacuate_gradients import evacuate_gradients
from megatrain_fx.passes.hoist_prefetches import hoist_prefetches
from megatrain_fx.passes.insert_checkpoints import insert_checkpoints
from megatrain_fx.passes.insert_updates import insert_updates
from megatrain_fx.passes.lower_stages import lower_stages
from megatrain_fx.passes.prune_dependencies import prune_dependencies
from megatrain_fx.passes.release_values import release_values
from megatrain_fx.passes.split_updates import split_updates
from megatrain_fx.passes.stream_weights import stream_weights

__all__ = [
    "add_dependencies",
    "assign_slabs",
    "assign_slots",
    "evacuate_gradients",
    "hoist_prefetches",
    "insert_checkpoints",
    "insert_updates",
    "lower_stages",
    "pipeline",
    "prune_dependencies",
    "release_values",
    "split_updates",
    "stream_weights",
]


def pipeline(custom: Sequence[GraphTransform | SchedulePass] = ()) -> tuple[SchedulePass, ...]:
    """All passes in order; ``custom`` ones run on the assigned graph, before dependencies are derived and verified."""
    return (
        SchedulePass(lower_stages, ensures=frozenset({Property.LOWERED})),
        SchedulePass(insert_checkpoints, frozenset({Property.LOWERED}), frozenset({Property.CHECKPOINTED})),
        SchedulePass(evacuate_gradients, frozenset({Property.LOWERED}), frozenset({Property.EVACUATED})),
        SchedulePass(stream_weights, frozenset({Property.CHECKPOINTED}), frozenset({Property.STREAMED})),
        SchedulePass(release_values, frozenset({Property.CHECKPOINTED}), frozenset({Property.RELEASED})),
        SchedulePass(assign_slots, frozenset({Property.STREAMED}), frozenset({Property.SLOTS_ASSIGNED})),
        SchedulePass(assign_slabs, frozenset({Property.EVACUATED}), frozenset({Property.SLABS_ASSIGNED})),
        SchedulePass(hoist_prefetches, frozenset({Property.SLOTS_ASSIGNED})),
        SchedulePass(insert_updates, frozenset({Property.EVACUATED})),
        SchedulePass(split_updates, frozenset({Property.SLABS_ASSIGNED})),
        *(one if isinstance(one, SchedulePass) else SchedulePass(one) for one in custom),
        SchedulePass(
            add_dependencies,
            frozenset({Property.SLOTS_ASSIGNED, Property.SLABS_ASSIGNED}),
            frozenset({Property.VERIFIED}),
        ),
        SchedulePass(prune_dependencies, frozenset({Property.VERIFIED}), frozenset({Property.PRUNED})),
    )
