"""The base of optimizers whose steps overlap with forward and backward passes."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Unpack

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from megatrain_fx.errors import ConfigError, OptimizerError
from megatrain_fx.extension import runtime as native
from megatrain_fx.ir import Rows
from megatrain_fx.optim.region_memory import REMAINDER
from megatrain_fx.optim.region_steps import RegionSteps
from megatrain_fx.optim.stage_options import CheckedOptions, StageOptions, compiled_state
from megatrain_fx.optim.step_record import StepRecord, option_values
from megatrain_fx.optim.trained_parameters import TrainedParameters, saved_state
from megatrain_fx.row_selection import RowSelection
from megatrain_fx.store import HostStore


class StageOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that updates the host store region by region, on threads of its own.

    The numbers are those of the serial order, whenever the updates run:

    - By default a region is updated during the backward pass, as soon as its gradients are home; ``step()`` has nothing
      left to do. What an update depends on must not change between ``backward()`` and ``step()``: options of parameter
      groups, or gradients (use ``max_grad_norm`` to clip). If a backward pass fails, the regions that it has completed
      are updated, the others are not (of a tied embedding, perhaps the rows that were not looked up).
    - With ``max_grad_norm`` the norm is known only after the backward pass. ``step()`` starts all updates and returns;
      they run during the next forward pass, each prefetch waiting for its own. If the norm is infinite or NaN the step
      is skipped: nothing changes but ``skipped_steps``.
    - With ``during_backward=False`` likewise, without a norm.

    A subclass names its float32 state in ``state_names`` and makes a C++ update in :meth:`make_update`; see
    :mod:`megatrain_fx.optim.lion` for an example.
    """

    state_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, model: nn.Module, params: ParamsT | None, defaults: dict[str, Any], **options: Unpack[StageOptions]
    ) -> None:
        """Attach to a compiled model. State is allocated when a parameter is first updated.

        Args:
            model: a compiled model without another such optimizer.
            params: its parameters to train, or groups of them; all trainable ones by default.
            defaults: options of a parameter group and their values.
            **options: see :class:`megatrain_fx.optim.stage_options.StageOptions`.

        Raises:
            ConfigError: an option has a value that cannot work, or the model is not compiled.
        """
        self._streamed = compiled_state(model)
        self._options = CheckedOptions.of(options, self._streamed.config.precision)
        self._trained = TrainedParameters(model, self._streamed.config.precision)
        if params is None:
            params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(params, {**defaults, "stochastic_seed": self._options.stochastic_seed})
        self._steps = RegionSteps(self._trained, self._options, self.state_names)
        self._streamed.optimizer = self

    def make_update(self, group: Mapping[str, Any], **step: Any) -> native.Update:
        """The C++ update of a parameter group's parameters.

        Args:
            group: the parameter group.
            **step: what every ``*_update`` function of the runtime takes: step, grad_scale, stochastic_seed.
        """
        raise NotImplementedError

    def states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the float32 state that the parameters of a group have; all of ``state_names`` by default."""
        return self.state_names

    @property
    def grad_norm(self) -> float | None:
        """Total 2-norm of the last step's gradients before clipping; None without ``max_grad_norm``."""
        return self._steps.grad_norm

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because the norm was infinite or NaN."""
        return self._steps.skipped

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state allocated in host memory."""
        return self._steps.states.bytes

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient and was not updated during the backward pass.

        Returns before the updates are done; whatever needs the parameters waits for them.

        Args:
            closure: computes gradients and returns the loss, which is passed on.

        Raises:
            OptimizerError: an option or a gradient was changed after updates were made with it.
            ExecutionError: an earlier update failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._streamed.store is not None:
            self._steps.settle(self, self._streamed.store)
        record, self._steps.record = self._steps.record, StepRecord()
        change = record.change_since(self._store, self.param_groups) if record.versions else None
        if change is not None:
            raise OptimizerError(
                f"{change} was changed between backward() and step(), but parameters were updated during backward() "
                f"already: change it before, clip with max_grad_norm=, or make the optimizer with during_backward=False"
            )
        due = [n for n, p in self._trained.by_name.items() if p.grad is not None and n not in record.versions]
        if due:
            self._steps.update(self, self._store, due)
        return loss

    def synchronize(self) -> None:
        """Wait until no update is pending.

        Raises:
            ExecutionError: one failed.
        """
        self._steps.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero once no update is pending that reads them.

        Raises:
            OptimizerError: updates were made during the backward pass, and ``step()`` was not called since.
        """
        if self._steps.record.versions:
            raise OptimizerError(
                "parameters were updated during backward() already, so this step cannot be skipped: call step() before "
                "zero_grad(), or make the optimizer with during_backward=False"
            )
        if not set_to_none:
            self.synchronize()
        super().zero_grad(set_to_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by ``torch.amp.GradScaler.step``: gradients are unscaled only after the backward pass.

        Raises:
            OptimizerError: updates were made with scaled gradients.
        """
        if self._options.during_backward and not self.measures_norm:
            raise OptimizerError(
                "GradScaler unscales gradients after the backward pass, but parameters are updated during it: make the "
                "optimizer with during_backward=False (bfloat16 needs no GradScaler)"
            )
        return False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model.

        Raises:
            ConfigError: one is none of the model's, or of a type that the optimizer cannot update.
        """
        super().add_param_group(param_group)
        added = self.param_groups[-1]["params"]
        try:
            self._trained.check(added)
        except ConfigError:
            self.param_groups.pop()
            raise
        self._trained.add(added, len(self.param_groups) - 1)

    def state_dict(self) -> dict[str, Any]:
        """The state once no update is pending, in PyTorch's form; tensors are not copied."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, of this or of PyTorch's optimizer of that name; the values are copied into the regions.

        It may come before or after the model's own: remainders belong to the parameters that the next step finds.

        Raises:
            ValueError: parameter groups do not match.
            ConfigError: shapes do not match.
        """
        self.synchronize()
        loaded: dict[torch.Tensor, dict[str, Any]] = {}

        # PyTorch would convert the float32 state of a bfloat16 parameter to bfloat16.
        def set_aside(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            loaded.update(saved_state(self.param_groups, given))
            return {**given, "state": {}}

        before = self.register_load_state_dict_pre_hook(set_aside)
        after = self.register_load_state_dict_post_hook(lambda _: self._take_over(loaded), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(f"{type(self).__name__} owns threads and memory: keep its state_dict() instead of copying it")

    # The rest is what the compiled model asks for: see megatrain_fx.region_updater.

    @property
    def queue(self) -> native.UpdateQueue:
        """Where updates wait for their turn."""
        return self._steps.queue

    @property
    def updates_during_backward(self) -> bool:
        """Whether the next backward pass completes the gradients of a step, and regions are updated during it."""
        completes = self._steps.record.backwards + 1 >= self._options.accumulation_steps
        return completes and self._options.during_backward and not self.measures_norm

    @property
    def measures_norm(self) -> bool:
        """Whether gradients are measured as they come home."""
        return self._options.max_grad_norm is not None

    def update_task(self, region: int, rows: Rows = Rows.ALL) -> native.UpdateTask | None:
        """The step of a region or a part; None if nothing there is trained, or no gradients are reserved for it."""
        if not self._trains(region):
            return None
        memory = self._steps.states.memory(self._store, region)
        return memory.lookup_update if rows is Rows.CHOSEN else memory.update

    def norm_task(self, region: int) -> native.NormTask | None:
        """The sum of squares of a region's gradients; None as for :meth:`update_task`."""
        return self._steps.states.memory(self._store, region).norm if self._trains(region) else None

    def priority(self, region: int) -> int:
        """Regions are numbered in the order in which a forward pass first needs them, and updated in that order."""
        return region

    def begin_backward(self, names: Collection[str]) -> None:
        """Get ready for a backward pass that may give gradients to these parameters.

        Raises:
            OptimizerError: the updates of this step were made already.
            ExecutionError: an earlier update failed.
        """
        members = [name for name in names if name in self._trained.by_name]
        if not members or not (self.updates_during_backward or self.measures_norm):
            return
        self._steps.settle(self, self._store)
        record, steps = self._steps.record, self._options.accumulation_steps
        if record.backwards >= steps and not self.measures_norm:
            raise OptimizerError(
                f"this is backward pass {record.backwards + 1} since the last optimizer.step(), but parameters were "
                f"updated during pass {steps} already: make the optimizer with accumulation_steps=N for N "
                f"passes a step, or with during_backward=False"
            )
        record.options = [option_values(group, self.defaults) for group in self.param_groups]
        self._steps.arm(self, self._store, members)

    def narrow(self, region: int, names: Collection[str], selection: RowSelection | None = None) -> None:
        """Learn, before a region's update or norm is due, which parameters have received gradients in this pass.

        The others are left alone, unless they have gradients from an earlier pass.
        """
        self._steps.narrow(self, self._store, region, names, selection)

    def end_backward(self, names: Collection[str]) -> None:
        """Learn that a backward pass is over, and which parameters received gradients."""
        if any(name in self._trained.by_name for name in names):
            self._steps.record.backwards += 1
        self._steps.disarm(self, self._store, names)

    @property
    def _store(self) -> HostStore:
        if self._streamed.store is None:
            raise OptimizerError("parameters have gradients, but the compiled model was never called: call it first")
        return self._streamed.store

    def _trains(self, region: int) -> bool:
        store = self._streamed.store
        if store is None or store.gradient_bytes(region) == 0:
            return False
        return any(self._trained.by_name[n].requires_grad for n in self._trained.in_region(store.layout, region))

    def _take_over(self, loaded: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Keep loaded state, in the regions if they exist; options that it lacks keep their defaults."""
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)
        for parameter, state in loaded.items():
            known = {key: state[key] for key in (*self.state_names, REMAINDER) if state.get(key) is not None}
            self.state[parameter] = {"step": int(state.get("step", bool(known))), **known}
        self._steps.take_over(self, self._streamed.store)
