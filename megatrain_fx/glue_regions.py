"""Glue regions: parts of the captured graph that the model runs under other gradient or autocast modes.

`torch.export` wraps each such region in a higher-order operator. Here every region becomes a node that calls
`run_region`, and a region that contains unit calls is opened first: its unit calls then stand in the graph itself,
with the region's modes in `node.meta["modes"]`, and the glue between them becomes smaller regions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from megatrain_fx.execution_modes import Autocast, ExecutionModes, run_region

_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_NO_CHANGE = ExecutionModes()
IsUnitCall = Callable[[fx.Node], bool]


def rewrite_regions(graph_module: fx.GraphModule, is_unit_call: IsUnitCall) -> None:
    """Open the regions that contain unit calls, and make every other region a call of `run_region`, in place."""
    while regions := [node for node in _regions(graph_module) if _contains_unit_call(graph_module, node, is_unit_call)]:
        for node in regions:
            _open_region(graph_module, node)
    for nodes in list(_runs_of_equal_modes(graph_module.graph, is_unit_call)):
        _enclose(graph_module, nodes)
    _call_run_region(graph_module)
    graph_module.graph.lint()


def _regions(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if node.target in (_SET_GRAD, _AUTOCAST)]


def _parts(graph_module: fx.GraphModule, node: fx.Node) -> tuple[ExecutionModes, fx.Node, tuple[fx.Node, ...]]:
    """The modes, the `get_attr` node of the module, and the operands of a higher-order region node."""
    arguments: tuple[Any, ...] = node.args
    if node.target is _SET_GRAD:
        enabled, module, *operands = arguments
        modes = ExecutionModes(grad_enabled=enabled)
    else:
        # Tracing switches the cache of autocast off, so what the model asked for is not known: None is the default.
        device_type, dtype, enabled, _, module, *operands = arguments
        modes = ExecutionModes(autocast=(Autocast(device_type, dtype, enabled, None),))
    return modes, module, tuple(operands)


def _body(graph_module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    body = graph_module.get_submodule(str(_parts(graph_module, node)[1].target))
    assert isinstance(body, fx.GraphModule)
    return body


def _contains_unit_call(graph_module: fx.GraphModule, node: fx.Node, is_unit_call: IsUnitCall) -> bool:
    body = _body(graph_module, node)
    if any(is_unit_call(inner) for inner in body.graph.nodes):
        return True
    return any(_contains_unit_call(body, inner, is_unit_call) for inner in _regions(body))


def _open_region(graph_module: fx.GraphModule, region: fx.Node) -> None:
    """Copy the body of `region` into the graph in its place; each copied node carries its modes."""
    graph, body = graph_module.graph, _body(graph_module, region)
    modes, module, operands = _parts(graph_module, region)
    outer = region.meta.get("modes", _NO_CHANGE)
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    copies: dict[fx.Node, fx.Node] = dict(zip(inputs, operands, strict=True))
    with graph.inserting_before(region):
        results = graph.graph_copy(body.graph, copies)
    for original, copy in copies.items():
        if original.op == "placeholder":
            continue
        copy.meta["modes"] = original.meta.get("modes", modes.within(outer))
        if copy.op == "get_attr":
            copy.target = _add_module(graph_module, "region_body", body.get_submodule(str(original.target)))
    for user in list(region.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index,arg-type]
        graph.erase_node(user)
    graph.erase_node(region)
    graph.erase_node(module)


def _runs_of_equal_modes(graph: fx.Graph, is_unit_call: IsUnitCall) -> Iterator[list[fx.Node]]:
    """Each longest run of neighbouring glue nodes that have equal modes, other than the model's own."""
    run: list[fx.Node] = []
    for node in graph.nodes:
        modes = node.meta.get("modes", _NO_CHANGE)
        outside = modes == _NO_CHANGE or is_unit_call(node) or _is_item_of(node, is_unit_call)
        if run and (outside or modes != run[0].meta["modes"]):
            yield run
            run = []
        if not outside:
            run.append(node)


def _is_item_of(node: fx.Node, is_unit_call: IsUnitCall) -> bool:
    """An item of a unit's results is taken beside the unit call, so that only tensors enter a region."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_unit_call(node.args[0])


def _enclose(graph_module: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Replace a run of nodes by one `run_region` node over a module that holds them."""
    members = dict.fromkeys(nodes)
    operands = list(dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg not in members))
    results = [node for node in nodes if any(user not in members for user in node.users)]
    body = _extract(graph_module, nodes, operands, results)
    graph, modes = graph_module.graph, nodes[0].meta["modes"]
    with graph.inserting_after(nodes[-1]):
        module = graph.get_attr(_add_module(graph_module, "region", body))
    with graph.inserting_after(module):
        call = graph.call_function(run_region, region_arguments(modes, module, operands))
    call.meta = {"val": tuple(node.meta.get("val") for node in results), "stack_trace": nodes[0].stack_trace}
    with graph.inserting_after(call):
        for index, node in reversed(list(enumerate(results))):
            item = graph.call_function(operator.getitem, (call, index))
            item.meta = {key: value for key, value in node.meta.items() if key != "modes"}
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in members)
    for node in reversed(nodes):
        graph.erase_node(node)


def _extract(
    graph_module: fx.GraphModule, nodes: list[fx.Node], operands: list[fx.Node], results: list[fx.Node]
) -> fx.GraphModule:
    graph, copies, modules = fx.Graph(), {}, {}
    for operand in operands:
        copies[operand] = graph.placeholder(operand.name)
        copies[operand].meta = dict(operand.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        del copies[node].meta["modes"]
        if node.op == "get_attr":
            modules[str(node.target)] = graph_module.get_submodule(str(node.target))
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(modules, graph)


def _call_run_region(graph_module: fx.GraphModule) -> None:
    """Make every higher-order region node a call of `run_region`, at all depths."""
    for node in _regions(graph_module):
        _call_run_region(_body(graph_module, node))
        modes, module, operands = _parts(graph_module, node)
        node.target, node.args = run_region, region_arguments(modes, module, operands)
    for child in graph_module.children():
        if isinstance(child, fx.GraphModule):
            _call_run_region(child)
    graph_module.recompile()


def region_arguments(modes: ExecutionModes, module: fx.Node, operands: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of a `run_region` node."""
    return (modes.grad_enabled, tuple(tuple(setting) for setting in modes.autocast), module, *operands)


def _add_module(graph_module: fx.GraphModule, prefix: str, module: nn.Module) -> str:
    taken = dict(graph_module.named_children())
    name = next(name for name in (f"{prefix}_{i}" for i in range(len(taken) + 1)) if name not in taken)
    graph_module.add_submodule(name, module)
    return name
