"""Pass: the uses of regions share a few slots; a region that is still in its slot is not fetched again."""

from torch import fx

from megatrain_fx.graph import facts_of, nodes_of, operation_of, relink, rename_buffers, set_fields
from megatrain_fx.ir import BufferKind, Op, kind_of, number_of
from megatrain_fx.passes.residency import Use, assign, buffers_needed, size_classes


def assign_slots(module: fx.GraphModule) -> fx.GraphModule:
    """Replace ``slot.use<n>`` by ``slot.<k>``, with no prefetch of a resident region, nor the release before."""
    facts = facts_of(module)
    region_of = {
        operation_of(node).writes[0]: number_of(operation_of(node).reads[0]) for node in nodes_of(module, Op.PREFETCH)
    }
    groups = _uses(module)
    uses = [Use(tuple(region_of[slot] for slot in group)) for group in groups]
    classes = size_classes([region.bytes for region in facts.regions])
    places = assign(uses, classes, buffers_needed(uses, classes, facts.slots))
    names: dict[str, str] = {}
    kept: set[str] = set()
    latest: dict[str, str] = {}
    for group, place in zip(groups, places, strict=True):
        for slot in group:
            number, resident = place[region_of[slot]]
            names[slot] = f"slot.{number}"
            if resident:
                kept.update((f"fetch {slot}", f"free {latest[names[slot]]}"))
            latest[names[slot]] = slot
    _rewrite(module, names, kept)
    relink(module)
    return module


def _uses(module: fx.GraphModule) -> list[tuple[str, ...]]:
    """The slots that each forward or recompute reads, in order."""
    groups = []
    for node in nodes_of(module, Op.FORWARD, Op.RECOMPUTE):
        slots = tuple(name for name in operation_of(node).reads if kind_of(name) is BufferKind.SLOT)
        if slots:
            groups.append(slots)
    return groups


def _rewrite(module: fx.GraphModule, names: dict[str, str], kept: set[str]) -> None:
    """Erase prefetches and releases of slots that stay filled; rename the rest."""
    for node in nodes_of(module):
        operation = operation_of(node)
        node.args = ()
        if operation.op is Op.RELEASE:
            set_fields(node, reads=tuple(name for name in operation.reads if f"free {name}" not in kept))
    for node in nodes_of(module):
        operation = operation_of(node)
        resident = operation.op is Op.PREFETCH and f"fetch {operation.writes[0]}" in kept
        if resident or (operation.op is Op.RELEASE and not operation.reads):
            module.graph.erase_node(node)
        else:
            rename_buffers(node, names)
