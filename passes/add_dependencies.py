"""Pass: conflicting accesses on different lanes get an event dependency."""

from typing import Any

from torch import fx

from megatrain_fx.graph import nodes_of, operation_of, relink, set_fields


def add_dependencies(module: fx.GraphModule) -> fx.GraphModule:
    """Make every operation wait for the earlier ones on other lanes whose accesses conflict with its own.

    Two accesses of one buffer conflict unless both only read it; a release counts as a write. The order of the graph is
    the meaning of the program, so the earlier operation of a conflicting pair is the one to wait for.
    """
    writer: dict[str, fx.Node] = {}
    readers: dict[str, list[fx.Node]] = {}
    for node in nodes_of(module):
        operation = operation_of(node)
        conflicts: list[fx.Node] = []
        for name in operation.read:
            conflicts += [writer[name]] if name in writer else []
            readers.setdefault(name, []).append(node)
        for name in (*operation.writes, *operation.freed):
            conflicts += [writer[name]] if name in writer else []
            conflicts += [reader for reader in readers.pop(name, []) if reader is not node]
            writer[name] = node
        existing: Any = node.kwargs["after"]
        crossing = [other for other in conflicts if operation_of(other).lane is not operation.lane]
        set_fields(node, after=tuple(dict.fromkeys((*existing, *crossing))))
    relink(module)
    return module
