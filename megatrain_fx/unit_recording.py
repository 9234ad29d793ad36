"""Unit recording: during a capture a call of a unit is one opaque operator, whose shapes come from a fake run."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_fx.errors import CaptureError, MegatrainError
from megatrain_fx.model_state import preserved
from megatrain_fx.private_api import (
    ModuleMethods,
    call_uncompiled,
    ignoring_data_dependent_sizes,
    is_data_dependent_size,
    replace_call,
)
from megatrain_fx.signature import Structure, flatten_call
from megatrain_fx.unit_call import flatten_outputs
from megatrain_fx.unit_trial import Originals, run_on_random_inputs
from megatrain_fx.units import Unit


@dataclasses.dataclass
class RecordedCall:
    """One call of a unit while the model was traced; `outputs` is known once the call has run."""

    unit: Unit
    arguments: Structure
    outputs: Structure | None = None
    mutated_inputs: tuple[int, ...] = ()


class UnitRecorder:
    """Records the calls of a model's units during one capture, the structure that the model returned, and the names of
    the buffers to which its glue assigned new tensors.

    Tracing may run the forward several times, so more calls are recorded than the graph holds in the end.
    """

    def __init__(self, originals: Originals, device: torch.device) -> None:
        self.calls: list[RecordedCall] = []
        self.returned: Structure | None = None
        self.assigned_buffers: tuple[str, ...] = ()
        self.failure: tuple[Unit, Exception] | None = None
        self._originals = originals
        self._device = device
        self._inside_unit = False
        self._module_methods = ModuleMethods.current()

    def make_opaque(self, unit: Unit) -> None:
        """Replace the unit's call and forward; `model_state.preserved` puts both back."""
        module, original = unit.module, unit.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if self._inside_unit else self._call(unit, args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return call_uncompiled(module, *args, **kwargs) if self._inside_unit else self._call(unit, args, kwargs)

        vars(module)["forward"] = forward
        replace_call(module, call)

    def _call(self, unit: Unit, args: Sequence[object], kwargs: dict[str, object]) -> Any:
        try:
            tensors, sizes, structure = flatten_call(args, kwargs, _name(unit))
        except Exception as error:
            self.failure = self.failure or (unit, error)
            raise
        self.calls.append(RecordedCall(unit, structure))
        results = torch.ops.megatrain_fx.unit(tensors, sizes, len(self.calls) - 1)
        outputs = self.calls[len(self.calls) - 1].outputs
        assert outputs is not None
        return outputs.rebuild(results)

    def infer(self, tensors: list[torch.Tensor], sizes: list[int], call_id: int) -> list[torch.Tensor]:
        """Run a recorded call on fake tensors: fresh tensors like the unit's results."""
        call, self._inside_unit = self.calls[call_id], True
        versions = [tensor._version for tensor in tensors]
        try:
            with preserved(call.unit.module), self._module_methods.restored(), ignoring_data_dependent_sizes():
                results = self._run(call, tensors, sizes)
            call.mutated_inputs = tuple(i for i, old in enumerate(versions) if tensors[i]._version != old)
            return results
        except Exception as error:
            self.failure = self.failure or (call.unit, error)
            raise
        finally:
            self._inside_unit = False

    def _run(self, call: RecordedCall, tensors: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        args, kwargs = call.arguments.rebuild([*tensors, *sizes])
        module, name = call.unit.module, _name(call.unit)
        try:
            results, call.outputs = flatten_outputs(call_uncompiled(module, *args, **kwargs), name)
        except MegatrainError:
            raise
        except Exception as error:  # data-dependent, or an operator whose fake kernel refuses what its real one takes
            trial = run_on_random_inputs(call.unit, call.arguments, [*tensors, *sizes], self._originals, self._device, error)
            results, call.outputs = trial
        for result in results:
            _check_sizes(result, name)
        # A custom operator may not return its inputs or one tensor twice, so only the metadata are passed on.
        return [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=r.device) for r in results]


active_recorder: contextvars.ContextVar[UnitRecorder] = contextvars.ContextVar("active_recorder")


@torch.library.custom_op("megatrain_fx::unit", mutates_args=())
def unit_operator(tensors: list[torch.Tensor], sizes: list[int], call_id: int) -> list[torch.Tensor]:
    """The opaque operator; in a captured graph it is replaced by a `UnitCall`."""
    raise RuntimeError("megatrain_fx::unit stands for a unit during a capture only and cannot be run")


@unit_operator.register_fake
def _infer(tensors: list[torch.Tensor], sizes: list[int], call_id: int) -> list[torch.Tensor]:
    return active_recorder.get().infer(tensors, sizes, call_id)


def _name(unit: Unit) -> str:
    return f"unit {unit.path} ({type(unit.module).__name__})"


def _check_sizes(result: torch.Tensor, name: str) -> None:
    if any(is_data_dependent_size(size) for size in result.shape):
        raise CaptureError(
            f"{name} returns a tensor whose shape depends on the values of its inputs, so no schedule can be "
            "made for it. Return a tensor of fixed size (padded, or masked by torch.where), or move what follows into the unit."
        )
