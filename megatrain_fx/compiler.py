"""The two entry points: ``compile`` a model to train it, ``trace`` a call to look at its schedule."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from megatrain_fx.capture import capture
from megatrain_fx.config import StreamConfig, make_config
from megatrain_fx.edge import STATE, streamed_class
from megatrain_fx.errors import ConfigError, ModelDeviceError, NoParametersError
from megatrain_fx.program import Program, build_program
from megatrain_fx.streamed_model import StreamedModel
from megatrain_fx.weights import load_weights

Model = TypeVar("Model", bound=nn.Module)


def compile(model: Model, weights: str | Path | None = None, **options: Any) -> Model:  # noqa: A001  the name that users know from torch.compile
    """Make a model stream its parameters from host memory while it runs; returns the same object.

    Its class becomes a generated subclass, so ``isinstance``, attributes, ``state_dict`` keys and methods stay. The
    first call of each kind captures the model; parameters then are views of the host store, and ``.grad`` after a
    backward pass too, so any optimizer works.

    Args:
        model: any module whose parameters are on the CPU, or on the meta device if ``weights`` are given.
        weights: a safetensors file, or a directory with one or with shards and their index. All parameters and buffers
            are read from there, in the model's dtypes, one at a time: a model that was built under
            ``torch.device("meta")`` needs no memory beside its own.
        **options: the fields of :class:`megatrain_fx.StreamConfig`.

    Raises:
        ConfigError: an option has a value that cannot work, or the model was compiled before.
        NoParametersError: there is nothing to stream.
        ModelDeviceError: some parameter is not on the CPU.
        WeightsError: files are damaged, or do not hold what the model needs.
    """
    config = make_config(options)
    _check_model(model)
    if weights is not None:
        _check_parameters(model, allowed=("cpu", "meta"))
        load_weights(model, weights)
    _check_parameters(model, allowed=("cpu",))
    original: type[nn.Module] = type(model)
    model.__dict__[STATE] = StreamedModel(model, original, config)
    model.__class__ = streamed_class(original)  # type: ignore[assignment]
    return model


def trace(model: nn.Module, *args: Any, megatrain_options: dict[str, Any] | None = None, **kwargs: Any) -> Program:
    """Capture one call of a model and run all passes; nothing of the model runs, nothing is allocated.

    Args:
        model: a module on the CPU or the meta device, compiled or not.
        *args: arguments of the call.
        megatrain_options: fields of :class:`megatrain_fx.StreamConfig`; those of a compiled model by default.
        **kwargs: keyword arguments of the call.

    Raises:
        CaptureError: see :func:`megatrain_fx.capture.capture`.
        ConfigError, NoParametersError, ModelDeviceError: as for :func:`compile`.
    """
    streamed: StreamedModel | None = model.__dict__.get(STATE)
    config = streamed.config if streamed and megatrain_options is None else make_config(megatrain_options or {})
    if streamed is None:
        _check_model(model)
        _check_parameters(model, allowed=("cpu", "meta"))
    forward_class = streamed.forward_class if streamed else None
    _check_keywords(forward_class or type(model), kwargs)
    captured = capture(model, args, kwargs, device=config.device, forward_class=forward_class)
    layout = streamed.store.layout if streamed and streamed.store else None
    return build_program(model, captured, config, layout)


def _check_keywords(forward_class: type[nn.Module], kwargs: dict[str, Any]) -> None:
    """Refuse options of the compiler among the arguments of the call."""
    parameters = inspect.signature(forward_class.forward).parameters
    options = [field.name for field in dataclasses.fields(StreamConfig)]
    mistaken = [name for name in kwargs if name in options and name not in parameters]
    if mistaken and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(
            f"{mistaken[0]!r} is no argument of {forward_class.__name__}.forward; to trace with this option, pass "
            f"megatrain_options={{{mistaken[0]!r}: {kwargs[mistaken[0]]!r}}}"
        )


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"compile takes a torch.nn.Module, not {type(model).__name__}")
    if type(model).forward is nn.Module.forward:
        raise ConfigError(f"{type(model).__name__} has no forward of its own; compile the model that calls it")
    if STATE in model.__dict__:
        raise ConfigError(f"this {type(model).__name__} is compiled already; compile a model once")
    for name, module in model.named_modules():
        if STATE in module.__dict__:
            raise ConfigError(
                f"its part {name} ({type(module).__name__}) is compiled already; compile the whole model only"
            )
    if "forward" in model.__dict__:
        raise ConfigError(
            f"this {type(model).__name__} has a forward set on the instance, which would hide the compiled one; "
            f"define forward in the class (another wrapper may have replaced it: compile before wrapping)"
        )
    if next(model.parameters(), None) is None:
        raise NoParametersError(f"{type(model).__name__} has no parameters, so there is nothing to stream or train")


def _check_parameters(model: nn.Module, allowed: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type not in allowed:
            remedy = "move it there with model.cpu() first; the schedule brings it to the device while it is needed"
            if parameter.device.type == "meta":
                remedy = (
                    "name its files with megatrain.compile(model, weights=...), give it values with "
                    "model.to_empty(device='cpu') and load_state_dict, or inspect it with trace"
                )
            raise ModelDeviceError(
                f"parameter {name} of {type(model).__name__} is on {parameter.device}, but the store is in host "
                f"memory: {remedy}"
            )


def synchronize(model: nn.Module) -> None:
    """Wait until no update of a compiled model's parameters is pending.

    ``state_dict``, ``parameters`` and further calls of the model wait by themselves; only reading the attribute of a
    submodule (``model.head.weight``) right after a step needs this.

    Raises:
        ConfigError: the model was not compiled.
        RuntimeError: an update failed.
    """
    streamed: StreamedModel | None = model.__dict__.get(STATE)
    if streamed is None:
        raise ConfigError(f"{type(model).__name__} is not compiled: call megatrain.compile(model) first")
    streamed.synchronize()


def device_of(model: nn.Module) -> torch.device:
    """Where a compiled model computes, and where its inputs belong."""
    streamed: StreamedModel = model.__dict__[STATE]
    return streamed.config.device
