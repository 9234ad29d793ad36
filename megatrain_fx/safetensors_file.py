"""Files of tensors in the safetensors format, read straight into the memory that is to hold them.

The format: 8 bytes, little-endian, the size of a JSON header; the header, which maps each name to a dtype, a shape and
the range of its bytes behind the header; the bytes. See https://github.com/huggingface/safetensors.
"""

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain_fx.errors import WeightsError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name: its name in the file.
        path: the file.
        offset: bytes from the start of the file.
        shape, dtype: of the tensor, which is contiguous.
    """

    name: str
    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def read_into(self, target: torch.Tensor) -> None:
        """Read the values.

        Args:
            target: a contiguous CPU tensor of equal dtype and number of elements.

        Raises:
            WeightsError: the file ends early.
        """
        assert target.dtype == self.dtype
        assert target.is_contiguous()
        buffer = memoryview((ctypes.c_ubyte * self.bytes).from_address(target.data_ptr())) if self.bytes else b""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            done = 0
            while done < self.bytes:
                count = file.readinto(buffer[done:])
                if not count:
                    raise WeightsError(f"{self.path} ends within tensor {self.name}: copy or download the file again")
                done += count


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name.

    Raises:
        WeightsError: it is no such file, or holds a tensor of a dtype that PyTorch lacks.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise WeightsError(f"{path} is no safetensors file: its header would be longer than the file")
        text = file.read(length)
    start = _LENGTH_BYTES + length
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _stored(name, entry, path, start) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} is no safetensors file: its header cannot be read ({error!r})") from error
    for tensor in tensors.values():
        if tensor.offset + tensor.bytes > size:
            raise WeightsError(f"{path} ends before tensor {tensor.name} does: copy or download the file again")
    return tensors


def _stored(name: str, entry: dict[str, Any], path: Path, start: int) -> StoredTensor:
    if entry["dtype"] not in _DTYPES:
        raise WeightsError(f"tensor {name} in {path} is of type {entry['dtype']}, which PyTorch cannot hold")
    begin, end = entry["data_offsets"]
    tensor = StoredTensor(name, path, start + begin, tuple(entry["shape"]), _DTYPES[entry["dtype"]])
    if begin < 0 or end - begin != tensor.bytes:
        raise ValueError(f"tensor {name} has a range of {end - begin} bytes for {tensor.bytes}")
    return tensor
