"""Where every parameter lives: regions of the host store, and offsets in them.

A region holds the parameters that the same stages use. So a parameter used by one stage lies in that stage's region,
and one shared by several (a tied embedding) lies in a region of its own, that each of them fetches: it is never
stored twice.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

ALIGNMENT = 256
"""Bytes to which offsets are rounded up: what cuBLAS's fastest kernels ask of a pointer."""


@dataclass(frozen=True)
class Place:
    """Where one parameter lies.

    Attributes:
        name: its name in the model.
        region: number of its region.
        offset: bytes from the start of the region; the same in a slot, and in a slab for its gradient.
        shape, stride, dtype: of the view; a dense stride order (channels last, transposed) is kept.
    """

    name: str
    region: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        return self.numel * self.dtype.itemsize

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter in a flat uint8 tensor laid out as the region (a slot, a slab, the region itself)."""
        part = flat[self.offset : self.offset + self.bytes].view(self.dtype)
        return part.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Region:
    """One contiguous piece of the store: trainable parameters first, dtypes segregated.

    Attributes:
        index: its number.
        places: its parameters in order of offset.
        bytes: size of the parameters.
    """

    index: int
    places: tuple[Place, ...]
    bytes: int

    def gradient_bytes(self, trainable: Collection[str]) -> int:
        """Size of the leading part that holds the parameters named in ``trainable``."""
        return max((align(place.offset + place.bytes) for place in self.places if place.name in trainable), default=0)


@dataclass(frozen=True)
class Layout:
    """The offsets of every parameter."""

    regions: tuple[Region, ...]

    @property
    def places(self) -> dict[str, Place]:
        """Place of every parameter by name."""
        return {place.name: place for region in self.regions for place in region.places}

    def __str__(self) -> str:
        lines = []
        for region in self.regions:
            lines.append(f"weights.{region.index}  {region.bytes} bytes")
            for place in region.places:
                dtype = str(place.dtype).removeprefix("torch.")
                lines.append(f"  +{place.offset:<10} {place.name} {dtype}{list(place.shape)}")
        return "\n".join(lines)


def plan_layout(model: nn.Module, uses: Sequence[Iterable[nn.Parameter]]) -> Layout:
    """Lay out all parameters of a model; ``uses`` lists the parameters that each stage uses.

    Parameters that no stage uses get regions by the module that owns them, since another call may use them.
    """
    stages_of: defaultdict[int, list[int]] = defaultdict(list)
    for stage, parameters in enumerate(uses):
        for parameter in {id(p): p for p in parameters}.values():
            stages_of[id(parameter)].append(stage)
    groups: defaultdict[tuple[object, ...], list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        stages = stages_of.get(id(parameter))
        key: tuple[object, ...] = (0, *stages) if stages else (1, name.rpartition(".")[0])
        groups[key].append((name, parameter))
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], item[0][1:] if item[0][0] == 0 else ()))
    return Layout(tuple(_region(index, members) for index, (_, members) in enumerate(ordered)))


def _region(index: int, members: list[tuple[str, nn.Parameter]]) -> Region:
    dtypes = list(dict.fromkeys(parameter.dtype for _, parameter in members))
    order = sorted(members, key=lambda item: (not item[1].requires_grad, dtypes.index(item[1].dtype)))
    places = []
    offset = 0
    for name, parameter in order:
        stride = tuple(torch.empty_like(parameter, device="meta").stride())
        shape = tuple(parameter.shape)
        place = Place(name, index, offset, shape, stride, parameter.dtype)
        places.append(place)
        offset = align(offset + place.bytes)
    return Region(index, tuple(places), offset)


def align(offset: int) -> int:
    """The next offset at which a parameter may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
