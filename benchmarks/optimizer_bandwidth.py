"""Bytes a second that the CPU optimizer moves, in every precision, against torch.optim.AdamW(fused=True) in one run.

Counted are the bytes that one step must read and write: each changed array twice, each gradient once. One line a
number of threads; `ratio` is the lowest of this project's rates over torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import torch

from megatrain_fx import _runtime

BYTES_PER_PARAMETER = {"torch fused float32": 28, "fp32": 28, "bf16": 22, "bf16 stochastic": 22, "bf16-split": 26}


@dataclass(frozen=True)
class Measurement:
    """One kind of step with one number of threads; `seconds` is the median, `gigabytes_per_second` is 1e9 bytes."""

    kind: str
    threads: int
    seconds: float
    gigabytes_per_second: float


def median_seconds(steps: Sequence[Callable[[int], None]], repeats: int) -> list[float]:
    """The median duration of each step in seconds, after two rounds that are not counted.

    Every round runs each step once, so that what disturbs the machine for a while disturbs all of them.
    """
    rounds = []
    for number in range(1, repeats + 3):
        times = [time.perf_counter()]
        for step in steps:
            step(number)
            times.append(time.perf_counter())
        rounds.append([end - begin for begin, end in pairwise(times)])
    return [statistics.median(durations) for durations in zip(*rounds[2:], strict=True)]


def fused_step(size: int) -> Callable[[int], None]:
    """One step of torch's fused float32 AdamW on one parameter of `size` elements."""
    param = torch.nn.Parameter(torch.ones(size))
    param.grad = torch.full((size,), 1e-3)
    optimizer = torch.optim.AdamW([param], fused=True)
    return lambda number: optimizer.step()


def kernel_step(kind: str, size: int, threads: int) -> Callable[[int], None]:
    """One step of this project's AdamW on a region of `size` elements."""
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    param, grad = torch.ones(size, dtype=dtype), torch.full((size,), 1e-3, dtype=dtype)
    exp_avg, exp_avg_sq = torch.zeros(size), torch.zeros(size)
    remainder = torch.zeros(size, dtype=torch.int16) if kind == "bf16-split" else None
    tensors = (_runtime.WorkerPool(threads), param, grad, exp_avg, exp_avg_sq, remainder)
    seed = 0 if kind == "bf16 stochastic" else None
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2, "stochastic_seed": seed}
    return lambda number: _runtime.adamw_step(*tensors, step=number, **options)


def measure(size: int, threads: int, repeats: int) -> list[Measurement]:
    """Measures every kind of step with one number of threads; memory is allocated, touched and freed here."""
    torch.set_num_threads(threads)
    steps = [
        fused_step(size) if kind.startswith("torch") else kernel_step(kind, size, threads)
        for kind in BYTES_PER_PARAMETER
    ]
    return [
        Measurement(kind, threads, seconds, count * size / seconds / 1e9)
        for (kind, count), seconds in zip(BYTES_PER_PARAMETER.items(), median_seconds(steps, repeats), strict=True)
    ]


def run(size: int, thread_counts: Sequence[int], repeats: int) -> list[Measurement]:
    """Measures every kind for each number of threads, prints a table and returns the measurements.

    Args:
        size: parameters in the region; its arrays should exceed the processor's last cache many times.
        thread_counts: numbers of threads to try.
        repeats: steps of which the median is taken.
    """
    print(f"{size:,} parameters, GB/s, instruction sets {_runtime.instruction_sets()}, torch {torch.__version__}")
    print("threads  " + "  ".join(f"{kind:>19}" for kind in BYTES_PER_PARAMETER) + "   ratio")
    results: list[Measurement] = []
    for threads in thread_counts:
        row = measure(size, threads, repeats)
        rates = [measurement.gigabytes_per_second for measurement in row]
        print(f"{threads:7d}  " + "  ".join(f"{rate:19.1f}" for rate in rates) + f"  {min(rates[1:]) / rates[0]:6.2f}")
        results += row
    return results


def default_thread_counts() -> list[int]:
    """Powers of two up to the processor's cores, and the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({2**power for power in range(cores.bit_length()) if 2**power < cores} | {cores})


def main() -> None:
    """Reads the options, runs, and writes the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=1 << 26, help="parameters in the region")
    parser.add_argument("--threads", type=int, nargs="+", default=default_thread_counts())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", help="file to write the measurements to")
    given = parser.parse_args()
    results = run(given.size, given.threads, given.repeats)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump([asdict(measurement) for measurement in results], file, indent=2)


if __name__ == "__main__":
    main()
