"""The state behind one compiled model: its host store, device buffers, lanes, and a program for each kind of call."""

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from megatrain_fx.bound_schedule import BoundSchedule
from megatrain_fx.capture import capture
from megatrain_fx.compiled_stage_runner import CompiledStageRunner
from megatrain_fx.compiled_template import CompiledTemplate, compile_templates
from megatrain_fx.config import StreamConfig
from megatrain_fx.device_buffers import DeviceBuffers
from megatrain_fx.driver import driver_of
from megatrain_fx.eager_streaming import call_eagerly
from megatrain_fx.errors import (
    CaptureError,
    InputDeviceError,
    OutputTreeError,
    StaleWeightsError,
    UnsupportedInputError,
)
from megatrain_fx.execution_modes import Autocast, ExecutionModes
from megatrain_fx.extension import runtime as native
from megatrain_fx.facts import UpdateMode, Updates
from megatrain_fx.layout import Layout
from megatrain_fx.model_parts import ModelParts
from megatrain_fx.model_state import preserved
from megatrain_fx.parameter_hooks import refuse_accumulation_hooks, refuse_gradient_hooks, run_accumulation_hooks
from megatrain_fx.private_api import release_pinned_cache
from megatrain_fx.program import Program, build_program
from megatrain_fx.program_cache import ProgramCache
from megatrain_fx.region_updater import RegionUpdater
from megatrain_fx.registration import Registration
from megatrain_fx.run import RandomState, Run
from megatrain_fx.signature import InputSignature, ModelFlags, flatten_inputs
from megatrain_fx.stage_runner import StageRunner
from megatrain_fx.store import HostStore


