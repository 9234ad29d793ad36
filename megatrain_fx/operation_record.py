"""A record of every ATen operation that runs, with its constants and the tensors that it meets."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatrain_fx.private_api import DispatchMode, is_fake, without_fake_mode

_LARGEST_CONSTANT = 2**16

# Operations that update the running statistics they are given, though neither their schema nor a version counter says
# so.
_UPDATES_STATISTICS = (
    torch.ops.aten.native_batch_norm,
    torch.ops.aten.cudnn_batch_norm,
    torch.ops.aten.miopen_batch_norm,
)


class OperationRecord(DispatchMode):
    """Records the operations of a region, autograd's included: two stages with equal records compute the same function.

    Tensors are known by the order in which they appear, so that names and values of parameters do not matter; tensors
    that were made outside the region are constants, and known by their values.
    """

    def __init__(self, known: Sequence[object]) -> None:
        """``known`` are the region's own tensors: parameters, buffers and inputs."""
        super().__init__()
        self._digest = hashlib.sha256()
        self._number: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # an id stays unique only while its tensor lives
        self._statistics: set[int] = set()
        for value in known:
            if isinstance(value, torch.Tensor):
                self._register(value)
            self._note(self._describe(value))

    @property
    def key(self) -> str:
        """A digest of everything recorded."""
        return self._digest.hexdigest()

    def updated_statistics(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Names of those tensors that a batch normalisation was given as running statistics."""
        return {name for name, tensor in tensors if self._number.get(id(tensor)) in self._statistics}

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note(f"{function} {self._describe(args)} {self._describe(kwargs)}")
        if getattr(function, "overloadpacket", None) in _UPDATES_STATISTICS:
            self._statistics.update(self._number[id(arg)] for arg in args[3:5] if isinstance(arg, torch.Tensor))
        result = function(*args, **kwargs)
        self._note(self._describe(result))
        return result

    def _note(self, line: str) -> None:
        self._digest.update(line.encode())

    def _describe(self, value: object) -> str:
        if isinstance(value, torch.Tensor):
            return self._describe_tensor(value)
        if isinstance(value, (list, tuple)):
            return f"[{' '.join(map(self._describe, value))}]"
        if isinstance(value, dict):
            return f"{{{' '.join(f'{key}={self._describe(item)}' for key, item in value.items())}}}"
        return repr(value)

    def _describe_tensor(self, tensor: torch.Tensor) -> str:
        known = id(tensor) in self._number
        number = self._number[id(tensor)] if known else self._register(tensor)
        text = (
            f"%{number} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device} {tensor.requires_grad}"
        )
        if not known and not is_fake(tensor) and not tensor.is_meta:
            with without_fake_mode():
                small = tensor.numel() <= _LARGEST_CONSTANT
                text += f" {tensor.tolist()}" if small else f" object {id(tensor)}"
        return text

    def _register(self, tensor: torch.Tensor) -> int:
        self._alive.append(tensor)
        return self._number.setdefault(id(tensor), len(self._number))
