"""Buffers that checkpoints do not hold (rotary frequencies, position numbers), built again for a model on meta.

Two ways are tried for the module that owns one. A module without parameters is constructed again from its ``config``.
Otherwise the nearest module around it that has Hugging Face's ``_init_weights`` writes the buffer, as it does when
`from_pretrained` builds a model on the meta device; parameters are on that device still, where this costs nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import nn

from megatrain_fx.errors import WeightsError
from megatrain_fx.meta_tensors import materialize
from megatrain_fx.private_api import version_of


def rebuild_buffers(model: nn.Module, names: Iterable[str]) -> None:
    """Give values to buffers on the meta device, and to tensors there that are plain attributes of their modules.

    Args:
        model: whose parameters may be on the meta device.
        names: of the buffers.

    Raises:
        WeightsError: nothing is known that could build one of them.
    """
    wanted: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        path, _, buffer = name.rpartition(".")
        wanted[path].append(buffer)
    for path, module in model.named_modules():
        wanted[path].extend(name for name, value in vars(module).items() if _is_meta(value))
    for path, attributes in wanted.items():
        module = model.get_submodule(path)
        left = _initialize(model, path, _construct_again(module, attributes))
        if left:
            raise WeightsError(
                f"buffer {path}{'.' if path else ''}{left[0]} of {type(module).__name__} is on the meta device and in "
                f"no file, and nothing is known that could build it again: assign it before compiling "
                f"(module.{left[0]} = values on the CPU), or build the model on the CPU"
            )


def _construct_again(module: nn.Module, attributes: list[str]) -> list[str]:
    """Take tensors from a new module that is made of the same ``config``; those that it cannot give."""
    config = getattr(module, "config", None)
    if not attributes or config is None or next(module.parameters(), None) is not None:
        return attributes
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=[]):
            fresh = type(module)(config)
    except Exception:  # a constructor that wants something else says so in its own way
        return attributes
    return [name for name in attributes if not _take(module, name, getattr(fresh, name, None))]


def _take(module: nn.Module, name: str, value: object) -> bool:
    old = getattr(module, name)
    if not isinstance(value, torch.Tensor) or value.is_meta or value.shape != old.shape:
        return False
    materialize(old, value.detach().to(old.dtype).clone())
    return True


def _initialize(model: nn.Module, path: str, buffers: list[str]) -> list[str]:
    """Let ``_init_weights`` write buffers; those that it did not write."""
    initializer = _nearest_initializer(model, path) if buffers else None
    if initializer is None:
        return buffers
    module = model.get_submodule(path)
    own = dict(module.named_buffers(recurse=False))
    held = {name: own[name] for name in buffers if name in own}
    for buffer in held.values():
        materialize(buffer, torch.zeros_like(buffer, device="cpu"))
    versions = {name: version_of(buffer) for name, buffer in held.items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            initializer(module)
    except Exception:  # it may read values of parameters, which are not there yet
        return buffers
    return [name for name in buffers if name not in held or version_of(held[name]) == versions[name]]


def _nearest_initializer(model: nn.Module, path: str) -> Callable[[nn.Module], object] | None:
    """``_init_weights`` of the innermost module on the way to ``path`` that has it."""
    steps = path.split(".") if path else []
    around = [model.get_submodule(".".join(steps[:length])) for length in range(len(steps), -1, -1)]
    found = (getattr(module, "_init_weights", None) for module in around)
    return next((method for method in found if callable(method)), None)


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta
