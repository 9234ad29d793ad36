"""Measures the most memory that a piece of a program takes, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import torch
from torch import nn
import megatrain_fx as megatrain

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

torch.set_num_threads(2)
megatrain.compile(nn.Sequential(nn.Linear(8, 8)), device="cpu")(torch.ones(2, 8)).sum().backward()
# Freeing a large block makes malloc keep what is freed later, as in any process that has worked for a while.
block = torch.empty(30 * 2**20, dtype=torch.uint8)
del block
{prepare}
open("/proc/self/clear_refs", "w").write("5")
start = status("VmRSS")
{measured}
print(status("VmHWM") - start)
"""


def peak_bytes(prepare: str, measured: str) -> int:
    """Resident bytes that the second text takes at most, beyond what is resident after the first.

    Both are Python; `torch`, `nn` and `megatrain` are imported.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc/self/clear_refs to reset the peak of resident memory")
    root = Path(__file__).parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(prepare=prepare, measured=measured)],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout.splitlines()[-1])
