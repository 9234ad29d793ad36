"""Templates: the stateless functions of stages, one for all stages that compute the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from megatrain_fx.stage_trace import StageTrace


@dataclass(frozen=True)
class Template:
    """The function ``(parameters, buffers, inputs) -> outputs`` of one or more stages.

    Attributes:
        index: its number, printed ``T<index>``.
        stages: the stages that share it.
        joint: forward and backward as one ATen graph (see :func:`megatrain_fx.stage_trace.trace_joint_graph`), or
            None if the stage stays Python.
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


def deduplicate(traces: Sequence[StageTrace], joint_graph: Callable[[int], fx.GraphModule]) -> tuple[Template, ...]:
    """Templates of the stages, in order of their first stage.

    Stages share a template if their traces are equal: the same operations with the same constants, on tensors of the
    same shapes, strides, dtypes and devices, forward and backward. So neither a Python attribute (a sliding window)
    nor a custom gradient can be confused with another.

    Args:
        traces: one a stage.
        joint_graph: traces the graph of a stage; called once a template.
    """
    members: dict[str, list[int]] = {}
    for stage, trace in enumerate(traces):
        members.setdefault(trace.key or f"python {stage}", []).append(stage)
    templates = []
    for index, stages in enumerate(members.values()):
        first = traces[stages[0]]
        joint = None if first.key is None else joint_graph(stages[0])
        templates.append(Template(index, tuple(stages), joint, first.reason))
    return tuple(templates)
