"""Pass: dependencies that lane order and the other dependencies already imply are removed."""

from torch import fx

from megatrain_fx.graph import nodes_of, relink, schedule_of, set_fields
from megatrain_fx.happens_before import HappensBefore


def prune_dependencies(module: fx.GraphModule) -> fx.GraphModule:
    """Keep of every operation's dependencies only those that order something by themselves."""
    nodes = nodes_of(module)
    order = HappensBefore(schedule_of(module).operations)
    for index, node in enumerate(nodes):
        set_fields(node, after=tuple(nodes[dependency] for dependency in order.needed(index)))
    relink(module)
    return module
