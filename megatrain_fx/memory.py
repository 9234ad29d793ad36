"""How much memory a compiled model holds on the device and on the host."""

from dataclasses import dataclass

from torch import nn

from megatrain_fx.edge import STATE
from megatrain_fx.errors import ConfigError
from megatrain_fx.streamed_model import StreamedModel

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held; buffers are allocated once, so what they take is also their peak.

    Attributes:
        parameters: how many numbers are parameters.
        parameter_bytes: all parameters, in the host store.
        gradient_bytes: their gradients, in the host store; 0 before the first call that trains.
        optimizer_bytes: state of the optimizer of :mod:`megatrain_fx.optim` that trains the model, on the host.
        host_slab_bytes: host memory for gradients on their way home.
        staging_bytes: pinned buffers for copies of memory that is not registered.
        slot_bytes: device memory for weights.
        slab_bytes: device memory for gradients on their way home.
        staged: whether copies go through the staging buffers, by choice or because the driver refused.
    """

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_slab_bytes: int
    staging_bytes: int
    slot_bytes: int
    slab_bytes: int
    staged: bool

    @property
    def weight_peak_bytes(self) -> int:
        """The most device memory that weights ever took."""
        return self.slot_bytes

    @property
    def host_bytes(self) -> int:
        """All host memory of the model."""
        store = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return store + self.host_slab_bytes + self.staging_bytes

    @property
    def host_bytes_per_parameter(self) -> float:
        """Host memory divided by the number of parameters."""
        return self.host_bytes / self.parameters

    def __str__(self) -> str:
        sizes = {
            "host parameters": self.parameter_bytes,
            "host gradients": self.gradient_bytes,
            "host optimizer": self.optimizer_bytes,
            "host slabs": self.host_slab_bytes,
            "host staging": self.staging_bytes,
            "device slots": self.slot_bytes,
            "device slabs": self.slab_bytes,
        }
        lines = [f"{name:<16} {_readable(size):>12}" for name, size in sizes.items()]
        copies = "staged" if self.staged else "direct"
        return "\n".join([*lines, f"{self.host_bytes_per_parameter:.2f} host bytes a parameter, copies {copies}"])


def memory(model: nn.Module) -> MemoryReport:
    """The memory of a compiled model, after its first call.

    Raises:
        ConfigError: the model was not compiled.
    """
    streamed: StreamedModel | None = model.__dict__.get(STATE)
    if streamed is None:
        raise ConfigError(f"{type(model).__name__} is not compiled: call megatrain.compile(model) first")
    store, buffers = streamed.store, streamed.buffers
    parameters = list(model.parameters())
    return MemoryReport(
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        gradient_bytes=sum(map(store.gradient_bytes, range(len(store.layout.regions)))) if store else 0,
        optimizer_bytes=getattr(streamed.optimizer, "state_bytes", 0),
        host_slab_bytes=buffers.host_slab_bytes,
        staging_bytes=store.staging_bytes if store else 0,
        slot_bytes=buffers.slot_bytes,
        slab_bytes=buffers.slab_bytes,
        staged=store.staged if store else streamed.config.pin == "staging",
    )


def _readable(size: float) -> str:
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
