"""Meta tensors: given memory and values, they stay the same objects wherever they are held."""

import torch
from torch import nn


def materialize(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Turn a tensor on the meta device into one with these values.

    Args:
        tensor: a parameter or buffer; it keeps its class, its attributes and ``requires_grad``.
        values: of equal shape and dtype; it must not be used afterwards.

    Raises:
        RuntimeError: something holds a weak reference to the tensor (PyTorch's own error).
    """
    if isinstance(tensor, nn.Parameter):
        values = nn.Parameter(values, requires_grad=tensor.requires_grad)
        if type(tensor) is not nn.Parameter:
            values.__class__ = type(tensor)
    vars(values).update(vars(tensor))
    torch.utils.swap_tensors(tensor, values)
