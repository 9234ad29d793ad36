"""Processors: how many cores this process may use."""

import math
import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores(topology: Path = _TOPOLOGY, quota: Path = _QUOTA) -> int:
    """Physical cores given to the process, by its affinity and its control group's quota; at least 1.

    Two hardware threads of one core count once: kernels that are bound by memory gain nothing from the second.

    Args:
        topology: Linux's description of the processors.
        quota: the control group's allowance: microseconds of processor time a period, or "max", and the period.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {_core_of(topology / f"cpu{number}" / "topology", number) for number in allowed}
    return max(1, min(len(cores), _allowance(quota)))


def _core_of(directory: Path, number: int) -> tuple[str, ...]:
    try:
        package, core = (directory / name for name in ("physical_package_id", "core_id"))
        return package.read_text().strip(), core.read_text().strip()
    except OSError:
        return (f"processor {number}",)


def _allowance(quota: Path) -> int:
    try:
        allowed, period = quota.read_text().split()
        return math.ceil(int(allowed) / int(period))
    except (OSError, ValueError):  # no control group, or "max"
        return os.cpu_count() or 1
