"""Methods of a compiled model that differ from the original's: those that read parameters, or would move them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megatrain_fx.errors import ModelDeviceError
from megatrain_fx.streamed_model import StreamedModel

# A module around a compiled model finds its parameters by way of named_modules.
_READ_PARAMETERS = ("named_parameters", "get_parameter", "named_modules", "state_dict", "load_state_dict")
_CONVERT = ("cuda", "xpu", "cpu", "half", "float", "double", "bfloat16", "type", "to_empty", "share_memory")


def methods(original: type[nn.Module], streamed_of: Callable[[nn.Module], StreamedModel | None]) -> dict[str, Any]:
    """The methods by name, for a subclass of ``original``.

    Args:
        original: the class whose methods are wrapped.
        streamed_of: the state of a compiled model, or None if an instance was never compiled.
    """
    found: dict[str, Any] = {name: _waiting(getattr(original, name), streamed_of) for name in _READ_PARAMETERS}
    found.update({name: _refusing(getattr(original, name), name, streamed_of) for name in _CONVERT})
    found["zero_grad"] = _zeroing(original.zero_grad, streamed_of)
    found["to"] = _moving(original.to, streamed_of)
    return found


def _waiting(method: Callable[..., Any], streamed_of: Callable[[nn.Module], StreamedModel | None]) -> Any:
    """Wait for pending updates of the optimizer first."""

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        streamed = streamed_of(self)
        if streamed is not None:
            streamed.synchronize()
        return method(self, *args, **kwargs)

    return wrapped


def _zeroing(method: Callable[..., Any], streamed_of: Callable[[nn.Module], StreamedModel | None]) -> Any:
    """``zero_grad``: gradients that a pending update still reads may be dropped, but not overwritten."""

    @functools.wraps(method)
    def wrapped(self: nn.Module, set_to_none: bool = True) -> None:
        streamed = streamed_of(self)
        if streamed is None or streamed.store is None or not set_to_none:
            method(self, set_to_none)
            return
        for parameter in streamed.store.parameters.values():
            parameter.grad = None

    return wrapped


def _refusing(method: Callable[..., Any], name: str, streamed_of: Callable[[nn.Module], StreamedModel | None]) -> Any:
    """Refuse to take parameters out of the store; what would change nothing is allowed."""

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        streamed = streamed_of(self)
        harmless = name == "cpu" or (name in ("cuda", "xpu") and streamed and streamed.config.device.type == name)
        if streamed is None:
            return method(self, *args, **kwargs)
        if harmless:
            return self
        raise ModelDeviceError(_REMEDY.format(call=f"{name}()", kind=type(self).__name__))

    return wrapped


def _moving(method: Callable[..., Any], streamed_of: Callable[[nn.Module], StreamedModel | None]) -> Any:
    """``to``: the compute device and the CPU are both where a compiled model is already."""

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        streamed = streamed_of(self)
        if streamed is None:
            return method(self, *args, **kwargs)
        wanted = [*args, *kwargs.values()]
        types = {streamed.config.device.type, "cpu"}
        dtypes = {parameter.dtype for parameter in self.parameters()}
        if all(_device_type(value) in types or {value} == dtypes or isinstance(value, bool) for value in wanted):
            return self
        raise ModelDeviceError(_REMEDY.format(call=f"to({', '.join(map(str, wanted))})", kind=type(self).__name__))

    return wrapped


_REMEDY = (
    "{call} would take the parameters of the compiled {kind} out of the host store. The model computes on its device "
    "already; to convert its dtype, do so before megatrain.compile"
)


def _device_type(value: object) -> str | None:
    if isinstance(value, torch.device):
        return value.type
    return torch.device(value).type if isinstance(value, str) else None
