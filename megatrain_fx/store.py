"""The host store: the authoritative parameters and gradients, one contiguous region each a stage."""

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
from megatrain_fx.registration import Registration
from megatrain_fx.staging import STAGING_BYTES, StagingLanes, allocate_staging

SKIP, COPY, ADD = 0, 1, 2
"""How a gradient that comes home meets what is there (the modes of the runtime's AccumulateTask)."""


class HostStore:
    """Owns the memory of all parameters and gradients of one model.

    Invariant: from construction on, every parameter's ``data`` is a view of its region, and a ``grad`` that this store
    set is a view of the region's gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        device: torch.device,
        pin: Pin,
        registration: Registration | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """Move the parameters of ``model`` into the store, region by region, freeing each as it is copied.

        Args:
            model: whose parameters are on the CPU.
            layout: where each is to lie.
            device: to which copies go.
            pin: how host memory is made fast to copy.
            registration: registers the memory if ``pin`` asks for it.
            staging_bytes: size of a staging buffer.
        """
        self.layout = layout
        self.parameters = dict(model.named_parameters())
        self._device = device
        self._pin = pin
        self._registration = registration or Registration(None)
        self._staging_bytes = staging_bytes
        self._staging: StagingLanes | None = None
        self._weights = [self._fill(index) for index in range(len(layout.regions))]
        self._pointers = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        self.gates = [native.Gate() for _ in layout.regions]
        self._gradients: dict[int, HostMemory] = {}
        self._places = layout.places
        self._gradient_views: dict[str, torch.Tensor] = {}
        self._published: dict[str, weakref.ref[torch.Tensor]] = {}

    @property
    def staged(self) -> bool:
        """Whether copies of memory that is not registered go through staging buffers, by choice or after a refusal."""
        return self._pin == "staging" or self._registration.refusal is not None

    @property
    def staging_bytes(self) -> int:
        """Size of all staging buffers."""
        return 0 if self._staging is None else self._staging.bytes

    def inbound(self, region: int) -> native.Staging | None:
        """What a region's weights go through on their way to the device; None if it copies them directly."""
        return None if self._weights[region].registered or not self.staged else self._staging_lanes().inbound

    def outbound(self, region: int) -> native.Staging | None:
        """What a region's gradients go through on their way home; None if the device copies them directly."""
        return None if self._gradients[region].registered or not self.staged else self._staging_lanes().outbound

    def weights(self, region: int) -> torch.Tensor:
        """The parameters of a region, 1-D uint8."""
        return self._weights[region].flat()

    def gradients(self, region: int) -> torch.Tensor:
        """The gradients of a region's trainable parameters, 1-D uint8."""
        return self._gradients[region].flat()

    def gradient_bytes(self, region: int) -> int:
        """Size of the gradients of a region; 0 before any are reserved."""
        return self._gradients[region].size if region in self._gradients else 0

    def gate(self, region: int) -> native.Gate:
        """Closed while an update of the region is pending: neither weights nor gradients may be touched then."""
        return self.gates[region]

    def reserve_gradients(self, region: int, size: int) -> bool:
        """Allocate the gradients of a region; True if smaller ones were replaced (a frozen parameter was thawed)."""
        held = self._gradients.get(region)
        if held is not None and held.size >= size:
            return False
        memory = self._gradients[region] = HostMemory(size)
        if self._registration.active:
            memory.touch()
        self._registration.register(memory)
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

    def publish_gradients(self, names: Iterable[str]) -> list[str]:
        """Let ``parameter.grad`` show the store's gradients of the named parameters; returns those that had none."""
        new = [name for name in names if self.parameters[name].grad is None]
        for name in new:
            published = self.gradient_view(name).detach()
            self.parameters[name].grad = published
            self._published[name] = weakref.ref(published)
        return new

    def withdraw_gradients(self, names: Iterable[str]) -> None:
        """Take back what was published for a backward pass that failed: not all of it has come home."""
        for name in names:
            self.parameters[name].grad = None

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
                    f"and is now {parameter.dtype} {list(parameter.shape)} on {parameter.device}; convert it earlier"
                )
            view = _view(self._weights[place.region], place)
            parameter.data = view.copy_(parameter.detach().clone())  # the new memory may be a part of the old

    def _fill(self, index: int) -> HostMemory:
        region = self.layout.regions[index]
        memory = HostMemory(region.bytes)
        for place in region.places:
            parameter = self.parameters[place.name]
            view = _view(memory, place)
            view.copy_(parameter.detach())
            parameter.data = view
        native.return_freed_memory()
        self._registration.register(memory)
        return memory

    def _staging_lanes(self) -> StagingLanes:
        if self._staging is None:
            self._staging = allocate_staging(self._device, self._staging_bytes)
        return self._staging


def _view(memory: HostMemory, place: Place) -> torch.Tensor:
    flat = memory.tensor(place.offset, place.numel, place.dtype)
    return flat.as_strided(place.shape, place.stride)
