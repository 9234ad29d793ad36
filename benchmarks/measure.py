"""Measures one system on one workload in this process: step time, device memory, host memory. Run by the other scripts.

usage: measure.py REQUEST_JSON RESULT_PATH
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lanes import lanes_alone
from machine import machine_bytes_in_use, peak_resident_bytes, resident_bytes
from systems import CLIPPED, ON_DEVICE, SYSTEMS, Setting, Training
from workload import Workload, build_model, count_parameters


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        system: a name in `systems.SYSTEMS`, with or without `-clip`.
        workload: model and batch.
        clip: largest gradient norm, None for no clipping.
        warmup: steps before anything is counted; at least one.
        steps: steps that are timed as one block.
        synchronised: steps that are timed one by one afterwards.
        options: overrides of `systems.MEGATRAIN_OPTIONS`.
        alone: also time copies and updates of this project's schedule alone.
    """

    system: str
    workload: Workload
    clip: float | None = None
    warmup: int = 3
    steps: int = 8
    synchronised: int = 3
    options: dict[str, Any] = field(default_factory=dict)
    alone: bool = False

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The request of a line of JSON."""
        fields = json.loads(text)
        return cls(**{**fields, "workload": Workload(**fields["workload"])})


def measure(request: Request) -> dict[str, Any]:
    """Build, train, and return what was seen; bytes, seconds and counts."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    tokens = request.workload.token_ids(device)
    synchronise(device)  # the device's context is part of the baseline
    baseline = {"resident": resident_bytes(), "machine": machine_bytes_in_use()}
    started = time.perf_counter()
    base = request.system.removesuffix(CLIPPED)
    home = device if base in ON_DEVICE else torch.device("cpu")
    model = build_model(request.workload.config(), device, home)
    parameters = count_parameters(model)
    reset_peak(device)
    training = SYSTEMS[base](model, Setting(tokens, request.clip, request.options))
    del model
    seen = train(training, request, device)
    seen.update(system=request.system, status="ok", clip=request.clip, parameters=parameters)
    seen.update(tokens_per_second=request.workload.tokens / seen["step_seconds"])
    seen.update(host_memory(baseline, parameters))
    if request.alone:
        seen.update(lanes_alone(training, tokens, device, clipped=request.clip is not None))
    seen["total_seconds"] = time.perf_counter() - started
    return seen


def train(training: Training, request: Request, device: torch.device) -> dict[str, Any]:
    """Train and time: a block of steps with nothing in between, then some steps one by one.

    The block begins and ends just after a step, with the device idle but without waiting for updates on the CPU:
    what a step leaves to the next one is so counted exactly once.
    """
    begin = time.perf_counter()
    first_loss = float(training.step())
    synchronise(device)
    first_step = time.perf_counter() - begin
    for _ in range(request.warmup - 1):
        training.step()
    synchronise(device)
    warmup_peak, _ = peak_device_bytes(device)
    reset_peak(device)
    block, loss = timed_block(training, request.steps, device)
    allocated, reserved = peak_device_bytes(device)
    single = [timed_block(training, 1, device)[0] for _ in range(request.synchronised)]
    begin = time.perf_counter()
    training.drain()
    drain = time.perf_counter() - begin
    return {
        "step_seconds": block / request.steps,
        "synchronised_step_seconds": single,
        "median_step_seconds": statistics.median(single) if single else None,
        "first_step_seconds": first_step,
        "drain_seconds": drain,
        "steps": request.steps,
        "peak_device_bytes": allocated,
        "reserved_device_bytes": reserved,
        "warmup_peak_device_bytes": warmup_peak,
        "first_loss": first_loss,
        "last_loss": float(loss),
    }


def timed_block(training: Training, steps: int, device: torch.device) -> tuple[float, torch.Tensor]:
    """Seconds that a number of steps take together, and the last loss."""
    synchronise(device)
    begin = time.perf_counter()
    for _ in range(steps):
        loss = training.step()
    synchronise(device)
    return time.perf_counter() - begin, loss


def host_memory(baseline: dict[str, int], parameters: int) -> dict[str, Any]:
    """Host memory now and at its peak; growth since the baseline, a parameter, of the process and of the machine."""
    process, machine = resident_bytes(), machine_bytes_in_use()
    return {
        "host_bytes": process,
        "host_peak_bytes": peak_resident_bytes(),
        "host_bytes_per_parameter": (process - baseline["resident"]) / parameters,
        "machine_bytes_per_parameter": (machine - baseline["machine"]) / parameters,
    }


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle; a CPU always is when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Let the peak of device memory be counted from here."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_device_bytes(device: torch.device) -> tuple[int, int]:
    """The most device memory that tensors took, and that the allocator held; zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def failure(error: BaseException) -> dict[str, Any]:
    """The result of a measurement that failed: the kind of error and the first line of its text."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return {"status": "failed", "reason": text[:200]}


def main() -> None:
    """Measure what the first argument says, and write the result to the second."""
    request = Request.from_json(sys.argv[1])
    try:
        result = measure(request)
    except Exception as error:
        traceback.print_exc()
        result = {"system": request.system, "clip": request.clip, **failure(error)}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some systems leave threads behind that would keep the process alive
