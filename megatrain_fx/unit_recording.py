"""Unit recording: during a capture a call of a unit is one opaque operator, whose shapes come from a fake run."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from megatrain_fx.errors import CaptureError, DataDependentGlueError, MegatrainError
from megatrain_fx.execution_modes import Autocast, ExecutionModes
from megatrain_fx.host_randomness import HostRandomState
from megatrain_fx.model_state import Assignments, preserved
from megatrain_fx.private_api import (
    DATA_DEPENDENT_ERRORS,
    ModuleMethods,
    call_uncompiled,
    ignoring_data_dependent_sizes,
    is_data_dependent_size,
    is_of_torch,
    replace_call,
    replaced_apply,
    size_symbols,
)
from megatrain_fx.signature import Structure, flatten_call, read_modes
from megatrain_fx.unit_call import flatten_outputs
from megatrain_fx.unit_trial import Originals, TrialError, UnitTrial
from megatrain_fx.units import Unit

_FIXED_SIZE = "Use a tensor of fixed size (padded, or masked by torch.where)"


@dataclasses.dataclass
class RecordedCall:
    """One call of a unit while the model was traced; `outputs` is known once the call has run.

    `mutated_inputs` are positions of the values that a real run, if one was needed, modified in place.
    """

    unit: Unit
    arguments: Structure
    autocast: ExecutionModes
    outputs: Structure | None = None
    mutated_inputs: tuple[int, ...] = ()


class UnitRecorder:
    """Records the calls of a model's units during one capture.

    Tracing may run the forward several times, so more calls are recorded than the graph holds in the end.

    Attributes:
        calls: in the order of the calls.
        returned: the structure that the model returned.
        assignments: what the glue assigned to modules.
        specialising: classes of units that forced a value upon a symbolic size.
        failure: what went wrong first in or at a unit.
    """

    def __init__(
        self,
        originals: Originals,
        device: torch.device,
        on_plain_sizes: frozenset[type[nn.Module]] = frozenset(),
    ) -> None:
        """Units of the classes `on_plain_sizes` are run on plain sizes in place of symbolic ones, if that suffices."""
        self.calls: list[RecordedCall] = []
        self.returned: Structure | None = None
        self.assignments = Assignments()
        self.specialising: set[type[nn.Module]] = set()
        self.failure: tuple[Unit, Exception] | None = None
        self._originals = originals
        self._device = device
        self._on_plain_sizes = on_plain_sizes
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

    @contextlib.contextmanager
    def functions_opaque(self) -> Iterator[None]:
        """Record custom autograd functions of the glue as calls too: tracing would look into them and lose backward."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
                if self._inside_unit or is_of_torch(function):
                    return original(function, *args, **kwargs)
                return self._call(Unit(function.__name__, AppliedFunction(function)), args, kwargs)

            return apply

        with replaced_apply(make):
            yield

    def _call(self, unit: Unit, args: Sequence[object], kwargs: dict[str, object]) -> Any:
        try:
            tensors, sizes, structure = flatten_call(args, kwargs, _name(unit))
            if any(is_data_dependent_size(size) for size in _shapes(tensors)):
                raise DataDependentGlueError(
                    f"{_name(unit)} is given a tensor whose shape depends on the values of a tensor, so no schedule "
                    f"can be made for it. {_FIXED_SIZE}, or select inside the unit."
                )
        except Exception as error:
            self.failure = self.failure or (unit, error)
            raise
        self.calls.append(RecordedCall(unit, structure, self._autocast()))
        call_id = len(self.calls) - 1
        # One parameter that requires gradients makes the results require them, as far as the glue can see.
        trainable = [parameter for parameter in unit.module.parameters() if parameter.requires_grad][:1]
        results = torch.ops.megatrain_fx.unit(tensors, sizes, trainable, call_id)
        outputs = self.calls[call_id].outputs
        assert outputs is not None
        return outputs.rebuild(results)

    def _autocast(self) -> ExecutionModes:
        states = read_modes(sorted({"cpu", self._device.type})).autocast
        return ExecutionModes(None, tuple(Autocast(kind, dtype, enabled, None) for kind, enabled, dtype in states))

    def infer(self, tensors: list[torch.Tensor], sizes: list[int], call_id: int) -> list[torch.Tensor]:
        """Run a recorded call on fake tensors: fresh tensors like the unit's results."""
        call, self._inside_unit = self.calls[call_id], True
        randomness = HostRandomState.read()
        symbolic = [size for size in (*_shapes(tensors), *sizes) if size_symbols(size)]
        try:
            # On its way to this operator the dispatcher left autocast behind; the unit's operators must meet it.
            with self._module_methods.restored(), ignoring_data_dependent_sizes(), call.autocast.active():
                results, call.outputs = self._run(call, [*tensors, *sizes])
        except Exception as error:
            self.failure = self.failure or (call.unit, error)
            raise
        finally:
            self._inside_unit = False
            randomness.restore()
        if not all(size_symbols(size) for size in symbolic):
            self.specialising.add(type(call.unit.module))
        # A custom operator may not return its inputs or one tensor twice, so only the metadata are passed on.
        return [torch.empty_strided(r.shape, r.stride(), dtype=r.dtype, device=r.device) for r in results]

    def _run(self, call: RecordedCall, values: list[torch.Tensor | int]) -> tuple[list[torch.Tensor], Structure]:
        trial = UnitTrial(call.unit, call.arguments, values)
        if type(call.unit.module) in self._on_plain_sizes:
            with contextlib.suppress(TrialError):
                return trial.run()
        try:
            results, outputs = self._run_symbolically(call, values)
        except MegatrainError:
            raise
        except Exception as error:  # data-dependent, or an operator whose fake kernel refuses what its real one takes
            results, outputs = self._run_really(trial, error)
            call.mutated_inputs = tuple(sorted(trial.mutated))
        if any(is_data_dependent_size(size) for size in _shapes(results)):
            raise CaptureError(
                f"{_name(call.unit)} returns a tensor whose shape depends on the values of its inputs, so no schedule "
                f"can be made for it. {_FIXED_SIZE}, or move what follows into the unit."
            )
        return results, outputs

    def _run_symbolically(
        self, call: RecordedCall, values: list[torch.Tensor | int]
    ) -> tuple[list[torch.Tensor], Structure]:
        args, kwargs = call.arguments.rebuild(values)
        with preserved(call.unit.module):
            return flatten_outputs(call_uncompiled(call.unit.module, *args, **kwargs), _name(call.unit))

    def _run_really(self, trial: UnitTrial, reason: Exception) -> tuple[list[torch.Tensor], Structure]:
        try:
            return trial.run_really(self._originals, self._device)
        except TrialError as error:
            if not isinstance(reason, DATA_DEPENDENT_ERRORS):
                raise reason from None
            raise CaptureError(
                f"{_name(trial.unit)} depends on the values of tensors, so a real run is needed to know what it "
                f"returns; but {error}."
            ) from reason


class AppliedFunction(nn.Module):
    """Stands for a custom autograd function that the glue applies, where a unit's module is expected."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


active_recorder: contextvars.ContextVar[UnitRecorder] = contextvars.ContextVar("active_recorder")


@torch.library.custom_op("megatrain_fx::unit", mutates_args=())
def unit_operator(
    tensors: list[torch.Tensor], sizes: list[int], trainable: list[torch.Tensor], call_id: int
) -> list[torch.Tensor]:
    """The opaque operator; in a captured graph it is replaced by a `UnitCall`."""
    raise RuntimeError("megatrain_fx::unit stands for a unit during a capture only and cannot be run")


@unit_operator.register_fake
def _infer(
    tensors: list[torch.Tensor], sizes: list[int], trainable: list[torch.Tensor], call_id: int
) -> list[torch.Tensor]:
    return active_recorder.get().infer(tensors, sizes, call_id)


def _name(unit: Unit) -> str:
    if isinstance(unit.module, AppliedFunction):
        return f"autograd function {unit.path}"
    return f"unit {unit.path} ({type(unit.module).__name__})"


def _shapes(tensors: Sequence[torch.Tensor]) -> list[int | torch.SymInt]:
    return [size for tensor in tensors for size in tensor.shape]
