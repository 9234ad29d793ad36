"""Capture failures: from an exception of `torch.export` to an error that names the user's source line and a remedy."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from megatrain_fx.errors import CaptureError, DataDependentGlueError, MegatrainError
from megatrain_fx.private_api import DATA_DEPENDENT_ERRORS
from megatrain_fx.units import Unit

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
_LIBRARY = sysconfig.get_path("stdlib")


def explain(error: Exception, model: nn.Module, unit_failure: tuple[Unit, Exception] | None) -> MegatrainError:
    """The error to raise for a failed capture of `model`; `unit_failure` is what went wrong first in a unit, if so."""
    if unit_failure is not None:
        return _explain_unit(*unit_failure)
    for cause in _chain(error):
        if isinstance(cause, MegatrainError):
            return type(cause)(f"{cause}{source_line(cause)}")
        if isinstance(cause, DATA_DEPENDENT_ERRORS):
            return _explain_data_dependence(cause, model)
    where = f"the forward of {type(model).__name__} could not be captured{source_line(error)}"
    return CaptureError(f"{where}\n{type(error).__name__}: {error}")


def source_line(error: BaseException) -> str:
    """Where in the user's code `error` arose, as file, line and code; empty if nowhere."""
    for cause in _chain(error):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if not frame.filename.startswith(_OWN) and not _in_standard_library(frame.filename):
                code = linecache.getline(frame.filename, frame.lineno or 0).strip()
                return f"\n  {frame.filename}:{frame.lineno}, in {frame.name}\n    {code}"
    return ""


def _explain_unit(unit: Unit, error: Exception) -> MegatrainError:
    if isinstance(error, MegatrainError):
        return type(error)(f"{error}{source_line(error)}")
    return CaptureError(
        f"unit {unit.path} ({type(unit.module).__name__}) failed when it was run on fake tensors{source_line(error)}\n"
        f"{type(error).__name__}: {error}"
    )


def _explain_data_dependence(error: Exception, model: nn.Module) -> DataDependentGlueError:
    return DataDependentGlueError(
        f"code of {type(model).__name__} outside every unit needs the values of a tensor to go on{source_line(error)}\n"
        "A captured graph holds one path only. Move this code into a module that owns parameters (inside a unit any "
        "control flow is fine), choose with torch.where, or decide by a constant argument.\n"
        f"({type(error).__name__}: {str(error).splitlines()[0]})"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """`error` and what it was raised from or during, the latest first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _in_standard_library(filename: str) -> bool:
    return filename.startswith(_LIBRARY) and "site-packages" not in filename
