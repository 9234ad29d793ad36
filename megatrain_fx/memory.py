"""How much memory a compiled model holds on the device and on the host."""

from dataclasses import dataclass

from torch import nn

from megatrain_fx.edge import STATE
from megatrain_fx.errors import ConfigError
from megatrain_fx.streamed_model import StreamedModel


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held.

    Attributes:
        parameter_bytes: all parameters, in the host store.
        slot_bytes: device memory for weights; allocated once, so this is also its peak.
        slab_bytes: device memory for gradients on their way home.
    """

    parameter_bytes: int
    slot_bytes: int
    slab_bytes: int

    @property
    def weight_peak_bytes(self) -> int:
        """The most device memory that weights ever took."""
        return self.slot_bytes


def memory(model: nn.Module) -> MemoryReport:
    """The memory of a compiled model, after its first call.

    Raises:
        ConfigError: the model was not compiled.
    """
    streamed: StreamedModel | None = model.__dict__.get(STATE)
    if streamed is None:
        raise ConfigError(f"{type(model).__name__} is not compiled: call megatrain.compile(model) first")
    parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return MemoryReport(parameter_bytes, streamed.buffers.slot_bytes, streamed.buffers.slab_bytes)
