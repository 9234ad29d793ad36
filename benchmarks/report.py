"""The report of one run of a benchmark: what was asked, where it ran, and every result; kept as JSON."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launch import Deadline
from machine import describe_machine

Report = dict[str, Any]


def collect(kind: str, given: argparse.Namespace, results: Iterable[dict[str, Any]]) -> Report:
    """Gather results into a report, written to `given.json` after each, so that an interrupted run keeps its figures.

    Args:
        kind: `compare`, `depth`, `batch` or `overlap`; says which table shows it.
        given: the command line.
        results: measured as they are asked for.
    """
    arguments = {name: value for name, value in vars(given).items() if name not in ("json", "plot")}
    report: Report = {"kind": kind, "machine": describe_machine(), "arguments": arguments, "results": []}
    for result in results:
        report["results"].append(result)
        if given.json:
            write(report, given.json)
    return report


def write(report: Report, path: str) -> None:
    """Write a report as JSON."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def read(path: str) -> Report:
    """Read a report back."""
    report: Report = json.loads(Path(path).read_text(encoding="utf-8"))
    return report


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that all benchmarks share."""
    parser.add_argument("--sequence", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=8, help="steps timed as one block")
    parser.add_argument("--warmup", type=int, default=3, help="steps before that; at least 1")
    parser.add_argument("--synchronised", type=int, default=3, help="steps timed one by one afterwards")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of this project: slots=2, template=eager, optimizer.threads=8 ...; may be repeated",
    )
    parser.add_argument("--budget-seconds", type=float, help="time for all measurements together")
    parser.add_argument("--each-seconds", type=float, default=300, help="time for any one measurement")
    parser.add_argument("--json", help="file to write the report to")


def deadline_of(given: argparse.Namespace) -> Deadline:
    """The deadline that the command line sets."""
    return Deadline(given.budget_seconds, given.each_seconds)


def request_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of `measure.Request` that the common arguments set."""
    if given.warmup < 1 or given.steps < 1:
        raise SystemExit(f"--warmup {given.warmup} and --steps {given.steps} must be at least 1")
    return {
        "warmup": given.warmup,
        "steps": given.steps,
        "synchronised": given.synchronised,
        "options": dict(map(_option, given.option)),
    }


def _option(text: str) -> tuple[str, Any]:
    """Name and value of `slots=2`; what is no Python literal is a string."""
    name, separator, value = text.partition("=")
    if not separator:
        raise SystemExit(f"--option {text}: give a name and a value, such as slots=2")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value
