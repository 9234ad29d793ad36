"""The options that all optimizers here share, checked when they are given."""

import gc
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import nn

from megatrain_fx.config import Precision
from megatrain_fx.edge import STATE
from megatrain_fx.errors import ConfigError
from megatrain_fx.optim.processors import available_processors
from megatrain_fx.streamed_model import StreamedModel


class StageOptions(TypedDict, total=False):
    """When an optimizer updates, and with what.

    Attributes:
        max_grad_norm: gradients are scaled down to this total 2-norm. Default: not clipped.
        during_backward: update during the backward pass, where no norm must be known first. Default: True.
        accumulation_steps: backward passes a step, of which the last one updates. Default: 1.
        threads: CPU threads of an update. Default: one for each physical core given to the process.
        stochastic_rounding: round to bfloat16 stochastically; for ``precision="bf16"`` only. Default: False.
    """

    max_grad_norm: float | None
    during_backward: bool
    accumulation_steps: int
    threads: int | None
    stochastic_rounding: bool


@dataclass(frozen=True)
class CheckedOptions:
    """The same, with the defaults filled in; ``stochastic_seed`` is None without stochastic rounding."""

    max_grad_norm: float | None
    during_backward: bool
    accumulation_steps: int
    threads: int
    stochastic_seed: int | None

    @classmethod
    def of(cls, given: StageOptions, precision: Precision) -> "CheckedOptions":
        """Check options.

        Raises:
            ConfigError: one has a value that cannot work.
            TypeError: one is unknown.
        """
        unknown = sorted(given.keys() - StageOptions.__annotations__.keys())
        if unknown:
            known = ", ".join(StageOptions.__annotations__)
            raise TypeError(f"unknown option {unknown[0]!r}; the options of every optimizer are {known}")
        threads, norm = given.get("threads"), given.get("max_grad_norm")
        if norm is not None and not norm > 0:
            raise ConfigError(
                f"max_grad_norm={norm!r} must be greater than 0; give None to leave gradients as they are"
            )
        rounds = given.get("stochastic_rounding", False)
        if rounds and precision != "bf16":
            raise ConfigError(
                f"stochastic_rounding=True, but with precision={precision!r} nothing is rounded: the master is exact "
                f"float32; compile with precision='bf16' to keep bfloat16 parameters alone"
            )
        return cls(
            norm,
            given.get("during_backward", True),
            _at_least_one("accumulation_steps", given.get("accumulation_steps", 1)),
            available_processors() if threads is None else _at_least_one("threads", threads),
            torch.initial_seed() % 2**62 if rounds else None,
        )


def compiled_state(model: nn.Module) -> StreamedModel:
    """What a compiled model has beyond the original one, free to be given an optimizer.

    Raises:
        ConfigError: the model is not compiled, or has another optimizer.
    """
    streamed: StreamedModel | None = getattr(model, "__dict__", {}).get(STATE)
    if streamed is None:
        raise ConfigError(
            f"{type(model).__name__} is not a compiled model: the first argument is the model itself, after "
            f"megatrain.compile(model)"
        )
    if streamed.optimizer is not None:
        gc.collect()  # schedulers refer to their optimizer in a circle
    if streamed.optimizer is not None:
        raise ConfigError(
            f"this {type(model).__name__} has an optimizer already, a {type(streamed.optimizer).__name__}: use "
            f"add_param_group for more parameters, or delete it and its schedulers first"
        )
    return streamed


def check_hyperparameters(betas: tuple[float, float] = (0.0, 0.0), **not_negative: float) -> None:
    """Check numbers that many optimizers have.

    Raises:
        ConfigError: a beta is outside [0, 1), or another number is negative.
    """
    for name, value in not_negative.items():
        if not value >= 0:
            raise ConfigError(f"{name}={value!r} must not be negative")
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas={betas!r} must be two numbers of at least 0 and below 1")


def _at_least_one(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
    return value