class StreamedModel:
    """Owns everything that a compiled model has beyond the original one.

    Invariant: one schedule runs at a time; slots, slabs and lanes are shared by all programs.
    """

    _capturing: ClassVar[Any] = threading.RLock()  # torch.export exchanges methods of all modules while it traces

    def __init__(self, model: nn.Module, forward_class: type[nn.Module], config: StreamConfig) -> None:
        self.config = config
        self.forward_class = forward_class
        self.programs = ProgramCache()
        self.registration = Registration(driver_of(config.device) if config.pin == "register" else None)
        self.buffers = DeviceBuffers(config.device, self.registration)
        self.store: HostStore | None = None
        self._flags = ModelFlags(model)
        self._parts: ModelParts | None = None
        self._refused: dict[InputSignature, CaptureError] = {}
        self._lanes = native.Runtime(config.device, config.chaos)
        self._bound: dict[tuple[int, bool, Updates], BoundSchedule] = {}
        self._latest: tuple[Run, Updates] | None = None
        self._optimizer: weakref.ref[RegionUpdater] | None = None
        self._compiled: dict[int, dict[int, CompiledTemplate]] = {}
        self._timed: set[int] = set()  # programs whose kernels have been run once
        self._running = threading.RLock()

    def prepare(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Program, list[torch.Tensor]]:
        """The program for a call, captured if no earlier one serves, and the call's distinct tensors.

        Raises:
            InputDeviceError: a tensor is on another device than the templates.
            ModelChangedError: the model has other parameters or modules than at its first call.
            CaptureError: see :func:`megatrain_fx.capture.capture`.
        """
        with self._running:
            self._follow_changes(model)
            tensors, structure = flatten_inputs(model, args, kwargs)
            signature = self._flags.signature(tensors, structure)
            program = self._find(signature)
            if program is None:
                self._check_devices(tensors)
                move_buffers(model, self.config.device)  # before capture, whose graphs hold the buffers they use
                signature = self._flags.signature(tensors, structure)
                program = self._find(signature) or self._new_program(model, args, kwargs, signature)
        return program, tensors

    def _follow_changes(self, model: nn.Module) -> None:
        """Take the model as it is until its first call; afterwards only buffers may be others."""
        if self._parts is None:
            self._flags = ModelFlags(model)
            return
        self._parts.check()
        if self._parts.buffers_changed():
            move_buffers(model, self.config.device)

    def _find(self, signature: InputSignature) -> Program | None:
        if signature in self._refused:
            raise self._refused[signature]
        return self.programs.find(signature)

    @property
    def optimizer(self) -> RegionUpdater | None:
        """The optimizer whose updates are operations of the schedule."""
        return None if self._optimizer is None else self._optimizer()

    @optimizer.setter
    def optimizer(self, optimizer: RegionUpdater) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._bound = {key: bound for key, bound in self._bound.items() if key[2] == Updates()}  # not the last one's

    def updates(self, layout: Layout) -> Updates:
        """What the optimizer will do in the schedule of the next step."""
        optimizer = self.optimizer
        if optimizer is None or not (optimizer.updates_during_backward or optimizer.measures_norm):
            return Updates()
        regions = [r.index for r in layout.regions if optimizer.update_task(r.index) is not None]
        mode = UpdateMode.DURING_BACKWARD if optimizer.updates_during_backward else UpdateMode.AFTER_CLIP
        return Updates(mode, tuple(regions))

    def call_eagerly(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the model's own Python, unit by unit, without gradients: for calls that cannot be captured."""
        self.synchronize()
        with self._running:
            move_buffers(model, self.config.device)
            return call_eagerly(model, self.forward_class, args, kwargs, self.config.device)

    def synchronize(self) -> None:
        """Wait until no update of a parameter is pending.

        Raises:
            RuntimeError: an update failed.
        """
        for gate in self.store.gates if self.store is not None else ():
            gate.wait()

    def start(self, program: Program, inputs: Sequence[torch.Tensor]) -> tuple[Run, list[torch.Tensor]]:
        """Run the forward pass of one call; returns its state and the values that the model returns."""
        assert self.store is not None
        self.store.reclaim()
        if program.training:
            refuse_gradient_hooks(self.store.parameters)
        run = Run.of_inputs(inputs, _autocast_modes(self.config.device))
        run.weights_version = self.store.version()
        with self._running:
            self._latest = None
            updates = self.updates(program.layout) if program.training else Updates()
            self._bind(program, False, updates).forward(run)
            self._latest = (run, updates) if program.training else None
        outputs = [run.returned[name] for name in program.facts.outputs]
        run.returned = {}
        return run, outputs

    def finish(
        self, program: Program, run: Run, gradients: Sequence[torch.Tensor | None], keep: bool, trains: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward pass of a call.

        Args:
            program: the program of the call.
            run: its state.
            gradients: of the values that the model returned; None where there is none.
            keep: another backward pass will follow (``retain_graph=True``).
            trains: gradients of parameters are wanted too.

        Returns:
            The gradients of the model's inputs.

        Raises:
            StaleWeightsError: a parameter was modified since the forward pass.
            ParameterHookError: a parameter has a hook that cannot be run.
        """
        assert self.store is not None
        if self.store.version() != run.weights_version:
            raise StaleWeightsError(
                "a parameter was modified in place between the forward pass and this backward pass, which reruns the "
                "forward and would see the new value; call backward before optimizer.step() or load_state_dict(). If a "
                "loss comes from several calls, the backward of each is a pass of its own: make an optimizer of "
                "megatrain.optim with accumulation_steps=N for N calls"
            )
        if trains:
            refuse_gradient_hooks(self.store.parameters)
        run.begin_backward(zip(program.facts.outputs, gradients, strict=True), keep, trains)
        with self._running:
            run.homes = {name: self.store.adopt_gradient(name) for name in self._trainable(program)} if trains else {}
            updates = self.updates(program.layout) if trains else Updates()
            if updates.mode is not UpdateMode.NONE:
                refuse_accumulation_hooks(self.store.parameters)
            resume = self._latest is None or self._latest[0] is not run or self._latest[1] != updates
            self._latest = None
            bound = self._bind(program, resume, updates)
            if trains and self.optimizer is not None:
                self.optimizer.begin_backward(run.homes)
            try:
                bound.resume(run) if resume else bound.backward(run)
            except BaseException:
                self.store.withdraw_gradients(run.published)
                raise
            self._release_pinned_cache(program)
            if trains and self.optimizer is not None:
                self.optimizer.end_backward(run.trained)
        run_accumulation_hooks(self.store.parameters, tuple(run.trained))
        inputs = len(program.capture.signature.tensors)
        return [run.gradients.get(f"grad.input.{position}") for position in range(inputs)]

    def _release_pinned_cache(self, program: Program) -> None:
        """Inductor times kernels when they first run, on copies in pinned memory that PyTorch would keep: gigabytes."""
        if self.config.template == "inductor" and self.config.device.type == "cuda" and id(program) not in self._timed:
            self._timed.add(id(program))
            release_pinned_cache()

    def _new_program(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        signature: InputSignature,
    ) -> Program:
        random = RandomState.read(self.config.device)
        with preserved(model), self._capturing:  # attributes that modules set in fake runs must not stay
            captured = self._capture(model, args, kwargs, signature)
            program = build_program(model, captured, self.config, self.store.layout if self.store else None)
        random.restore(self.config.device)
        self._take_over(model, program)
        self.programs.add(signature, program)
        return program

    def _capture(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], signature: InputSignature
    ) -> Any:
        options: dict[str, Any] = {"device": self.config.device, "forward_class": self.forward_class}
        if self.programs.knows_kind(signature):
            try:
                return capture(model, args, kwargs, dynamic=True, **options)
            except CaptureError:
                pass  # a model that cannot take symbolic sizes is captured for each shape
        try:
            return capture(model, args, kwargs, **options)
        except (OutputTreeError, UnsupportedInputError) as error:
            self._refused[signature] = error  # capturing takes seconds, and would fail again
            raise

    def _take_over(self, model: nn.Module, program: Program) -> None:
        """Move parameters to the store and buffers to the device, if this is the first program; reserve gradients."""
        if self.store is None:
            self.store = self._new_store(model, program.layout)
            self._parts = ModelParts(model)
        for region, facts in enumerate(program.facts.regions):
            if facts.gradient_bytes and self.store.reserve_gradients(region, facts.gradient_bytes):
                self._bound.clear()

    def _new_store(self, model: nn.Module, layout: Layout) -> HostStore:
        config = self.config
        return HostStore(model, layout, config.device, config.pin, self.registration, config.staging_bytes)

    def _bind(self, program: Program, resume: bool, updates: Updates) -> BoundSchedule:
        """The schedule of one kind of step, bound to memory at its first use."""
        key = (id(program), resume, updates)
        if key not in self._bound:
            assert self.store is not None
            as_built = not resume and updates == Updates()
            schedule = program.schedule if as_built else program.lower(resume=resume, updates=updates).schedule
            binding = (self._runners(program), self.store, self.buffers, self._lanes, self.optimizer)
            self._bound[key] = BoundSchedule(schedule, program, *binding)
        return self._bound[key]

    def _runners(self, program: Program) -> list[StageRunner]:
        assert self.store is not None
        names = {id(parameter): name for name, parameter in self.store.parameters.items()}
        compiled = self._compile(program)
        runners: list[StageRunner] = []
        for stage, trace, facts in zip(program.stages, program.traces, program.facts.stages, strict=True):
            binding = (
                stage,
                trace,
                {local: names[id(parameter)] for local, parameter in stage.parameters},
                facts.differentiable_inputs,
                self.config.device,
                self._lanes.chaos,
                program.capture.signature.modes.grad,
            )
            template = compiled.get(stage.index)
            runners.append(StageRunner(*binding) if template is None else CompiledStageRunner(template, *binding))
        return runners

    def _compile(self, program: Program) -> dict[int, CompiledTemplate]:
        """The program's compiled templates, by stage: made once, however often schedules are bound."""
        if id(program) not in self._compiled:
            self._compiled[id(program)] = compile_templates(program, self.config)
        return self._compiled[id(program)]

    def _trainable(self, program: Program) -> list[str]:
        names = {id(parameter): name for name, parameter in self.store.parameters.items()} if self.store else {}
        used = {id(p) for stage in program.stages for _, p in stage.parameters if p.requires_grad}
        return [names[identity] for identity in used]

    def _check_devices(self, tensors: Sequence[torch.Tensor]) -> None:
        device = self.config.device
        for position, tensor in enumerate(tensors):
            scalar = tensor.device.type == "cpu" and tensor.ndim == 0
            if tensor.device != device and not scalar:
                raise InputDeviceError(
                    f"input tensor {position} (shape {list(tensor.shape)}) is on {tensor.device}, but the model "
                    f"computes on {device}; move it there with .to('{device}')"
                )


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Buffers stay on the compute device, where forwards read and update them; a shared buffer stays shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            setattr(module, name, moved[id(buffer)])


def _autocast_modes(device: torch.device) -> ExecutionModes:
    """Autocast as it is now, to be entered again where a stage is rerun on another thread."""
    types = dict.fromkeys(("cpu", device.type))
    cached = torch.is_autocast_cache_enabled()
    settings = (Autocast(t, torch.get_autocast_dtype(t), torch.is_autocast_enabled(t), cached) for t in types)
    return ExecutionModes(True, tuple(settings))
