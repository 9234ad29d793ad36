"""Stages: contiguous runs of the captured graph, each with the units whose parameters travel together."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx, nn

from megatrain_fx.capture import Captured
from megatrain_fx.ir import value_name
from megatrain_fx.unit_call import UnitCall

_TINY = 100
"""How many times larger a unit must be for a small one before it to be no burden."""


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        index: position in execution order.
        module: runs the stage; its placeholders are ``inputs`` in order, its result the tuple of ``outputs``.
        inputs: names of the values it reads (``input.<k>`` or ``h<stage>.<k>``).
        outputs: names of the values it computes that a later stage or the caller uses.
        parameters: parameters it uses, by their name in ``module`` (shared ones once).
        units: paths of the units it runs, in call order.
        input_examples: fake tensors (or ints) as the inputs look, by position.
    """

    index: int
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    units: tuple[str, ...]
    input_examples: tuple[object, ...]


@dataclass(frozen=True)
class StagedGraph:
    """The stages of a captured graph, and the names of the values that it returns in order."""

    stages: tuple[Stage, ...]
    outputs: tuple[str, ...]


def partition(captured: Captured, stage_bytes: int) -> StagedGraph:
    """Cut the captured graph before units, merging neighbours while their parameters fit in ``stage_bytes``.

    Glue belongs to the unit before it; glue ahead of the first unit belongs to the first stage.
    """
    graph = captured.graph_module.graph
    segments = _merge(captured.graph_module, _segments(graph), stage_bytes)
    home = {node: number for number, segment in enumerate(segments) for node in segment}
    names = {node: f"input.{k}" for k, node in enumerate(graph.find_nodes(op="placeholder"))}
    returned = _returned(graph)
    stages = []
    for number, segment in enumerate(segments):
        crossing = [n for n in segment if n.op != "get_attr" and _leaves(n, number, home, returned)]
        crossing += [n for n in returned if n.op == "get_attr" and n not in names and number == len(segments) - 1]
        crossing = list(dict.fromkeys(crossing))
        names.update({node: value_name(number, k) for k, node in enumerate(crossing)})
        stages.append(_build(captured, number, segment, crossing, names))
    return StagedGraph(tuple(stages), tuple(names[node] for node in returned))


def _segments(graph: fx.Graph) -> list[list[fx.Node]]:
    """Computing nodes, a new segment beginning with each unit call after the first."""
    segments: list[list[fx.Node]] = [[]]
    has_unit = False
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if is_unit_call(node):
            if has_unit:
                segments.append([])
            has_unit = True
        segments[-1].append(node)
    return segments


def is_unit_call(node: fx.Node) -> bool:
    """Whether a node of a captured graph calls a unit."""
    if node.op != "call_module":
        return False
    root = node.graph.owning_module
    assert root is not None
    assert isinstance(node.target, str)
    return isinstance(root.get_submodule(node.target), UnitCall)


def _merge(root: fx.GraphModule, segments: list[list[fx.Node]], stage_bytes: int) -> list[list[fx.Node]]:
    """Join neighbours that fit together; and a tiny one (a last norm) with a much larger one (a head) that follows it.

    A layer that occurs many times is left as it is, so that all of them share one template.
    """
    kinds = Counter(kind for segment in segments for kind in _unit_types(root, segment))
    merged: list[list[fx.Node]] = []
    held: dict[int, nn.Parameter] = {}
    for segment in segments:
        own = {id(p): p for node in segment for p in parameters_of(root, node)}
        together = {**held, **own}
        alone = all(kinds[kind] == 1 for kind in _unit_types(root, segment))
        tiny = alone and _bytes(held.values()) * _TINY <= _bytes(own.values())
        if merged and (tiny or _bytes(together.values()) <= stage_bytes):
            merged[-1].extend(segment)
            held = together
        else:
            merged.append(list(segment))
            held = own
    return merged


def _unit_types(root: fx.GraphModule, segment: list[fx.Node]) -> list[type]:
    calls = [root.get_submodule(str(node.target)) for node in segment if is_unit_call(node)]
    return [type(call.unit) for call in calls if isinstance(call, UnitCall)]


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def parameters_of(root: fx.GraphModule, node: fx.Node) -> list[nn.Parameter]:
    """Parameters that a node uses: those of the unit or submodule it calls, and those it reads directly."""
    found: list[nn.Parameter] = []
    if node.op == "call_module":
        assert isinstance(node.target, str)
        found += root.get_submodule(node.target).parameters()
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            value = attribute(root, source)
            if isinstance(value, nn.Parameter):
                found.append(value)
            elif isinstance(value, nn.Module):
                found += value.parameters()
    return found


def attribute(root: nn.Module, node: fx.Node) -> object:
    """The object that a get_attr node stands for."""
    value: object = root
    assert isinstance(node.target, str)
    for name in node.target.split("."):
        value = getattr(value, name)
    return value


def _returned(graph: fx.Graph) -> list[fx.Node]:
    (output,) = graph.find_nodes(op="output")
    return [node for node in output.args[0] if isinstance(node, fx.Node)]


def _leaves(node: fx.Node, number: int, home: dict[fx.Node, int], returned: list[fx.Node]) -> bool:
    """Whether a value is used outside the stage that computes it (tuples are taken apart where they arise)."""
    return node in returned or any(home.get(user, number) != number for user in node.users)


def _build(
    captured: Captured, number: int, segment: list[fx.Node], crossing: list[fx.Node], names: dict[fx.Node, str]
) -> Stage:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inside = set(segment)
    sources = [source for node in segment for source in node.all_input_nodes if source not in inside]
    outside = [node for node in dict.fromkeys((*sources, *crossing)) if node not in inside]
    read = [node for node in outside if node.op != "get_attr"]
    for node in read:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in outside:
        if node.op == "get_attr":
            copies[node] = graph.node_copy(node)
    for node in segment:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in crossing))
    graph.lint()
    module = fx.GraphModule(captured.graph_module, graph, f"Stage{number}")
    return Stage(
        index=number,
        module=module,
        inputs=tuple(names[node] for node in read),
        outputs=tuple(names[node] for node in crossing),
        parameters=tuple(module.named_parameters()),
        units=tuple(child.path for child in module.modules() if isinstance(child, UnitCall)),
        input_examples=tuple(node.meta.get("val") for node in read),
    )
