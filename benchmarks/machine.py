"""What is said of the machine beside every figure, and what a process takes of its memory."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "triton", "deepspeed", "megatrain-fx")


def describe_machine() -> dict[str, Any]:
    """Date, processors, memory and versions; makes no CUDA context, which would take memory from what is measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": _gpu(),
        "cpu": _cpu(),
        "cores": core_count(),
        "memory_limit_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **_versions()},
    }


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Host memory that this process holds now (VmRSS)."""
    return _status_bytes("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most host memory that this process ever held (VmHWM)."""
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine_bytes_in_use() -> int:
    """Memory in use on the whole machine; counts pinned memory of drivers that keep it out of a process's VmRSS."""
    amounts = _kibibytes(Path("/proc/meminfo"))
    return (amounts.get("MemTotal", 0) - amounts.get("MemAvailable", 0)) * 1024


def _status_bytes(key: str) -> int:
    return _kibibytes(Path("/proc/self/status")).get(key, 0) * 1024


def _kibibytes(path: Path) -> dict[str, int]:
    """The amounts of a file of lines such as `VmRSS:   1234 kB`; empty where the system has no such file."""
    if not path.exists():
        return {}
    fields = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {field[0].rstrip(":"): int(field[1]) for field in fields if len(field) == 3 and field[2] == "kB"}


def _gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return "none"
    return f"{len(lines)} x {lines[0].replace(', ', ', driver ')}" if lines else "none"


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
