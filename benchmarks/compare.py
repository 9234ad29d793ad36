"""This project and its peers on the same model, tokens and optimizer, in one run: a table, JSON and a plot.

usage: python benchmarks/compare.py --shape 3b --batch 16 --systems eager,compiled,zero3,fsdp2,megatrain,megatrain-clip
"""

from __future__ import annotations

import argparse
from typing import Any

from launch import launch_all
from measure import Request
from report import Report, add_common_arguments, collect, deadline_of, request_arguments
from systems import CLIPPED, SYSTEMS, clip_of
from table import render
from workload import SHAPES, Workload

DEFAULT_SYSTEMS = "eager,compiled,zero3,fsdp2,megatrain,megatrain-clip"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--width", type=int, help="instead of the shape's own hidden size")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--systems", type=_systems, default=_systems(DEFAULT_SYSTEMS), help="names with commas between")
    parser.add_argument("--clip", type=float, help="largest gradient norm of peers and of names that end in -clip")
    parser.add_argument("--plot", help="PNG file to write a plot to")
    add_common_arguments(parser)
    return parser.parse_args()


def draw(report: Report, path: str) -> None:
    """Bars of step time and of peak GPU memory, one a system that ran."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ran: list[dict[str, Any]] = [result for result in report["results"] if result["status"] == "ok"]
    names = [result["system"] for result in ran]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 0.6 + 0.5 * max(len(ran), 2)), sharey=True)
    scales = ("step_seconds", 1.0, "seconds a step"), ("peak_device_bytes", 2.0**30, "peak GPU memory, GiB")
    for axis, (key, unit, label) in zip(axes, scales, strict=True):
        bars = axis.barh(names, [result[key] / unit for result in ran])
        axis.bar_label(bars, fmt="%.2f", padding=2)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every system, print the table last."""
    given = parse_arguments()
    workload = Workload(given.shape, given.batch, given.sequence, given.layers, given.width)
    common = request_arguments(given)
    requests = [Request(name, workload, clip_of(name, given.clip), **common) for name in given.systems]
    report = collect("compare", given, launch_all(requests, deadline_of(given)))
    if given.plot:
        draw(report, given.plot)
    print(f"\n{render(report)}")


def _systems(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name.removesuffix(CLIPPED) not in SYSTEMS:
            raise argparse.ArgumentTypeError(
                f"no system {name!r}; there are {', '.join(SYSTEMS)}, each also with -clip"
            )
    return names


if __name__ == "__main__":
    main()
