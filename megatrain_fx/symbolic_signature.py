"""Symbolic signatures: the input sizes for which a graph captured with symbolic sizes is right."""

from __future__ import annotations

import dataclasses

from torch import fx

from megatrain_fx.private_api import SizeConditions, size_conditions
from megatrain_fx.signature import InputSignature


@dataclasses.dataclass(frozen=True)
class SymbolicSignature:
    """Which signatures one symbolic graph serves: those that differ from `example` in sizes that meet `conditions`."""

    example: InputSignature
    conditions: SizeConditions

    @classmethod
    def read(cls, graph_module: fx.GraphModule, example: InputSignature) -> SymbolicSignature:
        """From the placeholders of a captured graph and the guards that tracing it left behind."""
        placeholders = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
        return cls(example, size_conditions(placeholders))

    def accepts(self, signature: InputSignature) -> bool:
        """Whether the graph is right for calls of this signature: takes some 100 us, so keep the answer."""
        if not signature.differs_only_in_sizes(self.example):
            return False
        return self.conditions.hold([size for tensor in signature.tensors for size in tensor.shape])
