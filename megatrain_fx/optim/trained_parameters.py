"""The parameters that an optimizer trains: their names, parameter groups and regions, and what they may be."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megatrain_fx.config import Precision
from megatrain_fx.errors import ConfigError
from megatrain_fx.layout import Layout


class TrainedParameters:
    """Members of the parameter groups, by their names in the model.

    Attributes:
        by_name: every member.
        group_of: number of the parameter group of each.
        splits: whether bfloat16 parameters get a remainder.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._model = type(model).__name__
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._precision = precision
        self._regions: dict[int, list[str]] | None = None
        self.by_name: dict[str, torch.Tensor] = {}
        self.group_of: dict[str, int] = {}
        self.splits = precision != "bf16"

    def name_of(self, parameter: torch.Tensor) -> str:
        """The name of a parameter of the model.

        Raises:
            ConfigError: it is none.
        """
        name = self._names.get(parameter)  # type: ignore[call-overload]
        if name is None:
            raise ConfigError(
                f"a parameter of shape {list(parameter.shape)} is not one of this {self._model}'s; give the optimizer "
                f"parameters of the compiled model, and train others with an optimizer of torch.optim"
            )
        return str(name)

    def check(self, parameters: Iterable[torch.Tensor]) -> None:
        """Check new members.

        Raises:
            ConfigError: one is no parameter of the model, or of a type that the optimizer cannot update.
        """
        for parameter in parameters:
            name = self.name_of(parameter)
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise ConfigError(
                    f"parameter {name} is {parameter.dtype}; megatrain.optim updates float32 and bfloat16: convert it "
                    f"before compiling, freeze it, or train it with an optimizer of torch.optim"
                )
            if self._precision == "fp32" and parameter.dtype is torch.bfloat16:
                raise ConfigError(
                    f"precision='fp32', but parameter {name} is bfloat16: convert with model.float() before compiling, "
                    f"or use precision='bf16-split', which keeps an exact float32 master in 14 bytes a parameter"
                )

    def add(self, parameters: Iterable[torch.Tensor], group: int) -> None:
        """Add checked members to a group."""
        for parameter in parameters:
            name = self.name_of(parameter)
            self.by_name[name] = parameter
            self.group_of[name] = group
        self._regions = None

    def in_region(self, layout: Layout, region: int) -> list[str]:
        """Names of the members in a region, in order of their offsets."""
        if self._regions is None:
            self._regions = {
                each.index: [place.name for place in each.places if place.name in self.by_name]
                for each in layout.regions
            }
        return self._regions[region]

    def by_region(self, layout: Layout, names: Iterable[str]) -> dict[int, list[str]]:
        """Those of the names that are members, by region, in order of regions and offsets."""
        wanted = frozenset(names)
        found: defaultdict[int, list[str]] = defaultdict(list)
        for each in layout.regions:
            for name in self.in_region(layout, each.index):
                if name in wanted:
                    found[each.index].append(name)
        return dict(found)


def saved_state(groups: Iterable[Mapping[str, Any]], given: Mapping[str, Any]) -> dict[torch.Tensor, dict[str, Any]]:
    """The state of each parameter of these groups in a state_dict whose groups match them."""
    saved = [number for group in given["param_groups"] for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    pairs = zip(saved, parameters, strict=False)  # PyTorch compares the lengths, with better texts
    return {parameter: dict(given["state"][number]) for number, parameter in pairs if number in given["state"]}
