"""Weights from safetensors files, read into a model that was built on the meta device, one tensor at a time.

At no time is more in memory than the model and the tensor that is being read.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from megatrain_fx.errors import WeightsError
from megatrain_fx.meta_tensors import materialize
from megatrain_fx.rebuilt_buffers import rebuild_buffers
from megatrain_fx.safetensors_file import StoredTensor
from megatrain_fx.shards import find_tensors

_NAMED_AT_MOST = 10


@dataclass(frozen=True)
class _Target:
    """A parameter or buffer, with all its names (several if it is tied); files must hold it if it is ``required``."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    required: bool


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fill all parameters and buffers of a model from a checkpoint, in the model's dtypes.

    Parameters on the meta device stay the same objects and move to the CPU, others are filled in place. Buffers that a
    checkpoint does not hold are built again (see :mod:`megatrain_fx.rebuilt_buffers`). Nothing is written if the
    names or shapes do not fit.

    Args:
        model: with parameters on the CPU or the meta device.
        path: see :func:`megatrain_fx.shards.find_tensors`.

    Raises:
        WeightsError: tensors are missing, unexpected, of another shape, or unlike each other though tied in the model;
            a file is missing or damaged; or a buffer cannot be built again.
    """
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()  # Hugging Face models are tied by this method, and their checkpoints hold tied parameters once
    stored = find_tensors(Path(path))
    targets = _targets(model)
    _check(type(model).__name__, targets, stored, path)
    absent = [target for target in targets if target.tensor.is_meta and not _sources(target, stored)]
    rebuild_buffers(model, [target.names[0] for target in absent])
    for target in targets:
        if sources := _sources(target, stored):
            _fill(target, sources)


def _targets(model: nn.Module) -> list[_Target]:
    kept = frozenset(model.state_dict(keep_vars=True))
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    return [
        _Target(tuple(names[key]), tensor, isinstance(tensor, nn.Parameter) or not kept.isdisjoint(names[key]))
        for key, tensor in tensors.items()
    ]


def _sources(target: _Target, stored: Mapping[str, StoredTensor]) -> list[StoredTensor]:
    return [stored[name] for name in target.names if name in stored]


def _check(kind: str, targets: Sequence[_Target], stored: Mapping[str, StoredTensor], path: str | Path) -> None:
    known = {name for target in targets for name in target.names}
    missing = [target.names[0] for target in targets if target.required and not _sources(target, stored)]
    shapes = [
        f"{source.name} ({list(source.shape)}, in the model {list(target.tensor.shape)})"
        for target in targets
        for source in _sources(target, stored)
        if source.shape != tuple(target.tensor.shape)
    ]
    problems = [
        f"{what}: {_enumeration(found)}"
        for what, found in (
            ("missing from the files", missing),
            ("unexpected in the files", [name for name in stored if name not in known]),
            ("of another shape", shapes),
        )
        if found
    ]
    if problems:
        raise WeightsError(
            f"the weights in {str(path)!r} do not fit this {kind}. {'; '.join(problems)}. Build the model from the "
            f"configuration with which the files were saved; where names must be mapped or parts added, load the "
            f"weights on the CPU (load_state_dict, from_pretrained) and compile without weights="
        )


def _enumeration(names: Iterable[str]) -> str:
    first = list(names)
    more = len(first) - _NAMED_AT_MOST
    return ", ".join(first[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _fill(target: _Target, sources: Sequence[StoredTensor]) -> None:
    tensor = target.tensor
    values = torch.empty_like(tensor, device="cpu", requires_grad=False) if tensor.is_meta else tensor.detach()
    source = sources[0]
    if source.dtype == values.dtype and values.is_contiguous():
        source.read_into(values)
    else:
        values.copy_(_read(source))
    for other in sources[1:]:
        if not torch.equal(values, _read(other).to(values.dtype)):
            raise WeightsError(
                f"{source.name} and {other.name} are one parameter in the model but differ in the files: build the "
                f"model untied (tie_word_embeddings=False in Hugging Face configurations)"
            )
    if tensor.is_meta:
        materialize(tensor, values)


def _read(source: StoredTensor) -> torch.Tensor:
    values = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    source.read_into(values)
    return values
