"""The host store: the authoritative parameters and gradients, one contiguous region each a stage."""

import logging
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from megatrain_fx.config import Pin
from megatrain_fx.errors import ModelDeviceError
from megatrain_fx.extension import runtime as native
from megatrain_fx.host_memory import HostMemory
from megatrain_fx.layout import Layout, Place
from megatrain_fx.private_api import version_of

logger = logging.getLogger(__name__)

SKIP, COPY, ADD = 0, 1, 2
"""How a gradient that comes home meets what is there (the modes of the runtime's AccumulateTask)."""


class HostStore:
    """Owns the memory of all parameters and gradients of one model.

    Invariant: from construction on, every parameter's ``data`` is a view of its region, and a ``grad`` that this store
    set is a view of the region's gradients.
    """

    def __init__(self, model: nn.Module, layout: Layout, device: torch.device, pin: Pin) -> None:
        """Move the parameters of ``model`` into the store, region by region, freeing each as it is copied."""
        self.layout = layout
        self.parameters = dict(model.named_parameters())
        self._registers = pin == "register" and device.type == "cuda"
        self._refused: str | None = None
        self._weights = [self._fill(index) for index in range(len(layout.regions))]
        self._pointers = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        self.gates = [native.Gate() for _ in layout.regions]
        self._gradients: dict[int, HostMemory] = {}
        self._places = layout.places
        self._gradient_views: dict[str, torch.Tensor] = {}
        self._published: dict[str, weakref.ref[torch.Tensor]] = {}

    @property
    def staged(self) -> bool:
        """Whether the driver refused to register memory, so that copies go through staging buffers."""
        return self._refused is not None

    def weights(self, region: int) -> torch.Tensor:
        """The parameters of a region, 1-D uint8."""
        return self._weights[region].flat()

    def gradients(self, region: int) -> torch.Tensor:
        """The gradients of a region's trainable parameters, 1-D uint8."""
        return self._gradients[region].flat()

    def gate(self, region: int) -> native.Gate:
        """Closed while an update of the region is pending: neither its weights nor its gradients may be touched then."""
        return self.gates[region]

    def reserve_gradients(self, region: int, size: int) -> bool:
        """Allocate the gradients of a region; True if smaller ones were replaced (a frozen parameter was thawed)."""
        held = self._gradients.get(region)
        if held is not None and held.size >= size:
            return False
        self._gradients[region] = self._allocate(size)
        for place in self.layout.regions[region].places:
            shown = self.parameters[place.name].grad
            old = self._gradient_views.pop(place.name, None)
            if shown is not None and old is not None and shown.data_ptr() == old.data_ptr():
                self.parameters[place.name].grad = None
                self.parameters[place.name].grad = self.gradient_view(place.name).copy_(old)
        return held is not None

    def gradient_view(self, name: str) -> torch.Tensor:
        """The place of one parameter's gradient, shaped like the parameter."""
        if name not in self._gradient_views:
            place = self._places[name]
            self._gradient_views[name] = _view(self._gradients[place.region], place)
        return self._gradient_views[name]

    def adopt_gradient(self, name: str) -> int:
        """Make the store hold what ``parameter.grad`` holds; returns how a new gradient must be put there."""
        parameter = self.parameters[name]
        if parameter.grad is None:
            self._leave_published(name)
            return COPY
        view = self.gradient_view(name)
        if parameter.grad.data_ptr() != view.data_ptr():
            self._leave_published(name)
            view.copy_(parameter.grad)
            parameter.grad = view
        return ADD

    def publish_gradients(self, names: Iterable[str]) -> None:
        """Let ``parameter.grad`` show the store's gradients of the named parameters."""
        for name in names:
            if self.parameters[name].grad is None:
                published = self.gradient_view(name).detach()
                self.parameters[name].grad = published
                self._published[name] = weakref.ref(published)

    def _leave_published(self, name: str) -> None:
        """Give a gradient that the user took from ``parameter.grad`` and still holds memory of its own."""
        published = self._published.pop(name, None)
        held = None if published is None else published()
        if held is not None:
            held.data = held.clone()

    def version(self) -> int:
        """A number that grows whenever a parameter is modified in place."""
        return sum(map(version_of, self.parameters.values()))

    def reclaim(self) -> None:
        """Take back parameters whose ``data`` was set to other memory (``p.data = ...``): their values are copied in.

        Raises:
            ModelDeviceError: the new memory is not on the CPU, or of another shape or dtype.
        """
        for name, parameter in self.parameters.items():
            place = self._places[name]
            if parameter.data_ptr() == self._pointers[name] and parameter.stride() == place.stride:
                continue
            if parameter.device.type != "cpu" or parameter.shape != place.shape or parameter.dtype != place.dtype:
                raise ModelDeviceError(
                    f"parameter {name} was {place.dtype} {list(place.shape)} on the CPU when the model was compiled, "
                    f"and is now {parameter.dtype} {list(parameter.shape)} on {parameter.device}; convert before compiling"
                )
            view = _view(self._weights[place.region], place)
            parameter.data = view.copy_(parameter.detach().clone())  # the new memory may be a part of the old

    def _fill(self, index: int) -> HostMemory:
        region = self.layout.regions[index]
        memory = self._allocate(region.bytes)
        for place in region.places:
            parameter = self.parameters[place.name]
            view = _view(memory, place)
            view.copy_(parameter.detach())
            parameter.data = view
        return memory

    def _allocate(self, size: int) -> HostMemory:
        memory = HostMemory(size)
        if self._registers and not self.staged:
            self._refused = memory.register()
            if self._refused:
                logger.warning(
                    "%s: host memory stays unregistered, and copies go through staging buffers", self._refused
                )
        return memory


def _view(memory: HostMemory, place: Place) -> torch.Tensor:
    flat = memory.tensor(place.offset, place.numel, place.dtype)
    return flat.as_strided(place.shape, place.stride)
