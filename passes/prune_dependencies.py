"""Pass: dependencies that lane order and the other dependencies already imply are removed."""

from torch import fx

from megatrain_fx.graph import nodes_of, relink, schedule_of, set_fields, set_previous
from megatrain_fx.happens_before import HappensBefore, two_steps


def prune_dependencies(module: fx.GraphModule) -> fx.GraphModule:
    """Keep of every operation's dependencies only those that order something by themselves."""
    nodes = nodes_of(module)
    operations = schedule_of(module).operations
    within = HappensBefore(operations)
    across = HappensBefore(two_steps(operations), boundary=len(nodes))
    for index, node in enumerate(nodes):
        set_fields(node, after=tuple(nodes[dependency] for dependency in within.needed(index)))
        crossing = [dependency for dependency in across.needed(index + len(nodes)) if dependency < len(nodes)]
        set_previous(node, [nodes[dependency] for dependency in crossing])
    relink(module)
    return module
