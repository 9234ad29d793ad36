"""Runs measurements one after another, each in a process of its own, so that none sees what another left in memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from measure import Request

_HERE = Path(__file__).resolve().parent
_KEPT_LINES = 12


class Deadline:
    """The end of the time that all measurements of one run may take together."""

    def __init__(self, budget_seconds: float | None, each_seconds: float) -> None:
        """Start counting.

        Args:
            budget_seconds: for all measurements; None for no limit.
            each_seconds: for any one of them, so that one that hangs leaves time for the rest.
        """
        self._end = None if budget_seconds is None else time.monotonic() + budget_seconds
        self._each = each_seconds

    def left(self) -> float:
        """Seconds that the next measurement may take; 0 or less if the time is over."""
        return self._each if self._end is None else min(self._each, self._end - time.monotonic())


def launch_all(requests: Iterable[Request], deadline: Deadline) -> Iterator[dict[str, Any]]:
    """The result of every request, as it is done; failures are results too, whose `reason` says what happened."""
    for request in requests:
        left = deadline.left()
        if left <= 0:
            yield _failed(request, "not run: the time for all systems was over")
            continue
        result = launch(request, left)
        print(progress(result), flush=True)
        yield result


def launch(request: Request, limit_seconds: float) -> dict[str, Any]:
    """Measure in a new process; the end of its output is shown if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, str(_HERE / "measure.py"), request.to_json(), str(result)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
            )
            reason = _wait(process, limit_seconds)
        seen = json.loads(result.read_text(encoding="utf-8")) if result.exists() else _failed(request, reason)
        if seen["status"] != "ok":
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            print("\n".join(f"    {line}" for line in lines[-_KEPT_LINES:]), flush=True)
    return {**seen, "workload": _described(request)}


def progress(result: dict[str, Any]) -> str:
    """One line about a result, for those who wait."""
    workload = result["workload"]
    heading = f"{result['system']:>15}  {workload['layers']} layers  {workload['batch']} x {workload['sequence']}"
    if result["status"] != "ok":
        return f"{heading}  {result['reason']}"
    peak = result["peak_device_bytes"] / 2**30
    return f"{heading}  {result['step_seconds']:.3f} s a step  {peak:.1f} GiB  (in {result['total_seconds']:.0f} s)"


def _wait(process: subprocess.Popen[bytes], limit_seconds: float) -> str:
    """Wait for the end of a process, or end it and all its children; returns why it may have left no result."""
    try:
        code = process.wait(limit_seconds)
        reason = f"killed by signal {-code} (out of host memory?)" if code < 0 else f"ended with status {code}"
    except subprocess.TimeoutExpired:
        reason = f"stopped after {limit_seconds:.0f} s"
    except KeyboardInterrupt:
        _end_group(process)
        raise
    _end_group(process)
    return reason


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and those it started (compilers, workers), which are a process group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment() -> dict[str, str]:
    """Modules of this repository can be imported; the CUDA allocator fragments less, for all systems alike."""
    path = os.pathsep.join(filter(None, (str(_HERE.parent), os.environ.get("PYTHONPATH"))))
    settings = {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "DS_SKIP_CUDA_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**os.environ, **settings}


def _failed(request: Request, reason: str) -> dict[str, Any]:
    result = {"system": request.system, "clip": request.clip, "status": "failed", "reason": reason}
    return {**result, "workload": _described(request)}


def _described(request: Request) -> dict[str, Any]:
    workload = request.workload
    return {
        "shape": workload.shape,
        "layers": workload.sizes.layers,
        "width": workload.sizes.width,
        "batch": workload.batch,
        "sequence": workload.sequence,
        "tokens": workload.tokens,
        "checkpoint_bytes": workload.checkpoint_bytes,
    }
