"""How speed and memory change with depth, or with batch.

usage: python benchmarks/sweep.py depth --width 2048 --values 28,56,112,180
       python benchmarks/sweep.py batch --systems compiled,megatrain --values 1,2,4,8,16,32,64
"""

from __future__ import annotations

import argparse

from launch import launch_all
from measure import Request
from report import add_common_arguments, collect, deadline_of, request_arguments
from systems import clip_of
from table import render
from workload import SHAPES, Workload

DEFAULT_VALUES = {"depth": "28,56,112,180", "batch": "1,2,4,8,16,32,64"}
DEFAULT_SYSTEMS = {"depth": "megatrain", "batch": "compiled,megatrain"}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=DEFAULT_VALUES)
    parser.add_argument("--values", help="layers, or batch sizes, with commas between")
    parser.add_argument("--systems", help="names with commas between; one for a depth sweep")
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument(
        "--width", type=int, help="hidden size; 180 layers of 2048 need a host of 256 GB, of 1024 128 GB"
    )
    parser.add_argument("--layers", type=int, help="of a batch sweep, instead of the shape's own number")
    parser.add_argument("--batch", type=int, default=16, help="of a depth sweep: sequences a step")
    parser.add_argument("--clip", type=float, help="largest gradient norm of peers and of names that end in -clip")
    add_common_arguments(parser)
    return parser.parse_args()


def requests_of(given: argparse.Namespace) -> list[Request]:
    """What to measure, in order: for each value, every system."""
    values = [int(value) for value in (given.values or DEFAULT_VALUES[given.what]).split(",")]
    systems = (given.systems or DEFAULT_SYSTEMS[given.what]).split(",")
    if given.what == "depth" and len(systems) > 1:
        raise SystemExit(f"a depth sweep compares depths of one system, not of {len(systems)}")
    common = request_arguments(given)
    requests = []
    for value in values:
        layers, batch = (value, given.batch) if given.what == "depth" else (given.layers, value)
        workload = Workload(given.shape, batch, given.sequence, layers, given.width)
        requests += [Request(name, workload, clip_of(name, given.clip), **common) for name in systems]
    return requests


def main() -> None:
    """Measure every value, print the table last."""
    given = parse_arguments()
    report = collect(given.what, given, launch_all(requests_of(given), deadline_of(given)))
    print(f"\n{render(report)}")


if __name__ == "__main__":
    main()
