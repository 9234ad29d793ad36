"""A pass of your own: fetch weights just before they are needed, instead of as early as possible.

    python examples/custom_pass.py

The pass moves operations of the schedule's torch.fx graph. The dependencies are derived afterwards, and the verifier
proves that the result cannot race, so the trained model is the same to the bit; only the overlap is lost.
"""

from __future__ import annotations

import torch
from torch import fx, nn

import megatrain_fx as megatrain
from megatrain_fx.graph import nodes_of, operation_of
from megatrain_fx.ir import Op


def fetch_late(module: fx.GraphModule) -> fx.GraphModule:
    """Move each prefetch to just before the first load from its slot."""
    for prefetch in nodes_of(module, Op.PREFETCH):
        (slot,) = operation_of(prefetch).writes
        node = prefetch.next
        while operation_of(node).op is not Op.LOAD or slot not in operation_of(node).reads:
            node = node.next
        node.prepend(prefetch)
    return module


def make_model() -> nn.Module:
    """The same small network at every call."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def main() -> None:
    """Show what the pass changes in the schedule, and that it changes nothing else."""
    inputs = torch.randn(8, 64)
    options = {"device": "cpu", "slots": 2, "stage_bytes": 0}
    early = megatrain.trace(make_model(), inputs, megatrain_options=options)
    late = megatrain.trace(make_model(), inputs, megatrain_options={**options, "passes": [fetch_late]})
    print(early.schedule.diff(late.schedule))

    outputs = []
    for passes in ([], [fetch_late]):
        model = megatrain.compile(make_model(), **options, passes=passes)
        loss = model(inputs).square().mean()
        loss.backward()
        outputs.append((loss, *(parameter.grad for parameter in model.parameters())))
    equal = all(torch.equal(one, other) for one, other in zip(*outputs, strict=True))
    print(f"loss and gradients equal to the bit: {equal}")


if __name__ == "__main__":
    main()
