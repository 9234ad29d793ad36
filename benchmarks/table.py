"""Turns reports into markdown tables.

usage: python benchmarks/table.py REPORT.json ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from report import Report, read

Result = dict[str, Any]
GIB = 2**30


def heading(report: Report) -> str:
    """Date, machine and versions, in one line."""
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return f"{machine['date']}; GPU {machine['gpu']}; CPU {machine['cpu']}, {machine['cores']} cores; {versions}."


def comparison_table(report: Report) -> str:
    """One row a system: time, memory, and speed over ZeRO-3 and over the compiled layers on the GPU."""
    columns = (
        "system", "clip", "step s (block mean)", "one by one: median (min to max)", "tokens/s",
        "peak GPU GiB (reserved)", "host GiB (peak)", "host bytes/parameter (machine)", "over zero3", "over compiled",
    )  # fmt: skip
    references = [_step_of(report["results"], name) for name in ("zero3", "compiled")]
    rows = []
    for result in report["results"]:
        name = [result["system"], "none" if result["clip"] is None else f"{result['clip']:g}"]
        if result["status"] != "ok":
            rows.append([*name, "failed"])
            continue
        speeds = ["" if step is None else f"{step / result['step_seconds']:.2f}x" for step in references]
        rows.append([*name, *_time(result), *_memory(result), *speeds])
    return _markdown(columns, rows) + _failures(report["results"])


def depth_table(report: Report) -> str:
    """One row a depth: tokens x parameters a second, its loss over the shallowest, and memory."""
    columns = (
        "layers", "parameters, 1e9", "step s", "tokens x parameters / s, 1e13", "loss over the shallowest",
        "peak GPU GiB", "checkpoints GiB", "peak apart from checkpoints GiB", "host GiB",
        "host bytes/parameter (machine)",
    )  # fmt: skip
    rows = []
    first: float | None = None
    for result in report["results"]:
        layers = str(result["workload"]["layers"])
        if result["status"] != "ok":
            rows.append([layers, "failed"])
            continue
        rate = result["tokens_per_second"] * result["parameters"]
        first = first or rate
        peak, kept = result["peak_device_bytes"], result["workload"]["checkpoint_bytes"]
        memory = [f"{size / GIB:.2f}" for size in (peak, kept, peak - kept, result["host_bytes"])]
        time = [f"{result['parameters'] / 1e9:.2f}", f"{result['step_seconds']:.3f}", f"{rate / 1e13:.2f}"]
        rows.append([layers, *time, f"{1 - rate / first:.1%}", *memory, _bytes_per_parameter(result)])
    return _markdown(columns, rows) + _failures(report["results"])


def batch_table(report: Report) -> str:
    """One row a batch and system: tokens a second, and speed a token over the largest that `compiled` could hold."""
    columns = ("batch", "system", "step s", "tokens/s", "peak GPU GiB", "tokens/s over compiled (at batch)")
    rows = []
    for result in report["results"]:
        workload = result["workload"]
        name = [f"{workload['batch']} x {workload['sequence']}", result["system"]]
        if result["status"] != "ok":
            rows.append([*name, "failed"])
            continue
        time = [f"{result['step_seconds']:.3f}", f"{result['tokens_per_second']:.0f}"]
        peak = f"{result['peak_device_bytes'] / GIB:.1f}"
        rows.append([*name, *time, peak, _over_held(result, report["results"])])
    return _markdown(columns, rows) + _failures(report["results"])


def overlap_table(report: Report) -> str:
    """One row a way to train: each lane alone, and the step over the longest of them."""
    columns = (
        "system", "step s", "compute s", "h2d s (GB/s)", "d2h s (GB/s)", "update s", "longest", "step / longest",
    )  # fmt: skip
    rows = []
    compute = _step_of(report["results"], "compute")
    update = next((r["update_seconds"] for r in report["results"] if r.get("update_seconds")), None)
    for result in report["results"]:
        if result["status"] != "ok":
            rows.append([result["system"], "failed"])
        elif result["system"] != "compute":
            alone = {"compute": compute, "update": update, **{k: result[f"{k}_seconds"] for k in ("h2d", "d2h")}}
            known = {lane: seconds for lane, seconds in alone.items() if seconds}
            longest = max(known, key=known.__getitem__)
            rates = [f"{alone[k]:.3f} ({result[f'{k}_bytes'] / alone[k] / 1e9:.1f})" for k in ("h2d", "d2h")]
            step = result["step_seconds"]
            lanes = [_seconds(compute), *rates, _seconds(update)]
            rows.append([result["system"], f"{step:.3f}", *lanes, longest, f"{step / known[longest]:.3f}"])
    return _markdown(columns, rows) + _failures(report["results"])


TABLES = {"compare": comparison_table, "depth": depth_table, "batch": batch_table, "overlap": overlap_table}


def render(report: Report) -> str:
    """The table of a report, under what was measured and where."""
    workload = report["results"][0]["workload"] if report["results"] else {}
    asked = ", ".join(f"{key} {workload[key]}" for key in ("shape", "width", "sequence") if key in workload)
    if report["kind"] in ("compare", "overlap") and workload:
        asked += f", layers {workload['layers']}, batch {workload['batch']}"
    counted = next((f", {r['parameters']:,} parameters" for r in report["results"] if r["status"] == "ok"), "")
    counted = counted if report["kind"] != "depth" else ""
    return (
        f"{heading(report)}\n\n{report['kind']}: {asked}{counted}, bfloat16, AdamW.\n\n{TABLES[report['kind']](report)}"
    )


def _failures(results: Sequence[Result]) -> str:
    """One line below a table for every measurement that failed: what happened."""
    failed = [result for result in results if result["status"] != "ok"]
    lines = [f"\n- {r['system']}, {_size(r)}: {r['reason']}" for r in failed]
    return "\n" * bool(lines) + "".join(lines)


def _size(result: Result) -> str:
    workload = result["workload"]
    return f"{workload['layers']} layers, {workload['batch']} x {workload['sequence']}"


def _time(result: Result) -> list[str]:
    single = result["synchronised_step_seconds"]
    spread = f"{result['median_step_seconds']:.3f} ({min(single):.3f} to {max(single):.3f})" if single else ""
    return [f"{result['step_seconds']:.3f}", spread, f"{result['tokens_per_second']:.0f}"]


def _memory(result: Result) -> list[str]:
    device = f"{result['peak_device_bytes'] / GIB:.1f} ({result['reserved_device_bytes'] / GIB:.1f})"
    host = f"{result['host_bytes'] / GIB:.1f} ({result['host_peak_bytes'] / GIB:.1f})"
    return [device, host, _bytes_per_parameter(result)]


def _bytes_per_parameter(result: Result) -> str:
    """Growth of the resident set, and of the machine's memory in use, which has pinned memory that the former lacks."""
    return f"{result['host_bytes_per_parameter']:.2f} ({result['machine_bytes_per_parameter']:.2f})"


def _step_of(results: Sequence[Result], system: str) -> float | None:
    return next((r["step_seconds"] for r in results if r["system"] == system and r["status"] == "ok"), None)


def _over_held(result: Result, results: Sequence[Result]) -> str:
    """Tokens a second over those of `compiled` at the same batch, or at the largest smaller one that fitted."""
    held = [r for r in results if r["system"] == "compiled" and r["status"] == "ok"]
    fitting = [r for r in held if r["workload"]["batch"] <= result["workload"]["batch"]]
    if not fitting:
        return ""
    reference = max(fitting, key=lambda r: r["workload"]["batch"])
    ratio = result["tokens_per_second"] / reference["tokens_per_second"]
    return f"{ratio:.2f}x ({reference['workload']['batch']})"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are aligned in plain text too; short rows are filled up."""
    filled = [[*row, *[""] * (len(columns) - len(row))] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *filled, strict=True)]
    lines = [columns, ["-" * width for width in widths], *filled]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def main() -> None:
    """Print the tables of the reports that are named."""
    print("\n\n".join(render(read(path)) for path in sys.argv[1:]))


if __name__ == "__main__":
    main()
