"""Pass: conflicting accesses on different lanes get an event dependency."""

from typing import Any

from torch import fx

from megatrain_fx.graph import nodes_of, operation_of, previous_of, relink, set_fields, set_previous


def add_dependencies(module: fx.GraphModule) -> fx.GraphModule:
    """Make every operation wait for the earlier ones on other lanes whose accesses conflict with its own.

    Two accesses of one buffer conflict unless both only read it; a release counts as a write. The order of the graph
    is the meaning of the program, so the earlier operation of a conflicting pair is the one to wait for. A training
    loop is a cycle: the operations are visited twice, and what an operation meets of the previous step's optimizer is
    waited for as ``prev``. The other lanes are idle when a step begins.
    """
    conflicts = _Conflicts()
    nodes = nodes_of(module)
    first = {node: conflicts.meet(node) for node in nodes}
    for node in nodes:
        existing: Any = node.kwargs["after"]
        set_fields(node, after=tuple(dict.fromkeys((*existing, *first[node]))))
    seen: set[fx.Node] = set()
    for node in nodes:
        late = [other for other in conflicts.meet(node) if other not in seen and not operation_of(other).lane.in_order]
        set_previous(node, tuple(dict.fromkeys((*previous_of(node), *late))))
        seen.add(node)
    relink(module)
    return module


class _Conflicts:
    """The last write and the reads since then of every buffer, while operations are visited in order."""

    def __init__(self) -> None:
        self._writer: dict[str, fx.Node] = {}
        self._readers: dict[str, list[fx.Node]] = {}

    def meet(self, node: fx.Node) -> list[fx.Node]:
        """Operations of other queues that conflict with a node, which is visited now."""
        operation = operation_of(node)
        found: list[fx.Node] = []
        for name in operation.read:
            found += [self._writer[name]] if name in self._writer else []
            self._readers.setdefault(name, []).append(node)
        for name in (*operation.writes, *operation.freed):
            found += [self._writer[name]] if name in self._writer else []
            found += self._readers.pop(name, [])
            self._writer[name] = node
        crossing = [other for other in found if other is not node and _other_queue(other, node)]
        return list(dict.fromkeys(crossing))


def _other_queue(one: fx.Node, other: fx.Node) -> bool:
    lane = operation_of(one).lane
    return not lane.in_order or lane is not operation_of(other).lane
