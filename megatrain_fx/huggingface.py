"""The one question of Hugging Face's models about values that capture answers: are these sequences packed?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

_MODULE, _FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


@contextlib.contextmanager
def unpacked_sequences(input_names: Sequence[str]) -> Iterator[None]:
    """While the context lasts, sequences whose position ids the model makes itself are known not to be packed.

    The eager model looks at the position ids, which count from zero, and then needs no mask: attention is causal, and
    its fastest kernel applies. On fake tensors it cannot look, and would build a whole mask that changes the kernel and
    its rounding. Position ids that the caller passes may be packed, so for those the model's own code decides.

    Args:
        input_names: of the tensors that are passed to the model.
    """
    module = sys.modules.get(_MODULE)
    passed = any("position" in name for name in input_names)
    if passed or not hasattr(module, _FUNCTION):
        yield
        return
    with mock.patch.object(module, _FUNCTION, _not_packed):
        yield


def _not_packed(position_ids: torch.Tensor) -> None:
    """The answer for positions that count from zero."""
