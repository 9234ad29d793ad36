"""How well the lanes overlap: the step over the longest of compute, copies in, copies out and updates, each alone.

Compute alone is the same model on the GPU, layers compiled, without an optimizer; the copies are those of the schedule,
back to back; the updates are timed in the clipped run, where all begin together. A clipped step cannot be shorter than
its backward pass and then the longer of forward pass and updates, so that its figure is above 1 even at its best.

usage: python benchmarks/overlap.py --shape 3b --batch 16
"""

from __future__ import annotations

import argparse

from launch import launch_all
from measure import Request
from report import add_common_arguments, collect, deadline_of, request_arguments
from systems import clip_of
from table import render
from workload import SHAPES, Workload

SYSTEMS = ("compute", "megatrain", "megatrain-clip")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--width", type=int, help="instead of the shape's own hidden size")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    add_common_arguments(parser)
    return parser.parse_args()


def main() -> None:
    """Measure the lanes alone and together, print the table last."""
    given = parse_arguments()
    workload = Workload(given.shape, given.batch, given.sequence, given.layers, given.width)
    common = request_arguments(given)
    requests = [
        Request(name, workload, clip_of(name, None), **common, alone=name.startswith("megatrain")) for name in SYSTEMS
    ]
    report = collect("overlap", given, launch_all(requests, deadline_of(given)))
    print(f"\n{render(report)}")


if __name__ == "__main__":
    main()
