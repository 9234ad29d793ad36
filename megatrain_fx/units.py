"""Units: the modules whose parameters travel together."""

from __future__ import annotations

import dataclasses

from torch import nn
from torch.nn.utils import parametrize

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)


@dataclasses.dataclass(frozen=True)
class Unit:
    """One unit of a model: `module` is found in it under `path`, the first of its names if it has several."""

    path: str
    module: nn.Module


def find_units(model: nn.Module) -> tuple[Unit, ...]:
    """The units of `model`, in the order of `model.named_modules()`.

    A unit is each parameter-owning element of an outermost `ModuleList`, `Sequential` or `ModuleDict`, and each
    module outside one that owns parameters directly, with all that it contains. The parameters that the root owns
    directly belong to no unit. An element that has no forward of its own (a list in a list) cannot be called, so its
    elements are the units. A module with several names is one unit.
    """
    found: dict[nn.Module, str] = {}
    if isinstance(model, _LISTS):
        _add_elements(model, "", found)
    else:
        _add_children(model, "", found)
    return tuple(Unit(path, module) for module, path in found.items())


def _add_children(module: nn.Module, prefix: str, found: dict[nn.Module, str]) -> None:
    for name, child in _named_children(module):
        if child in found or not _contains_parameters(child):
            continue
        if _owns_parameters(child) and _has_forward(child):
            found[child] = prefix + name
        elif isinstance(child, _LISTS):
            _add_elements(child, f"{prefix}{name}.", found)
        else:
            _add_children(child, f"{prefix}{name}.", found)


def _add_elements(module: nn.Module, prefix: str, found: dict[nn.Module, str]) -> None:
    for name, element in _named_children(module):
        if element in found or not _contains_parameters(element):
            continue
        if _has_forward(element):
            found[element] = prefix + name
        elif isinstance(element, _LISTS):
            _add_elements(element, f"{prefix}{name}.", found)
        else:
            _add_children(element, f"{prefix}{name}.", found)


def _named_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children that may be or hold units: parameter lists and parametrizations are parts of their owner."""
    parametrized = parametrize.is_parametrized(module)
    return [
        (name, child)
        for name, child in module.named_children()
        if not isinstance(child, _PARAMETER_LISTS) and not (parametrized and name == "parametrizations")
    ]


def _contains_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _owns_parameters(module: nn.Module) -> bool:
    if parametrize.is_parametrized(module) or next(module.parameters(recurse=False), None) is not None:
        return True
    return any(isinstance(child, _PARAMETER_LISTS) and _contains_parameters(child) for child in module.children())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
