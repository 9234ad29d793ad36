"""Pass: the gradients of all stages share a few slabs, device and host ones in equal number."""

from torch import fx

from megatrain_fx.graph import facts_of, nodes_of, operation_of, relink, rename_buffers
from megatrain_fx.ir import Op, number_of
from megatrain_fx.passes.residency import Use, buffers_needed, size_classes


def assign_slabs(module: fx.GraphModule) -> fx.GraphModule:
    """Replace ``slab.use<n>.device`` and ``.host`` by slabs in rotation, large and small regions apart."""
    facts = facts_of(module)
    carried = [
        (operation_of(n).reads[0], number_of(operation_of(n).writes[0])) for n in nodes_of(module, Op.ACCUMULATE)
    ]
    home = {slab.removesuffix(".host"): region for slab, region in carried}
    classes = size_classes([region.gradient_bytes for region in facts.regions])
    groups = _uses(module)
    uses = [Use(tuple(home[slab] for slab in group)) for group in groups]
    counts = buffers_needed(uses, classes, facts.slabs)
    first = {kind: sum(counts[other] for other in counts if other < kind) for kind in counts}
    turn = dict.fromkeys(counts, 0)
    names: dict[str, str] = {}
    for group in groups:
        for slab in group:
            kind = classes[home[slab]]
            number = first[kind] + turn[kind] % counts[kind]
            turn[kind] += 1
            names.update({f"{slab}.{side}": f"slab.{number}.{side}" for side in ("device", "host")})
    for node in nodes_of(module):
        rename_buffers(node, names)
    relink(module)
    return module


def _uses(module: fx.GraphModule) -> list[tuple[str, ...]]:
    """The slabs that each backward writes, in order."""
    groups = []
    for node in nodes_of(module, Op.BACKWARD):
        writes = operation_of(node).writes
        slabs = tuple(name.removesuffix(".device") for name in writes if name.startswith("slab."))
        if slabs:
            groups.append(slabs)
    return groups
