"""The options of ``megatrain.compile``, checked when they are given."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from megatrain_fx.errors import ConfigError
from megatrain_fx.staging import STAGING_BYTES

Pin = Literal["register", "staging", "none"]
Precision = Literal["auto", "fp32", "bf16-split", "bf16"]
Template = Literal["eager", "inductor"]


def default_device() -> torch.device:
    """The current accelerator if there is one, else the CPU."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


@dataclass(frozen=True)
class StreamConfig:
    """How a model is streamed.

    Attributes:
        device: where templates run. Default: the current accelerator, else the CPU (host lanes, for development).
        slots: stages whose weights may be on the device at one time. 1 copies and computes in turn; 2 overlap; 3 also
            hide uneven stages.
        slabs: stages whose gradients may be on their way home at one time.
        stage_bytes: neighbouring units are merged into one stage up to this many bytes of parameters. A single unit may
            be larger. Small stages need less device memory, large ones fewer copies.
        pin: how host memory is made fast to copy. ``register`` locks the store itself with the accelerator's driver
            (fallback: ``staging``, with a warning); ``staging`` copies through pinned buffers, which is slower and
            needs no locked store; ``none`` leaves memory pageable.
        staging_bytes: size of each of the four pinned buffers for ``staging``.
        precision: what ``megatrain.optim`` keeps. ``fp32``: float32 parameters (16 bytes a parameter with AdamW);
            ``bf16-split``: bfloat16 ones with an exact float32 master (14); ``bf16``: bfloat16 ones as they are (12).
            ``auto``: the first or second, by each parameter's dtype.
        loss_chunk_bytes: where the logits of a linear head would take more than this for the cross-entropy that
            follows, both are computed by chunks of this size, forward and backward together: equal to rounding, never
            whole. The model then returns None in their place. 0: chunks of 64 rows, always. None: never.
        keep_logits: where the model returns logits, compute them as a whole, however large they are.
        template: ``eager`` runs each stage as the Python that was given; ``inductor`` compiles each template once, so
            that compile time does not grow with depth, and equals eager to rounding. What a stage does beside computing
            tensors (printing, counting, hooks) then happens only while it is traced. Dropout draws other numbers than
            in eager mode. Where compiling fails, a warning says why, and the template stays eager; so does
            the last stage.
        chaos: seed of chaos mode: random delays on every lane, and every buffer filled with NaN once it is released, so
            that a wrong schedule gives wrong numbers in tests. None: off.
        passes: graph transformations of your own (see CONTRIBUTING.md), run before dependencies are derived.
    """

    device: torch.device = field(default_factory=default_device)
    slots: int = 3
    slabs: int = 2
    stage_bytes: int = 32 * 2**20
    pin: Pin = "register"
    staging_bytes: int = STAGING_BYTES
    precision: Precision = "auto"
    loss_chunk_bytes: int | None = 256 * 2**20
    keep_logits: bool = False
    template: Template = "eager"
    chaos: int | None = None
    passes: tuple[Callable[..., Any], ...] = ()

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: a field has a value that cannot work; the text says which values can.
        """
        object.__setattr__(self, "device", _device(self.device))
        object.__setattr__(self, "passes", _passes(self.passes))
        _at_least(self, "slots", 1)
        _at_least(self, "slabs", 1)
        _at_least(self, "stage_bytes", 0)
        _at_least(self, "staging_bytes", 1)
        _one_of(self, "pin", get_args(Pin))
        _one_of(self, "precision", get_args(Precision))
        _one_of(self, "template", get_args(Template))
        if self.loss_chunk_bytes is not None:
            _at_least(self, "loss_chunk_bytes", 0)
        if not isinstance(self.keep_logits, bool):
            raise ConfigError(f"keep_logits={self.keep_logits!r} must be True or False")
        if self.chaos is not None:
            _at_least(self, "chaos", 0)


def make_config(options: dict[str, Any]) -> StreamConfig:
    """A config from keyword options.

    Raises:
        ConfigError: an option is unknown, or has a value that cannot work.
    """
    known = [each.name for each in dataclasses.fields(StreamConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; the options are {', '.join(known)}")
    return StreamConfig(**options)


def _device(value: object) -> torch.device:
    """A device with an index, so that it compares equal to the devices of tensors."""
    try:
        device = torch.device(value)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"device={value!r} is not a device: {error}") from error
    if device.type == "meta":
        raise ConfigError("device='meta' cannot compute; to inspect a model without running it, use megatrain.trace")
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or accelerator.type != device.type:
        found = "none" if accelerator is None else accelerator.type
        raise ConfigError(f"device={value!r}: PyTorch sees no such accelerator here (found: {found}); use device='cpu'")
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= torch.accelerator.device_count():
        raise ConfigError(f"device={value!r}: there are {torch.accelerator.device_count()} {device.type} devices")
    return torch.device(device.type, index)


def _passes(value: object) -> tuple[Callable[..., Any], ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"passes={value!r} must be a list of functions from GraphModule to GraphModule")
    for each in value:
        if not callable(getattr(each, "run", each)):
            raise ConfigError(
                f"passes holds {each!r}, which cannot be called; a pass maps a GraphModule to a GraphModule"
            )
    return tuple(value)


def _at_least(config: StreamConfig, name: str, least: int) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")


def _one_of(config: StreamConfig, name: str, values: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in values:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, values))}")
