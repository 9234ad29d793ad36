"""Templates: the stateless functions of stages, one for all stages whose graphs are equal."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from megatrain_fx.stage_trace import StageTrace


@dataclass(frozen=True)
class Template:
    """The function ``(parameters, buffers, inputs) -> outputs`` of one or more stages.

    Attributes:
        index: its number, printed ``T<index>``.
        stages: the stages that share it.
        joint: forward and backward as one ATen graph, or None if the stage stays Python.
        reason: why it stays Python.
    """

    index: int
    stages: tuple[int, ...]
    joint: fx.GraphModule | None
    reason: str | None = None

    def __str__(self) -> str:
        head = f"T{self.index}: stages {', '.join(map(str, self.stages))}"
        if self.joint is None:
            return f"{head}\n  stays Python: {self.reason}"
        return f"{head}\n{self.joint.print_readable(print_output=False)}"


def deduplicate(traces: Sequence[StageTrace]) -> tuple[Template, ...]:
    """Templates of the stages, in order of their first stage.

    Stages share a template if their graphs are equal: the same operations with the same constants, on tensors of the same
    shapes, strides, dtypes and devices, forward and backward. So neither a Python attribute (a sliding window) nor a
    custom gradient can be confused with another.
    """
    members: dict[str, list[int]] = {}
    for stage, trace in enumerate(traces):
        key = f"python {stage}" if trace.joint is None else graph_key(trace.joint)
        members.setdefault(key, []).append(stage)
    templates = []
    for index, stages in enumerate(members.values()):
        first = traces[stages[0]]
        templates.append(Template(index, tuple(stages), first.joint, first.reason))
    return tuple(templates)


def graph_key(module: fx.GraphModule) -> str:
    """A digest of everything that decides what a graph computes."""
    digest = hashlib.sha256()
    for line in _lines(module):
        digest.update(line.encode())
    return digest.hexdigest()


def _lines(module: fx.GraphModule) -> Iterable[str]:
    number = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda argument: _Name(number[argument]))
        target = str(node.target) if node.op in ("call_function", "call_method") else ""
        yield f"{node.op} {target} {arguments} {_described(node.meta.get('val'))}"
        if node.op == "get_attr":
            yield from _attribute_lines(module, str(node.target))


class _Name(str):
    """A node's number, printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _attribute_lines(module: fx.GraphModule, target: str) -> Iterable[str]:
    value: object = module
    for name in target.split("."):
        value = getattr(value, name)
    if isinstance(value, fx.GraphModule):
        yield from _lines(value)
    elif isinstance(value, torch.Tensor) and not value.is_meta and value.numel() < 2**20:
        yield f"{_described(value)} {value.detach().cpu().reshape(-1).tolist()}"
    else:
        yield f"object {id(value)}"


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {value.stride()} {value.device}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    return str(value)
