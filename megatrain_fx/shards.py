"""The shards of a checkpoint: which file of a directory holds which tensor."""

import json
from pathlib import Path

from megatrain_fx.errors import WeightsError
from megatrain_fx.safetensors_file import StoredTensor, stored_tensors

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


def find_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, by name.

    Args:
        path: a safetensors file, or a directory: with ``model.safetensors.index.json`` the shards that it lists, else
            ``model.safetensors``, else every ``*.safetensors``.

    Raises:
        WeightsError: there is no such file, one is damaged, or two hold the same tensor.
    """
    if path.is_file():
        return stored_tensors(path)
    if (path / _INDEX).is_file():
        return _indexed(path / _INDEX)
    if (path / _WHOLE).is_file():
        return stored_tensors(path / _WHOLE)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"weights={str(path)!r} is neither a safetensors file nor a directory that holds one")
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in stored_tensors(file).items():
            if name in found:
                raise WeightsError(f"both {found[name].path} and {file} hold {name}; name one of the files in weights=")
            found[name] = tensor
    return found


def _indexed(index: Path) -> dict[str, StoredTensor]:
    try:
        files: dict[str, str] = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{index} is no index of shards: it has no weight_map ({error!r})") from error
    shards = {}
    for file in sorted(set(files.values())):
        if not (index.parent / file).is_file():
            raise WeightsError(f"{index} lists {file}, which is not there: download or copy that shard too")
        shards[file] = stored_tensors(index.parent / file)
    for name, file in files.items():
        if name not in shards[file]:
            raise WeightsError(f"{index} says that {file} holds {name}, which it does not: get both from one source")
    return {name: shards[file][name] for name, file in files.items()}
