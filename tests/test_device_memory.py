"""Models larger than the GPU memory that the process may use: they train, where eager PyTorch runs out of memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import torch
from torch import nn
import megatrain_fx as megatrain

MIB = 2**20
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(1024 * MIB / total)
model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(32)))
weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
assert weights > 2048 * MIB
inputs = torch.randn(16, 4096, device="cuda")
try:
    model.to("cuda")
    raise SystemExit("eager PyTorch did not run out of memory")
except torch.OutOfMemoryError:
    model.to("cpu")
    torch.cuda.empty_cache()
model = megatrain.compile(model, stage_bytes=0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
losses = []
for _ in range(3):
    loss = (model(inputs) - inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[2] < losses[0], losses
assert torch.cuda.max_memory_reserved() <= 1024 * MIB
print("trained", weights // MIB, "MiB of weights in", torch.cuda.max_memory_reserved() // MIB, "MiB", losses)
"""


@pytest.mark.cuda
def test_weights_that_exceed_the_memory_allowed() -> None:
    result = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-2000:] + result.stdout
    assert result.stdout.startswith("trained 2")
