"""The C++ runtime, checked: it must have been built for the PyTorch that is running."""

from __future__ import annotations

import torch

from megatrain_fx.errors import RuntimeExtensionError

__all__ = ["check_build", "runtime"]

REBUILD = "Rebuild it from the source tree with: pip install --no-build-isolation -e ."


def check_build(built_for: str, running: str) -> None:
    """Refuses a runtime that was compiled against another PyTorch, whose C++ classes may be laid out differently.

    Args:
        built_for: `torch.__version__` when the runtime was built, local part included (`2.13.0+cpu`).
        running: `torch.__version__` now.

    Raises:
        RuntimeExtensionError: the two differ.
    """
    if built_for != running:
        raise RuntimeExtensionError(
            f"megatrain_fx._runtime was built for PyTorch {built_for}, but PyTorch {running} is running. {REBUILD}"
        )


try:
    from megatrain_fx import _runtime as runtime
except ImportError as error:
    raise RuntimeExtensionError(
        f"megatrain_fx._runtime cannot be imported with PyTorch {torch.__version__}: {error}. {REBUILD}"
    ) from error

check_build(runtime.built_for_torch, torch.__version__)
