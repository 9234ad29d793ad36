"""Comparison with the text files in tests/golden; ``EXPECTTEST_ACCEPT=1`` rewrites them (and inline expectations)."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
_HOW_TO_ACCEPT = "If the change is intended, run the test with EXPECTTEST_ACCEPT=1 and review the diff of tests/golden."


def assert_golden(name: str, actual: str, folder: Path = GOLDEN) -> None:
    """Fail with a unified diff unless ``<folder>/<name>.txt`` holds ``actual``; rewrite it if asked to.

    Raises:
        AssertionError: the texts differ, or there is no such file.
    """
    path = folder / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.write_text(actual + "\n", encoding="utf-8")
        return
    if not path.exists():
        raise AssertionError(f"there is no golden file {path}. {_HOW_TO_ACCEPT}")
    expected = path.read_text(encoding="utf-8").removesuffix("\n")
    if actual != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), actual.splitlines(), f"golden/{name}.txt", "actual", lineterm=""
        )
        raise AssertionError("\n".join([f"the schedule of {name} has changed:", *lines, "", _HOW_TO_ACCEPT]))
